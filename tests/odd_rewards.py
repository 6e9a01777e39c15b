# SPDX-License-Identifier: Apache-2.0
"""Rewards that raise, return, hang, fork, print, exit, allocate and monkeypatch, as a table, and a correct one.

This is the file of a reward function: `compute_score` misbehaves in the way that the answer's text, or ``way`` of its
``extra_info``, names. For tests the table `WAYS` has the result of each call: a score, or the error's text. The ways
are as mild as possible, because they run on the tests' machine.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import gc
import io
import itertools
import json
import locale
import math
import multiprocessing
import os
import pickle
import queue
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parent))  # lets a reward's file import its own modules
from odd_errors import RAISING, WORDS, OwnError, SubText, never_closed

SCORED, RAISED, DIED, LATE = "scored", "raised", "died", "late"


class Way(NamedTuple):
    """A misbehaviour and the result of its call.

    Attributes:
        ends: one of the four above.
        says: the value of a score, or a part of an error's message.
        alone: whether it may also harm later calls in its own process, which docs/rewards.md allows.
    """

    do: Callable[[], Any]
    ends: str
    says: Any
    alone: bool = False


WAYS: dict[str, Way] = {}
HARMLESS: list[str] = []
"""Ways that only raise or return something, which may also run in a reward worker itself."""


def way(name: str, ends: str, says: Any, alone: bool = False) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function to the table."""

    def put(do: Callable[[], Any]) -> Callable[[], Any]:
        WAYS[name] = Way(do, ends, says, alone)
        return do

    return put


def returns(name: str, make: Callable[[], Any], score: Any = None, refused: str | None = None) -> None:
    """Add a way that returns the result of ``make``: with this score, or refused with these words."""
    WAYS[name] = Way(make, SCORED if refused is None else RAISED, score if refused is None else refused)
    HARMLESS.append(name)


# -- exceptions


def cancelled() -> Any:
    raise asyncio.CancelledError


for name, (do, says) in RAISING.items():
    WAYS[name] = Way(do, RAISED, says)
WAYS["MemoryError"] = Way(RAISING["MemoryError"][0], DIED, f"out of memory.*{WORDS}")
WAYS["cancelled"] = Way(cancelled, RAISED, "CancelledError")
HARMLESS += WAYS


@way("finally returns", SCORED, 0.5)
def finally_returns() -> Any:
    try:
        raise ValueError("lost")
    finally:
        return 0.5  # noqa: B012


@way("own event loop", SCORED, 0.25)
def own_event_loop() -> Any:
    async def judge() -> float:
        await asyncio.sleep(0)
        return 0.25

    return asyncio.run(judge())


@way("event loop in an event loop", RAISED, r"asyncio.run\(\) cannot be called from a running event loop")
def loop_in_loop() -> Any:
    async def inner() -> float:
        return 1.0

    async def outer() -> float:
        judged = inner()
        try:
            return asyncio.run(judged)
        finally:
            judged.close()

    return asyncio.run(outer())


# -- results


class Points(enum.Enum):
    FULL = 1.0


class Grade(enum.IntEnum):
    PASS = 1


class Bare:
    """A class that no other process knows."""


class FailingFloat:
    def __float__(self) -> float:
        raise OwnError("no float")


class SelfListing:
    def tolist(self) -> Any:
        return self


