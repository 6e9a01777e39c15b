# SPDX-License-Identifier: Apache-2.0
"""The first code in a sandbox: sets its own resource limits, then runs one program.

`sandbox` passes the text of this file to the sandbox's interpreter. The file uses only the standard library and starts
quickly, because every test case of every answer runs it.
"""

import json
import os
import resource
import sys

NOBODY = 65534


def execute(source, call):
    """Run a program, or with ``call`` (name, arguments) call a function of the program and write its result as JSON.

    A Sandbox Fusion service gets only the text of this function, so the imports are inside the function.
    """
    import json
    import os

    space = {"__name__": "__main__" if call is None else "answer"}
    if call is None:
        exec(compile(source, "answer.py", "exec"), space)
        return
    # With `call`, only the function's result is written; the program's own output is discarded.
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
        # The limit on threads (NPROC) does not apply to root, so the program runs as another user.
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    for name, soft, hard in job["limits"]:
        resource.setrlimit(getattr(resource, name), (soft, hard))
    os.write(ready, b"+")
    # This also closes the pipes that control bubblewrap.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.argv = ["answer.py"]
    execute(job["source"], job["call"])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
