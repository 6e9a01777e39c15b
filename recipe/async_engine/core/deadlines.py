# SPDX-License-Identifier: Apache-2.0
"""Which components are asked for a sign of life, how long each may be silent, and all deadlines that are not settings.

Settings are named as in ``async_training.timeouts``. Names in capitals are the constants below. "The main" is the run's
main process, which starts all others.

| component | who watches, and what counts as a sign of life | limit | then |
|---|---|---|---|
| trainer's process | `run/supervisor.py` asks it every second | ``startup``, then ``heartbeat`` | the run ends |
| Ray's control process | `run/supervisor.py` asks it every second | `CONTROL_S` or ``heartbeat`` | the run ends |
| main thread of the main | a second thread; each pass of the loop | twice ``heartbeat`` | the main is killed |
| Ray's local processes | the main checks after an error that they run | none | the run ends |
| the whole run | `actors/watch.py`; anything that begins or ends | ``stall`` | the run ends |
| start-up, checkpoints | `actors/watch.py`; the end of the stage | ``startup``, ``checkpoint`` | the run ends |
| training workers | `actors/watch.py` asks each; any answer, as they may be busy | none | the run ends |
| agent-loop workers | `actors/worker_set.py` asks each all the time | ``agent_worker`` | restarted |
| reward workers | `actors/worker_set.py` asks after a call timed out | `REWARD_WORKER_S` | restarted |
| rollout replicas | `weights/publisher.py` asks each at a sync | ``weight_sync`` | given up |
| log-prob servers | `weights/publisher.py` asks each at a sync | `PING_S` | left out of this sync |

Three components are not asked, because the calls to them show when they fail: a process that computes rewards closes
its socket when it dies, the death of a log-prob server fails the request, and an answer that no longer grows ends by
``generation``.

How often a loop checks is defined next to the loop, because it decides nothing. Limits are defined here, so that they
can be compared, except one in `inspection/node_probe.py`, which is sent to nodes that may not have this package.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# Deadlines in the main process.

BEAT_S = 1.0
"""Seconds from an answer of the trainer's process or Ray's control process until the main asks it again."""
CONTROL_S = 40.0
"""Limit for Ray's control process. Ray ends a process without a message 60 s after the loss; the main must be first."""
CLOSE_S = 60.0
"""Time for the trainer to write files after its last event; then the main stops listening."""
LEAVE_S = 20.0
"""Time for a trainer to exit after its watch ends the run. It needs 15 s; a suspended fork may keep sockets open."""
END_S = 40.0
"""Time for ending a run's processes and writing its summary; then the main is ended by force."""
ACCOUNT_S = 120.0
"""Time, in addition to `END_S`, for computing the time account of a long event record for the summary."""
FORCE_S = 20.0
"""Time for a stuck main to kill the processes that it started and to write the summary before it exits."""
PROCESS_END_S = 5.0
"""Time for a run's processes to end by themselves after Ray was shut down; then they are killed."""
RAY_PORT_S = 120
"""Limit on waiting for the port of Ray's control process in one start of Ray, because that process may have died."""

# Deadlines of the watch in the trainer's process.

REPORT_S = 15.0
"""Time for the report on who waits for whom. It may ask the component that is stuck, and is left out if late."""
REPORT_ANSWER_S = 3.0
"""Time for a component to answer a question of that report; then the report lists it as not answering."""
GRACE_S = 5.0
"""Time for a trainer to end by itself, and for its main to learn why, before the trainer's process is ended."""
LEAVING_S = 5.0
"""Time for trackers to be told how the run failed, before the trainer's process is ended."""
HELD_AGAIN_S = 15.0
"""Time from a training worker's answer to the next question; Ray reports the worker's death without a new question."""
BLAME_S = 5.0
"""Time after a failed call in which training workers can show that one of them has died and caused the failure."""

# Deadlines for agent-loop and reward workers.