class FailingItems(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise OwnError("no items")


class SubFloat(float):
    def __float__(self) -> float:
        raise OwnError("no float")


class SubInt(int):
    def __int__(self) -> int:
        raise OwnError("no int")


class FailingGet(dict):  # type: ignore[type-arg]
    def __getitem__(self, key: Any) -> Any:
        if key != "score":
            raise OwnError("no items")
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        raise OwnError("no items")


class Endless(Mapping):  # type: ignore[type-arg]
    def __getitem__(self, key: Any) -> Any:
        return 1.0

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return itertools.count()


# verl loads the file without entering it in sys.modules, where dataclasses look up postponed annotations.
Report = dataclasses.make_dataclass("Report", [("score", float, 1.0)])


Pair = namedtuple("Pair", ["score", "why"])


def circle() -> Any:
    found: dict[str, Any] = {"score": 1.0}
    found["self"] = found
    return found


def deep() -> Any:
    found: list[Any] = []
    for _ in range(500):
        found = [found]
    return {"score": 1.0, "deep": found}


async def judged_later() -> float:
    return 1.0


returns("float", lambda: 0.5, 0.5)
returns("int", lambda: 1, 1)
returns("bool", lambda: True, True)
returns("nan", lambda: math.nan, math.nan)
returns("infinite", lambda: -math.inf, -math.inf)
returns("none", lambda: None, None)
returns("numpy float", lambda: np.float32(0.5), 0.5)
returns("numpy bool", lambda: np.bool_(True), True)
returns("numpy array of one", lambda: np.array([0.5]), 0.5)
returns("array of none", lambda: np.array(0.25), 0.25)
returns("decimal", lambda: decimal.Decimal("0.5"), 0.5)
returns("fraction", lambda: fractions.Fraction(1, 2), 0.5)
returns("enum", lambda: Points.FULL, 1.0)
returns("int enum", lambda: Grade.PASS, 1)
returns("text", lambda: "0.5", "0.5")
returns("list", lambda: [1.0, 2.0], [1.0, 2.0])
returns("pair", lambda: Pair(1.0, "right"), [1.0, "right"])
returns("dict", lambda: {"score": 0.5, "acc": True, "why": "fits", "parts": [1, {"a": None}]}, 0.5)
returns("ordered dict", lambda: OrderedDict(score=0.5), 0.5)
returns("default dict", lambda: defaultdict(list, score=0.5), 0.5)
returns("user dict", lambda: UserDict(score=0.5), 0.5)
returns("keys of numbers", lambda: {"score": 0.5, 1: "a", None: "b", np.int64(2): "c"}, 0.5)
returns("set", lambda: {"score": 0.5, "tags": {"a"}}, 0.5)
returns("array in a report", lambda: {"score": 0.5, "all": np.arange(3)}, 0.5)
returns("surrogates in a report", lambda: {"score": 0.5, "why": "bad \udc80"}, 0.5)
returns("empty dict", dict, refused="a dict without 'score'; its keys: none")
returns("dict without score", lambda: {"reward": 1.0}, refused="a dict without 'score'; its keys: reward")
returns("key of a tuple", lambda: {"score": 1.0, (1, 2): 3}, refused="has a key of type tuple")
returns("bare object", lambda: {"score": 1.0, "judge": Bare()}, refused=r"result\['judge'\] is of type Bare")
returns("bare score", Bare, refused="result is of type Bare")
returns("data class", Report, refused="is of type Report")
returns("local object", lambda: {"score": 1.0, "f": lambda: 1}, refused=r"result\['f'\] is of type function")
returns("class", lambda: Bare, refused="is of type type")
returns("module", lambda: {"score": 1.0, "m": json}, refused=r"result\['m'\] is of type module")
returns("lock", lambda: {"score": 1.0, "l": threading.Lock()}, refused=r"result\['l'\] is of type lock")
returns("file", lambda: {"score": 1.0, "f": io.StringIO()}, refused=r"result\['f'\] is of type StringIO")
returns("generator", lambda: (n for n in range(3)), refused="is of type generator")
returns("coroutine", judged_later, refused="has to be an `async def` itself")
returns("exception", lambda: OwnError("given"), refused="is of type OwnError")
returns("bytes in a report", lambda: {"score": 1.0, "b": b"\xff"}, refused=r"result\['b'\] is of type bytes")
returns("complex", lambda: 1j, refused="is of type complex")
returns("circle", circle, refused="nested deeper than 64 levels, or contains itself")
returns("deep", deep, refused="nested deeper than 64 levels")
returns("huge text", lambda: {"score": 1.0, "log": "x" * 20_000_000}, refused=r"result\['log'\] is too large")
returns("huge list", lambda: {"score": 1.0, "all": [0] * 5_000_000}, refused="too large")
returns("huge array", lambda: {"score": 1.0, "all": np.zeros(5_000_000)}, refused=r"result\['all'\] is too large")
returns("huge int", lambda: 10**5000, refused="is an int of 16610 bits")
returns("float fails", FailingFloat, refused="OwnError: no float")
returns("lists itself", SelfListing, refused="contains itself")
returns("items fail", lambda: FailingItems(score=1.0), refused="OwnError: no items")
returns("text of its own", lambda: SubText("0.5"), "0.5")
returns("float of its own", lambda: SubFloat(0.5), 0.5)
returns("int of its own", lambda: SubInt(1), 1)
returns("below zero", lambda: -0.0, 0.0)
returns("not a number of decimals", lambda: decimal.Decimal("nan"), math.nan)
returns("a float's end", lambda: 1.7e308, 1.7e308)
returns("masked array", lambda: np.ma.masked_array([0.5], [False]), 0.5)
returns("time of numpy", lambda: np.timedelta64(1, "s"), refused="")
returns("array of objects", lambda: {"score": 1.0, "all": np.array([Bare()])}, refused="is of type Bare")
returns("dict that gets no items", lambda: FailingGet(score=1.0), 1.0)
returns("mapping without end", Endless, refused="too large")
returns("range", lambda: {"score": 1.0, "all": range(3)}, refused="is of type range")
returns("date", lambda: {"score": 1.0, "at": datetime.date(2026, 1, 1)}, refused=r"result\['at'\] is of type date")
returns("path", lambda: {"score": 1.0, "at": Path("/")}, refused=r"result\['at'\] is of type PosixPath")
returns("ellipsis", lambda: ..., refused="is of type ellipsis")
returns("expression", lambda: re.match("a", "a"), refused="is of type Match")
returns("weak reference", lambda: {"score": 1.0, "w": weakref.ref(Bare)}, refused="of type weakref|ReferenceType")
returns("view of memory", lambda: {"score": 1.0, "v": memoryview(b"x")}, 1.0)


# -- other actions of code


@way("prints megabytes", SCORED, 1.0)
def prints() -> Any:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        stream.write("x" * (4 << 20))
    os.write(1, b"y" * (1 << 20))
    return 1.0


@way("asks for input", RAISED, "EOFError")
def asks() -> Any:
    return float(input("score? "))


@way("hangs", LATE, "gave nothing within")
def hangs() -> Any:
    time.sleep(3600)


@way("loops", LATE, "gave nothing within")
def loops() -> Any:
    while True:
        pass


@way("hangs past signals", LATE, "gave nothing within")
def hangs_past_signals() -> Any:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            continue


@way("stops itself", LATE, "gave nothing within")
def stops_itself() -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


@way("leaves at once", DIED, "exit status 7")
def leaves() -> Any:
    os._exit(7)


@way("leaves without a status", DIED, "exit status 0")
def leaves_well() -> Any:
    os._exit(0)


@way("aborts", DIED, "exit status -6")
def aborts() -> Any:
    os.abort()


@way("reads address 0", DIED, "exit status -11")
def segfaults() -> Any:
    ctypes.string_at(0)


@way("kills itself", DIED, "exit status -9")
def kills_itself() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@way("kills its parent", DIED, "ended|closed")
def kills_its_parent() -> Any:
    # If the fork server has ended already, the parent is whoever adopted this process: the test itself.
    if b"forkserver" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
        os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)


