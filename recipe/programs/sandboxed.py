# SPDX-License-Identifier: Apache-2.0
"""The first code that runs in a sandbox: it limits its own resources, and then runs the program of an answer.

`sandbox` passes the text of this file to the sandbox's Python interpreter. The file uses only the standard library and
starts quickly, because it runs once for every test case of every answer.
"""

import json
import os
import resource
import sys

NOBODY = 65534


def execute(source, call):
    """Run a program.

    With ``call``, a pair (name, arguments), also run the program's function of this name with these arguments, and
    print only its result, as JSON. A Sandbox Fusion service gets only the text of `execute`, which therefore contains
    its own imports.
    """
    import json
    import os

    space = {"__name__": "__main__" if call is None else "answer"}
    if call is None:
        exec(compile(source, "answer.py", "exec"), space)
        return
    # With ``call``, only the function's result is printed; what the program itself prints is discarded.
    out, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    exec(compile(source, "answer.py", "exec"), space)
    name, arguments = call
    function = space[name] if name in space else getattr(space["Solution"](), name)
    result = json.dumps(function(*arguments))
    with os.fdopen(out, "w") as stream:
        stream.write(result)


def main(ready, job_file):
    with os.fdopen(job_file) as file:
        job = json.load(file)
    if os.getuid() == 0:
        # The limit on threads (NPROC) does not apply to root, so run the program as another user.
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    for name, soft, hard in job["limits"]:
        resource.setrlimit(getattr(resource, name), (soft, hard))
    os.write(ready, b"+")
    # Close all other files, among them the pipes that control bubblewrap.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.argv = ["answer.py"]
    execute(job["source"], job["call"])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
