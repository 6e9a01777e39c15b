# SPDX-License-Identifier: Apache-2.0
"""Runs synchronous reward functions in separate processes, with a time limit for each call.

Contract: `ScoringPool.score` returns the function's result as plain values, or raises `RewardFailed` with the text of
the function's error. A call also fails if it does not return in time, if its process dies (out of memory, a crash in
native code), or if the process writes something other than an answer to its socket. In these three cases the process is
killed together with its child processes, and replaced. Each process has its own socket, so that the process of one call
cannot disturb another call, and the event loop never blocks on a process.

The processes are forks of a process that has already loaded the function (`PRELOAD`), unless loading failed. This
module imports neither verl nor torch nor an engine, so that a new process starts quickly. Each process is the leader
of a POSIX session, so that its child processes can be killed with it. Its output is discarded, because endless output
would fill a disk. A process sends only text and plain values (`core.plain`), as one line of JSON per call. Shown by
tests/integration/test_reward_pool.py and test_odd_rewards.py.
"""

import asyncio
import atexit
import contextlib
import fcntl
import importlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import pickle
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from recipe.async_engine.core.deadlines import REWARD_PROCESS_S
from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.core.plain import MOST, NotPlain, plain, told, traced


class RewardFailed(RecipeError):
    """The reward function raised an error, returned an invalid value, or took too long.

    If it raised an error, that error's traceback is a note on this one.
    """


class RewardProcessDied(RewardFailed):
    """The process that ran the reward function ended without an answer."""


COUNTS = ("pending", "scored", "failed", "timed_out", "died", "seconds")
"""Names of a pool's statistics: the number of calls in progress; the number of finished calls with each of four
outcomes; and the total duration of the finished calls in seconds, including their wait for a process.
"""
LINE_BYTES = 16 * MOST
"""Largest size in bytes of an answer, which a process sends as a line of JSON. `MOST` characters always fit (JSON needs
at most 12 bytes for each), but `MOST` floats may not (at most 25 bytes for each).
"""
NO_MEMORY = "out of memory (async_training.reward_memory_gib)"
ATTEMPTS = 4
"""Number of attempts to start a process."""
SPOILT = 2
"""Number of failed calls in a row after which a process is replaced, because its state may be broken."""