@way("kills its group", DIED, "exit status -9")
def kills_its_group() -> Any:
    os.killpg(0, signal.SIGKILL)


@way("forks and both return", SCORED, 0.5)
def forks() -> Any:
    os.fork()
    return 0.5


@way("forks and both raise", RAISED, "of two")
def forks_and_raises() -> Any:
    os.fork()
    raise OwnError("of two")


@way("forks, the parent leaves", DIED, "exit status 9")
def orphans() -> Any:
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(9)


@way("leaves a process", SCORED, 1.0)
def leaves_a_process() -> Any:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    return 1.0


@way("leaves a thread", SCORED, 1.0)
def leaves_a_thread() -> Any:
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return 1.0


@way("leaves a raising thread", SCORED, 1.0)
def leaves_a_raising_thread() -> Any:
    threading.Thread(target=lambda: 1 / 0).start()
    return 1.0


@way("leaves an exit", SCORED, 1.0, alone=True)
def leaves_an_exit() -> Any:
    threading.Timer(0.05, os._exit, [5]).start()
    return 1.0


@way("leaves an alarm", SCORED, 1.0, alone=True)
def leaves_an_alarm() -> Any:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


@way("multiprocessing", SCORED, 0.5)
def pools() -> Any:
    import multiprocessing

    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=sender.send, args=(0.5,))
    child.start()
    score = receiver.recv()
    child.join()
    return score


@way("fills memory", DIED, "out of memory")
def fills_memory() -> Any:
    blocks = []
    while True:
        blocks.append(bytearray(300 << 20))


@way("fills native memory", RAISED, "MemoryError|Unable to allocate|out of memory")
def fills_native_memory() -> Any:
    try:
        return np.ones(1 << 40)
    except MemoryError as error:
        raise OwnError(str(error)) from None