REWARD_WORKER_S = 30.0
"""Time for a reward worker to answer after a call timed out; each caller adds up to half, so that only one kills it."""
REWARD_PROCESS_S = 1.0
"""Largest time between the end of a scoring process and the end of its socket, as seen by the worker."""
REHEARSED_S = 10.0
"""Time for the made-up trajectory that tests a restarted worker."""
CANCELLED_S = 10.0
"""Time for a cancelled trajectory to end; its agent loop may catch the cancellation and continue."""
HANDED_OVER_S = 5.0
"""Time for a payload to arrive after its worker has handed it over; then it counts as lost."""
SCHEDULER_S = 60.0
"""Time for the scheduler's event loop to do what the trainer asks; then the loop counts as stuck."""
ROUTING_S = 60.0
"""Time for the load balancer to answer. It only counts requests, so a slower one is stuck or gone."""
FETCH_S = 10.0
"""Time for a server to report the tokens that an answer has so far."""

# Deadlines for replicas and log-prob servers.

PING_S = 10.0
"""Time for a log-prob server to answer at a weight sync, and for every replica after a failed transfer."""
SERVERS_END_S = 30.0
"""Time until the actor names of a lost replica's servers are free after the servers have ended."""
CLEARED_S = 60.0
"""Time until Ray counts the resources of a lost replica as free after the replica has ended."""
FREE_S = 3.0
"""Time for which a replica started during a run looks for free accelerators, because Ray frees them with a delay."""

# Time limits for writing reports. A report never delays a run by more than its limit.

TOLD_S = 2.0
"""Time for components to report what they did, for the event record and metrics; a late report is left out."""
AGENTS_TOLD_S = 0.3
"""Time for agent-loop workers to report; it is shorter because they report only details about tools."""
RECORD_WRITE_S = 5.0
"""Interval at which the event record is written. A write that takes longer at the end of a run is given up."""
BOOKS_S = 20.0
"""Time for agent-loop workers to end their trajectories and count their tokens at the end of a run."""
BOOKS_OF_A_FAILED_RUN_S = 4.0
"""The same time at the end of a failed run. It is short because a worker may have caused the failure."""
TRACKERS_S = 120.0
"""Limit for all trackers together at the end of a run; they get at most a third of ``stop``."""
REFUSED_S = 60.0
"""Time for telling the other trackers that the run failed when one tracker cannot be set up."""

# Deadlines of checks before a run starts.

EARLIER_RUN_S = 60.0
"""Time for which the trainer of an earlier run may still hold the checkpoint folder after its main was killed."""
HUB_S = 10.0
"""Time for Hugging Face's hub to answer whether it knows a model."""
DRIVER_S = 15.0
"""Time for the accelerators' driver to report the memory of the accelerators."""

MOST_S = 5.0
"""Seconds that count of a longer gap between two checks, because then the watching process itself was suspended."""


class Silence:
    """Measures how long a component has given no sign of life, and decides when that is too long.

    Time in which the watching process was itself suspended (SIGSTOP, a sleeping machine) does not count, because the
    process could not receive anything then.

    Args:
        part: the component, or what it does, for messages.
        limit_s: seconds that the component may be silent.
        clock: returns seconds and never goes backwards.
    """

    def __init__(self, part: str, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.part = part
        self.limit_s = limit_s
        self.seconds = 0.0
        self._clock = clock
        self._looked = clock()

    def heard(self) -> None:
        """Record a sign of life that came just now."""
        self.seconds = 0.0

    def too_long(self, heard_ago_s: float = math.inf) -> bool:
        """Count the time since the last call, and return whether the silence exceeds its limit.

        Call this at least every `MOST_S` seconds, or time is missed. ``heard_ago_s`` is the age of the newest sign of
        life in seconds, if known; the silence is never longer than that.
        """
        now = self._clock()
        self.seconds = min(self.seconds + min(now - self._looked, MOST_S), heard_ago_s)
        self._looked = now
        return self.seconds > self.limit_s