class _Process:
    """A process that runs the reward function, and its socket. ``failures`` is the number of failed calls in a row."""

    def __init__(self, process: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.failures = 0
        self._process, self._reader, self._writer = process, reader, writer
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(process.sentinel, self._notice)

    def _notice(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._ended.set()
        # The process has ended. Read the rest of what it sent, but stop after `REWARD_PROCESS_S` seconds, because a
        # child of the process may keep the socket open.
        self._loop.call_later(REWARD_PROCESS_S, self._reader.feed_eof)

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set() and not self._reader.at_eof()

    async def line(self, call: bytes | None = None) -> dict[str, Any]:
        """Send ``call``, if it is not None, to the process and return the process's next line, parsed from JSON.

        Raises:
            RewardProcessDied: the process sent no valid line.
        """
        if call is not None:
            self._writer.write(len(call).to_bytes(HEADER, "big") + call)
        try:
            answer = json.loads(await self._reader.readuntil())
            if isinstance(answer, dict) and answer.keys() & {RESULT, RAISED}:
                return answer
            said = answer[FULL]
        except (asyncio.IncompleteReadError, OSError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REWARD_PROCESS_S):
                    await self._ended.wait()
            raise RewardProcessDied(self._why()) from None
        except (LookupError, TypeError, ValueError, asyncio.LimitOverrunError):
            why = "the reward function's process was killed: it wrote something other than an answer to its socket"
            raise RewardProcessDied(why) from None
        raise RewardProcessDied(f"the reward function's process ended, {NO_MEMORY}: {said}")

    def _why(self) -> str:
        status = self._process.exitcode
        if status is None:
            return "the function's process was killed, because it closed the socket for its answers"
        if status == OUT_OF_MEMORY:
            return f"the function's process ended, {NO_MEMORY}"
        return f"the function's process ended, exit status {status}: {NO_MEMORY}, or a crash in native code"

    def end(self) -> None:
        """Kill the process and its children, which are in the same process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        with contextlib.suppress(RuntimeError):  # the event loop may be closed already
            self._loop.remove_reader(self._process.sentinel)
            self._writer.transport.abort()


class ScoringPool:
    """A pool of processes that call one reward function. Only one event loop may use the pool.

    Args:
        path: the function's Python file, or ``pkg://module``.
        name: the function's name.
        settings: keyword arguments that are added to every call, and override the call's own, as in verl.
        processes: number of calls that run at the same time.
        timeout_s: seconds for one call, including its wait for a process.
        memory_bytes: limit on the address space of each process; None for no limit.
    """

    def __init__(
        self,
        path: str,
        name: str,
        settings: Mapping[str, Any],
        processes: int,
        timeout_s: float,
        memory_bytes: int | None = None,
    ) -> None:
        self.stats: dict[str, float] = dict.fromkeys(COUNTS, 0)
        self._what = f"{name} of {path}"
        self._timeout_s = timeout_s
        self._count = processes
        self._places = asyncio.Semaphore(processes)
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        # Without ``__file__``, multiprocessing does not run the main script, Ray's worker script, again in each child.
        sys.modules["__main__"].__dict__.pop("__file__", None)
        os.environ[PRELOAD] = json.dumps([path, name])
        # Use the ordinary Python. In a local run, multiprocessing would otherwise fork a process with all modules
        # imported (`laptop/prefork`), which is too large for the memory limit and does not preload the reward function.
        multiprocessing.set_executable(sys.executable)
        # This import is not at the top, because the scoring processes import this module and do not need Ray.
        from recipe.async_engine.actors.sockets import sockets_folder

        # multiprocessing creates a folder for its sockets if none is set (`get_temp_dir`, multiprocessing/util.py:142).
        # Set one here, in a folder in which the paths of sockets are short enough.
        temporary = tempfile.mkdtemp(prefix="pymp-", dir=sockets_folder())
        multiprocessing.current_process()._config["tempdir"] = temporary  # type: ignore[attr-defined]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        alive, self._alive = self._context.Pipe(duplex=False)
        self._arguments = alive, path, name, dict(settings), memory_bytes
        atexit.register(self.close)

    async def start(self) -> None:
        """Start all processes before the first call; raise RewardFailed if the reward function cannot be loaded."""
        self._idle += await asyncio.gather(*(self._start() for _ in range(self._count - len(self._idle))))

    async def score(self, **arguments: Any) -> Any:
        """Call the reward function with verl's arguments, and return its result as plain values.

        Raises:
            RewardProcessDied: the function's process ended without an answer.
            RewardFailed: the function failed in another way.
        """
        began = time.monotonic()
        self.stats["pending"] += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await self._ask(_pickled(arguments))
        except TimeoutError:
            self.stats["timed_out"] += 1
            raise RewardFailed(
                f"the reward function {self._what} gave nothing within {self._timeout_s:g} s "
                "(async_training.timeouts.reward): either it was running, and its process has been ended, or "
                "all reward processes were busy"
            ) from None
        except RewardProcessDied as error:
            self.stats["died"] += 1
            raise RewardProcessDied(f"the reward function {self._what} failed: {error}") from None
        except Exception:
            self.stats["failed"] += 1
            raise
        finally:
            self.stats["pending"] -= 1
            self.stats["seconds"] += time.monotonic() - began
        self.stats["scored"] += 1
        return result

    def close(self) -> None:
        atexit.unregister(self.close)
        for process in (*self._idle, *self._busy):
            process.end()
        self._idle.clear()

    async def _ask(self, call: bytes) -> Any:
        async with self._places:
            process = await self._free()
            self._busy.add(process)
            try:
                answer = await process.line(call)
            except BaseException:  # the process died, or the call was cancelled
                process.end()
                raise
            finally:
                self._busy.discard(process)
            process.failures = process.failures + 1 if RAISED in answer else 0
            if process.failures < SPOILT:
                self._idle.append(process)
            else:
                process.end()
        return _result(answer)

    async def _free(self) -> _Process:
        """Return an idle process, or a new process if none is idle.

        Idle processes whose last call did not fail are preferred; of these, or else of the others, the one that has
        been idle for longest is returned.
        """
        self._idle.sort(key=lambda process: process.failures)
        while self._idle:
            process = self._idle.pop(0)
            if process.is_alive:
                return process
            # This idle process died after its last call, for example by a signal or by a thread that the call had
            # started. End what is left of it, and try the next idle process.
            process.end()
        return await self._start()

    async def _start(self) -> _Process:
        starting = asyncio.get_running_loop().run_in_executor(None, _started, self._context, self._arguments)
        try:
            started, channel = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_started)
            raise
        process = _Process(started, *await asyncio.open_connection(sock=channel, limit=LINE_BYTES))
        try:
            _result(await process.line())
        except BaseException:
            process.end()
            raise
        return process


def _started(context: Any, arguments: tuple[Any, ...]) -> tuple[Any, socket.socket]:
    """Start a scoring process; return the process, and the socket through which the reward worker talks to it."""
    for left in reversed(range(ATTEMPTS)):
        # Use a new pair of sockets for each attempt, because a failed attempt may have created a process that answers
        # later.
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = context.Process(target=serve, args=(theirs, *arguments))
                process.start()
                break
            except (OSError, EOFError):
                # multiprocessing's fork server may have been killed by a reward function. The next attempt starts a new
                # fork server.
                ours.close()
                if not left:
                    raise
                time.sleep(REWARD_PROCESS_S / ATTEMPTS)
    return process, ours


def _end_started(starting: "asyncio.Future[tuple[Any, socket.socket]]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        process, channel = starting.result()
        process.kill()
        channel.close()


def _pickled(arguments: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(arguments)
    except Exception as error:  # the arguments come from users' data sets, agent loops and tools
        raise RewardFailed(f"the arguments of the reward function cannot be pickled: {told(error)}") from error


def _result(answer: dict[str, Any]) -> Any:
    if (words := answer.get(RAISED)) is None:
        return answer.get(RESULT)
    raised = RewardFailed(words)
    if trace := answer.get(TRACE):
        raised.add_note(trace)
    raise raised


# All code below runs inside the scoring processes.

PRELOAD = "RECIPE_REWARD_FUNCTION"
"""Environment variable with a reward function's path and name, as JSON. If it is set, importing this module loads the
function.
"""

HEADER = 8
"""Size in bytes of the header of a call. The header is the length in bytes of the pickled arguments, big-endian."""
RESULT, RAISED, FULL = "result", "raised", "full"
"""Keys of an answer: `RESULT` for the function's result, `RAISED` for the text of an error (and `TRACE` for its
traceback), `FULL` for the text of a MemoryError, after which the process ends.
"""
TRACE = "trace"
OUT_OF_MEMORY = 112
"""Exit status of a process that ran out of memory. Such a process may be unable to send a message."""

# Keep references to these functions, because a reward function may replace them in their modules.
_exit, _getpid, _setitimer, _sendall = os._exit, os.getpid, signal.setitimer, socket.socket.sendall
_dumps, _loads = json.dumps, pickle.loads

_loaded: dict[tuple[str, str], Callable[..., Any]] = {}


def load(path: str, name: str) -> Callable[..., Any]:
    """Return the function ``name`` from ``path``, a Python file or ``pkg://module``. A process loads it only once."""
    if (path, name) not in _loaded:
        if path.startswith("pkg://"):
            module = importlib.import_module(path.removeprefix("pkg://").replace("/", "."))
        else:
            spec = importlib.util.spec_from_file_location("reward_function", path.removeprefix("file://"))
            if spec is None or spec.loader is None:
                raise ImportError(f"{path} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        _loaded[path, name] = getattr(module, name)
    return _loaded[path, name]


def serve(
    channel: socket.socket, alive: Any, path: str, name: str, settings: dict[str, Any], memory_bytes: int | None
) -> None:
    """Run a scoring process: load the function, send a first answer (None or an error), then answer each call.

    Args:
        channel: socket to the reward worker. A call is `HEADER` bytes followed by pickled keyword arguments.
        alive: the reading end of a pipe. When the reward worker ends, the pipe closes and this process ends too.
        settings: keyword arguments that are added to each call, and override the call's own.
    """
    with contextlib.suppress(PermissionError):
        os.setsid()
    end_with(alive.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    _answer(channel, lambda: (load(path, name), None)[1])
    calls = channel.makefile("rb")
    while header := calls.read(HEADER):
        arguments = calls.read(int.from_bytes(header, "big"))
        _answer(channel, lambda: checked(load(path, name)(**{**_loads(arguments), **settings})))  # noqa: B023


def end_with(pipe: int) -> None:
    """Make the kernel kill this process, whatever it does, when no process has ``pipe`` open for writing any more."""
    # Open the pipe again, so that this process has an open file of its own: the kernel sends the signal of an open file
    # to only one process, and the inherited open file of the pipe is shared with other scoring processes.
    own = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    # If the pipe closed before the signal was set up, no signal comes, so end the process here.
    if select.select([own], [], [], 0)[0]:
        _exit(1)


def checked(result: Any) -> Any:
    """Return a reward function's result as plain values.

    Raises:
        NotPlain: verl does not accept the result. The message says which element of the result is wrong.
    """
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise NotPlain(
            "the reward function returned a coroutine: a function that awaits has to be an `async def` itself"
        )
    given = plain(result, "the reward function's result")
    if not isinstance(given, dict):
        return number_of(result, given)
    if "score" not in given:
        keys = ", ".join(list(given)[:10]) or "none"
        raise NotPlain(f"the reward function returned a dict without 'score'; its keys: {keys}")
    return {**given, "score": number_of(result["score"], given["score"])}


def number_of(value: Any, given: Any) -> Any:
    """Return ``given``, the plain form of the score ``value``. If ``value`` is an array of one number, return that
    number.
    """
    while hasattr(value, "tolist") and isinstance(given, list) and len(given) == 1:
        given = given[0]
    return given


def _answer(channel: socket.socket, call: Callable[[], Any]) -> None:
    """Run ``call`` and send its result or error. If ``call`` has forked, the child process exits without sending."""
    own, answer = _getpid(), {}
    try:
        answer[RESULT] = call()
    except MemoryError as error:
        # End the process, because memory may stay in use, for example after a leak. The next call gets a new process.
        _tell_and_end(channel, own, error.with_traceback(None))
    except BaseException as error:  # any error of a user's function makes only its own call fail
        answer = {RAISED: told(error), TRACE: traced(error)}
    if _getpid() != own:
        _exit(0)
    # Stop any timer that the call left running, because it would interrupt a later call.
    _setitimer(signal.ITIMER_REAL, 0)
    _sendall(channel, _dumps(answer).encode() + b"\n")


def _tell_and_end(channel: socket.socket, own: int, error: MemoryError) -> None:
    try:
        if _getpid() == own:
            _sendall(channel, _dumps({FULL: told(error)}).encode() + b"\n")
    finally:
        _exit(OUT_OF_MEMORY)


if PRELOAD in os.environ:
    # An error is ignored here, because each scoring process loads the function again and reports the error.
    with contextlib.suppress(BaseException):
        load(*json.loads(os.environ[PRELOAD]))