@way("closes files", DIED, "ended|closed")
def closes_files() -> Any:
    os.closerange(0, 256)
    return 1.0


@way("closes streams", SCORED, 1.0, alone=True)
def closes_streams() -> Any:
    for stream in (0, 1, 2):
        with contextlib.suppress(OSError):  # an earlier call in this process has killed it
            os.close(stream)
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    return 1.0


@way("writes to every file", DIED, "ended|wrote")
def writes_everywhere() -> Any:
    for number in range(3, 64):
        try:
            socket.socket(fileno=os.dup(number)).send(b"no answer\n{}\n")
        except OSError:
            continue
    return 1.0


@way("writes an endless line", DIED, "ended|wrote")
def writes_an_endless_line() -> Any:
    channel = next(number for number in range(3, 64) if _is_a_socket(number))
    while True:
        os.write(channel, b"x" * 65536)


@way("changes folder", SCORED, 1.0, alone=True)
def changes_folder() -> Any:
    os.chdir("/")
    return 1.0


@way("changes the environment", SCORED, 1.0, alone=True)
def changes_the_environment() -> Any:
    os.environ.clear()
    os.environ["PYTHONPATH"] = "/nowhere"
    return 1.0


@way("masks signals", SCORED, 1.0, alone=True)
def masks_signals() -> Any:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    return 1.0


@way("starts a session", RAISED, "PermissionError|Operation not permitted")
def starts_a_session() -> Any:
    os.setsid()
    return 1.0


@way("few files", SCORED, 1.0)
def few_files() -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return 1.0


@way("patches builtins", DIED, "ended", alone=True)
def patches_builtins() -> Any:
    builtins.isinstance = builtins.str = builtins.type = None  # type: ignore[assignment, misc]
    return {"score": 1.0}


@way("patches json and os", SCORED, 0.5, alone=True)
def patches_json() -> Any:
    json.dumps = os._exit = os.getpid = None  # type: ignore[assignment]
    socket.socket.sendall = pickle.dumps = None  # type: ignore[assignment, method-assign]
    return 0.5


@way("empties modules", SCORED, 0.5, alone=True)
def empties_modules() -> Any:
    sys.modules.clear()
    return 0.5


@way("traces", SCORED, 0.5, alone=True)
def traces() -> Any:
    sys.settrace(lambda *_: None)
    sys.setprofile(None)
    sys.setrecursionlimit(200)
    return 0.5


@way("no collector", SCORED, 0.5, alone=True)
def no_collector() -> Any:
    gc.disable()
    warnings.simplefilter("error")
    return 0.5


@way("another hook", RAISED, "hooked words", alone=True)
def another_hook() -> Any:
    sys.excepthook = None  # type: ignore[assignment]
    raise OwnError("hooked words")


@way("nice", SCORED, 0.5, alone=True)
def nice() -> Any:
    os.nice(5)
    return 0.5


@way("deadlock", LATE, "gave nothing within")
def deadlock() -> Any:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@way("waits for nobody", LATE, "gave nothing within")
def waits_for_nobody() -> Any:
    return queue.Queue().get()


@way("an odd finalizer", SCORED, 0.5)
def odd_finalizer() -> Any:
    types.SimpleNamespace(x=_Finalized())
    return 0.5


class _Finalized:
    def __del__(self) -> None:
        raise OwnError("in the end")


# -- and things that code leaves behind


@way("exits in a thread", SCORED, 1.0)
def exits_in_a_thread() -> Any:
    thread = threading.Thread(target=sys.exit, args=(9,))
    thread.start()
    thread.join()
    return 1.0


@way("interrupts itself", RAISED, "KeyboardInterrupt")
def interrupts_itself() -> Any:
    # Ignored in what a shell starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)
    return 1.0


@way("terminates itself", DIED, "exit status -15")
def terminates_itself() -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@way("leaves a hook for the end", SCORED, 1.0, alone=True)
def leaves_a_hook() -> Any:
    atexit.register(time.sleep, 3600)
    return 1.0


@way("replaces handlers", SCORED, 1.0, alone=True)
def replaces_handlers() -> Any:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGIO):
        signal.signal(number, lambda *_: None)
    return 1.0


@way("patches time", SCORED, 1.0, alone=True)
def patches_time() -> Any:
    time.time = time.monotonic = time.sleep = lambda *_: -1.0  # type: ignore[assignment]
    return 1.0


