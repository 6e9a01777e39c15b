# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Confines its own process, then runs one program in it. A script of its own: `sandbox` starts it, nothing imports it.

    python -I -S -B confine.py '{"source": ..., "limits": {...}, "isolation": [...], "readable": [...], "status": fd}'

Contract. The program runs only when everything that was asked for is in force; else what is missing is written to
the status pipe and the process ends. Two mechanisms of Linux that need no privilege, on top of resource limits:

* ``seccomp``: no further process (the limits below are those of one process, so they become the program's), no socket,
  no signal to another process, no tracing, no memory that outlives or escapes the limits, no change of namespaces.
* ``landlock``: no file outside the working directory but Python's own; no look at another process through /proc, its
  environment included.

Standard library only, and fast to start: every test case of every answer pays for it.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys

NO_NEW_PRIVS, SET_SECCOMP, SECCOMP_FILTER = 38, 22, 2
PARENT_DEATH_SIGNAL, SIGKILL = 1, 9
CAPABILITY_VERSION = 0x20080522
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EPERM, ENOSYS = 1, 38

# Names are the kernel's. Common to both machines are the numbers from 424 on.
COMMON = (424, 425, 428, 429, 430, 434, 438, 440, 442, 447)
# pidfd_send_signal io_uring_setup open_tree move_mount fsopen pidfd_open pidfd_getfd process_madvise mount_setattr
# memfd_secret
MACHINES = {
    "x86_64": {
        "audit": 0xC000003E,
        "clone": 56,
        "clone3": 435,
        "signals": (62, 234),  # kill tgkill
        "prlimit": 302,
        "forbidden": (
            *(41, 53),  # socket socketpair
            *(57, 58, 59, 322),  # fork vfork execve execveat
            *(101, 310, 311, 312, 200, 129, 297),  # ptrace process_vm_* kcmp tkill rt_sigqueueinfo rt_tgsigqueueinfo
            *(29, 64, 68, 240, 319),  # shmget semget msgget mq_open memfd_create
            *(272, 308, 165, 166, 155, 161, 304),  # unshare setns mount umount2 pivot_root chroot open_by_handle_at
            *(141, 142, 144, 203, 314, 251),  # setpriority sched_set{param,scheduler,affinity,attr} ioprio_set
            *(135, 298, 321, 323, 248, 249, 250),  # personality perf_event_open bpf userfaultfd add/request_key keyctl
            *(167, 169, 175, 313, 246, 320, 164, 227, 170, 172, 173, 163),  # the machine itself: swapon, reboot, ...
        ),
    },
    "aarch64": {
        "audit": 0xC00000B7,
        "clone": 220,
        "clone3": 435,
        "signals": (129, 131),
        "prlimit": 261,
        "forbidden": (
            *(198, 199),
            *(221, 281),
            *(117, 270, 271, 272, 130, 138, 240),
            *(194, 190, 186, 180, 279),
            *(97, 268, 40, 39, 41, 51, 265),
            *(140, 118, 119, 122, 274, 30),
            *(92, 241, 280, 282, 217, 218, 219),
            *(224, 142, 105, 273, 104, 294, 170, 112, 161, 89),
        ),
    },
}
CLONE_THREAD = 0x10000
LOAD, JUMP_EQUAL, JUMP_BIT, JUMP_FROM, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16

# Landlock's rights over files, by the version of its interface that knows them first.
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
READ = READ_FILE | READ_FOLDER
# Write, remove a file or folder, make a folder or a regular file, truncate.
WRITE = 1 << 1 | 1 << 5 | 1 << 4 | 1 << 7 | 1 << 8 | 1 << 14


class Unavailable(Exception):
    """A mechanism that was asked for is not there."""


def limit_resources(limits):
    """Limits of the kernel on this process; they hold for the program since it cannot start another one."""
    cpu = max(1, int(limits["cpu_s"]))
    for name, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["threads"], limits["threads"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(name, (soft, hard))


def system(libc, what, *arguments):
    """A system call or prctl that must succeed."""
    result = what(*arguments)
    if result < 0:
        raise Unavailable(os.strerror(ctypes.get_errno()))
    return result


def drop_privileges(libc):
    """No capability, which root could raise its limits with, and none to be had again."""
    system(libc, libc.prctl, NO_NEW_PRIVS, 1, 0, 0, 0)
    system(libc, libc.capset, struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24))


def end_with(libc, parent):
    """Be killed when who started this process ends; it keeps the wall clock."""
    system(libc, libc.prctl, PARENT_DEATH_SIGNAL, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def restrict_files(libc, readable, may_write):
    """Landlock: from now on no file but those below these folders, and in the working directory."""
    try:
        version = system(libc, libc.syscall, LANDLOCK_CREATE, None, 0, 1)
    except Unavailable as error:
        raise Unavailable(f"landlock: the kernel does not have it, or it is switched off ({error})") from None
    handled = sum(rights for since, rights in RIGHTS.items() if version >= since)
    # Of version 6: no signal to a process outside, and no abstract socket of one.
    attributes = struct.pack("QQQ", handled, 0, 3) if version >= 6 else struct.pack("Q", handled)
    rules = system(libc, libc.syscall, LANDLOCK_CREATE, attributes, len(attributes), 0)
    for folder, rights in [
        *((folder, READ) for folder in readable),
        (os.getcwd(), READ | WRITE if may_write else READ),
    ]:
        try:
            place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(folder):
            rights &= ~READ_FOLDER
        rule = struct.pack("=Qi", rights & handled, place)
        system(libc, libc.syscall, LANDLOCK_ADD, rules, 1, rule, 0)
        os.close(place)
    system(libc, libc.syscall, LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def restrict_calls(libc):
    """Seccomp: the system calls that lead out of this process fail from now on."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        raise Unavailable(f"seccomp: no filter is written for {platform.machine()}")
    refuse, allow = (RETURN, 0, 0, REFUSE | EPERM), (RETURN, 0, 0, ALLOW)
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, machine["audit"]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        # The numbers of x32, another interface of the same kernel.
        (JUMP_FROM, 0, 1, 0x40000000),
        refuse,
    ]
    for number in (*machine["forbidden"], *COMMON):
        steps += [(JUMP_EQUAL, 0, 1, number), refuse]
    # The C library falls back to clone, whose flags can be looked at.
    steps += [(JUMP_EQUAL, 0, 1, machine["clone3"]), (RETURN, 0, 0, REFUSE | ENOSYS)]
    steps += [(JUMP_EQUAL, 0, 4, machine["clone"]), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_BIT, 1, 0, CLONE_THREAD)]
    steps += [refuse, allow]
    for number in machine["signals"]:
        steps += [(JUMP_EQUAL, 0, 4, number), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_EQUAL, 1, 0, os.getpid())]
        steps += [refuse, allow]
    steps += [(JUMP_EQUAL, 0, 4, machine["prlimit"]), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_EQUAL, 1, 0, 0)]
    steps += [refuse, allow, allow]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer))
    try:
        system(libc, libc.prctl, SET_SECCOMP, SECCOMP_FILTER, program, 0, 0)
    except Unavailable as error:
        raise Unavailable(f"seccomp: the kernel refuses a filter ({error})") from None


def confine(settings):
    """Put everything in force that was asked for."""
    libc = ctypes.CDLL(None, use_errno=True)
    limit_resources(settings["limits"])
    drop_privileges(libc)
    end_with(libc, settings["parent"])
    if "landlock" in settings["isolation"]:
        restrict_files(libc, settings["readable"], settings["limits"]["file_bytes"] > 0)
    if "seccomp" in settings["isolation"]:
        restrict_calls(libc)


def call_function(space, name, arguments, out):
    """Call the named function, or method of ``Solution``, and write its result as JSON."""
    function = space[name] if name in space else getattr(space["Solution"](), name)
    result = json.dumps(function(*arguments))
    with os.fdopen(out, "w") as stream:
        stream.write(result)


def main():
    settings = json.loads(sys.argv[1])
    with open(settings["source"], encoding="utf-8") as file:
        source = file.read()
    call = settings.get("call")
    if call is not None:
        out = os.dup(1)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
    try:
        confine(settings)
    except (Unavailable, OSError, ValueError) as error:
        os.write(settings["status"], str(error).encode())
        os._exit(1)
    os.write(settings["status"], b"+")
    os.close(settings["status"])
    space = {"__name__": "__main__" if call is None else "answer"}
    sys.argv = [settings["source"]]
    exec(compile(source, "answer.py", "exec"), space)
    if call is not None:
        call_function(space, call["name"], call["arguments"], out)


main()