@way("patches asyncio and random", SCORED, 1.0, alone=True)
def patches_asyncio() -> Any:
    asyncio.sleep = asyncio.run = random.random = random.seed = None  # type: ignore[assignment]
    return 1.0


@way("patches threads and locks", SCORED, 1.0, alone=True)
def patches_threads() -> Any:
    threading.Thread = threading.Lock = queue.Queue = None  # type: ignore[assignment, misc]
    return 1.0


@way("changes the locale", SCORED, 0.5, alone=True)
def changes_the_locale() -> Any:
    locale.setlocale(locale.LC_ALL, "C")
    os.environ.update(LANG="xx", TZ="Nowhere/Else")
    time.tzset()
    return 0.5


@way("numpy raises", SCORED, 0.5, alone=True)
def numpy_raises() -> Any:
    np.seterr(all="raise")
    np.random.seed(0)
    return 0.5


@way("numpy divides by zero", RAISED, "FloatingPointError")
def numpy_divides() -> Any:
    with np.errstate(all="raise"):
        return np.float64(1.0) / np.float64(0.0)


@way("another start method", SCORED, 0.5, alone=True)
def another_start_method() -> Any:
    multiprocessing.set_start_method("spawn", force=True)
    return 0.5


@way("a pool of processes", SCORED, 3)
def pool_of_processes() -> Any:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return sum(pool.map(int, ["1", "2"]))


@way("leaves a server", SCORED, 1.0)
def leaves_a_server() -> Any:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(5.0)
    if os.fork() == 0:
        os.setsid()
        with contextlib.suppress(OSError):
            server.accept()
        os._exit(0)
    return 1.0


@way("little time", DIED, "exit status -24|exit status -9|gave nothing within")
def little_time() -> Any:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    while True:
        pass


@way("small files", SCORED, 1.0, alone=True)
def small_files() -> Any:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return 1.0


@way("few processes", SCORED, 1.0)
def few_processes() -> Any:
    with contextlib.suppress(OSError):
        subprocess.run(["false"], check=False, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)))
    return 1.0


@way("a mask of files", SCORED, 1.0, alone=True)
def mask_of_files() -> Any:
    os.umask(0o777)
    return 1.0


@way("breaks off an import", RAISED, "loaded halfway")
def breaks_off_an_import() -> Any:
    sys.meta_path.insert(0, types.SimpleNamespace(find_spec=_fails))  # type: ignore[arg-type]
    try:
        import not_loaded_before
    finally:
        del sys.meta_path[0]
    return not_loaded_before


def _fails(*arguments: Any) -> Any:
    raise OwnError("loaded halfway")


@way("a generator that is closed", RAISED, "ignored GeneratorExit")
def closed_generator() -> Any:
    made = never_closed()
    next(made)
    made.close()


@way("hangs in native code", LATE, "gave nothing within")
def hangs_in_native_code() -> Any:
    ctypes.CDLL(None).pause()


@way("an expression without end", LATE, "gave nothing within")
def endless_expression() -> Any:
    return re.match(r"(a+)+$", "a" * 64 + "b")


@way("waits for its own thread", LATE, "gave nothing within")
def waits_for_a_thread() -> Any:
    never = threading.Event()
    thread = threading.Thread(target=never.wait)
    thread.start()
    thread.join()


@way("waits for a child", LATE, "gave nothing within")
def waits_for_a_child() -> Any:
    child = os.fork()
    if not child:
        time.sleep(3600)
        os._exit(0)
    return os.waitpid(child, 0)


@way("reads a pipe of its own", LATE, "gave nothing within")
def reads_a_pipe() -> Any:
    return os.read(os.pipe()[0], 1)


def _is_a_socket(number: int) -> bool:
    try:
        return Path(f"/proc/self/fd/{number}").readlink().name.startswith("socket:")
    except OSError:
        return False


def compute_score(
    data_source: str = "",
    solution_str: str = "",
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    **rest: Any,
) -> Any:
    """Return a score, or do what the requested way does; without a way the score is 1.0."""
    asked = WAYS.get(str((extra_info or {}).get("way", solution_str)))
    return 1.0 if asked is None else asked.do()


async def compute_score_later(**arguments: Any) -> Any:
    """Like `compute_score`, but asynchronous."""
    await asyncio.sleep(0)
    return compute_score(**arguments)
