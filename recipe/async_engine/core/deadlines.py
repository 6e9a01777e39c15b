# SPDX-License-Identifier: Apache-2.0
"""How long each component of a run may be silent, and all other deadlines that are not settings.

Names in lower case are settings in ``async_training.timeouts``, names in capitals are the constants below. "The main"
is the run's main process, which starts all others.

| component | how it is monitored | limit | consequence |
|---|---|---|---|
| trainer's process | `run/supervisor.py` pings it every second | ``startup``, then ``heartbeat`` | the run ends |
| Ray's control process | `run/supervisor.py` pings it every second | min(`CONTROL_S`, ``heartbeat``) | the run ends |
| main thread of the main | a second thread checks that its loop runs | twice ``heartbeat`` | the main is killed |
| Ray's local processes | after an error, the main checks that they run | none | the run ends |
| the whole run | `actors/watch.py` checks that operations begin or end | ``stall`` | the run ends |
| start-up, checkpoints | `actors/watch.py` waits for their end | ``startup``, ``checkpoint`` | the run ends |
| training workers | `actors/watch.py` pings each; a busy one may answer late | none | if one dies, the run ends |
| agent-loop workers | `actors/worker_set.py` pings each all the time | ``agent_worker`` | restarted |
| reward workers | `actors/worker_set.py` pings one whose call timed out | `REWARD_WORKER_S` | restarted |
| teachers' servers | `rollout/teachers.py` pings each all the time | `TEACHER_S` | replaced |
| rollout replicas | `weights/publisher.py` pings each at a weight sync | ``weight_sync`` | removed from the run |
| log-prob servers | `weights/publisher.py` pings each at a weight sync | `PING_S` | left out of this sync |

Other failures show in the calls themselves: a process that computes rewards closes its socket when it dies, a request
to a log-prob server fails when the server dies, and ``generation`` limits how long an answer may gain no token.

All limits are in this file, so that they can be compared, except one in `inspection/node_probe.py`, a file that also
runs on nodes without this package.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# Deadlines in the main process.

BEAT_S = 1.0
"""Seconds between an answer to a ping (from the trainer's process or Ray's control process) and the next ping."""
CONTROL_S = 40.0
"""Time for Ray's control process to answer a ping. This is less than the 60 s after which Ray itself would kill the
main process, without a message.
"""
CLOSE_S = 60.0
"""Time for the trainer to write its last files after it has reported the end of the run."""
LEAVE_S = 20.0
"""Time for the trainer's process to exit after its watch thread has ended the run; an exit takes up to 15 s. Ray
does not notice the exit while a suspended child process keeps the process's sockets open; without this limit, the main
process would then wait for ``heartbeat`` seconds.
"""
END_S = 40.0
"""Time for ending a run's processes and writing its summary; then the main process is ended by force."""
ACCOUNT_S = 120.0
"""Time for computing the summary's time account: how many seconds each accelerator spent on what. It takes long if the
run has recorded many events. The deadline is the sum of this and `END_S`.
"""
FORCE_S = 20.0
"""Time for killing the started processes and writing the summary if the main process is stuck; then it exits."""
PROCESS_END_S = 5.0
"""Time for a run's processes to end by themselves after Ray was shut down; then they are killed."""
RAY_PORT_S = 120
"""Time for Ray's control process to open its port when Ray starts; after that the process counts as dead."""

# Deadlines of the watch in the trainer's process, a thread that ends a run which cannot continue.

REPORT_S = 15.0
"""Time for writing the report of a stalled run (what each component waits for); then the run ends without it."""
REPORT_ANSWER_S = 3.0
"""Time for one component to say, for the report of a stalled run, what it waits for; then the report says that the
component does not answer.
"""
GRACE_S = 5.0
"""Time for a trainer to end by itself, and for the main process to learn why, before the trainer's process is killed.
"""
LEAVING_S = 5.0
"""Time for reporting a run's failure to the trackers (such as TensorBoard) before the trainer's process is killed."""
HELD_AGAIN_S = 15.0
"""Seconds between a training worker's answer to a ping and the next ping. Ray reports deaths even between pings."""
BLAME_S = 5.0
"""Time after a failed call to training workers for finding out whether one of them has died and caused the failure."""

# Deadlines for agent-loop and reward workers.

TEACHER_S = 30.0
"""Time for a teacher's server to answer a ping."""
REWARD_WORKER_S = 30.0
"""Time for a reward worker to answer a ping after a call timed out. Each caller lengthens this time by a random share,
at most by half, so that usually only one of several callers kills the worker.
"""
REWARD_PROCESS_S = 1.0
"""Time that a reward worker waits for a scoring process to end after the process's socket has closed, and for the
socket to close after the process has ended.
"""
REHEARSED_S = 10.0
"""Time for the made-up trajectory with which an agent-loop worker is tested."""
CANCELLED_S = 10.0
"""Time for a cancelled trajectory to end; its agent loop may catch the cancellation and continue."""
HANDED_OVER_S = 5.0
"""Time for a finished trajectory to reach the scheduler after its worker has sent it; then the trajectory counts as
lost.
"""
SCHEDULER_S = 60.0
"""Time for the scheduler's event loop to do what the trainer asks; then the loop counts as stuck."""
ROUTING_S = 60.0
"""Time for the load balancer to answer. All it does is to count requests, so if it takes longer, it is stuck or dead.
"""
FETCH_S = 10.0
"""Time for a rollout server to return the tokens that an unfinished answer has so far."""

# Deadlines for replicas and log-prob servers.

PING_S = 10.0
"""Time for a log-prob server to answer a ping at a weight sync, or for a replica to do so after a failed transfer."""
SERVERS_END_S = 30.0
"""Time to wait, after the servers of a lost replica have ended, until their actor names are free."""
CLEARED_S = 60.0
"""Time to wait, after a lost replica has ended, until Ray counts its resources as free."""
FREE_S = 3.0
"""Time to wait for free accelerators when a replica is started during a run, because Ray frees them with a delay."""

# Time limits for reports. A run never waits for a report longer than the limit for it.

TOLD_S = 2.0
"""Time for components to report what they did, for the event record and metrics; a late report is left out."""
AGENTS_TOLD_S = 0.3
"""Time for agent-loop workers to report; shorter than `TOLD_S`, because they report only details of tool calls."""
RECORD_WRITE_S = 5.0
"""Interval at which the event record is written. Also the time limit for its last write at the end of a run."""
BOOKS_S = 20.0
"""Time for agent-loop workers to end their trajectories and report their token counts at the end of a run."""
BOOKS_OF_A_FAILED_RUN_S = 4.0
"""Time for agent-loop workers to end their trajectories and report their token counts at the end of a failed run. It is
shorter than `BOOKS_S`, because one of these workers may have caused the failure and may not answer.
"""
TRACKERS_S = 120.0
"""Time for all trackers together to finish at the end of a run. If a third of ``async_training.timeouts.stop`` is
shorter, they have only that third.
"""
REFUSED_S = 60.0
"""Time for reporting the run's failure to the other trackers when one tracker cannot be set up."""

# Deadlines of checks before a run starts.

EARLIER_RUN_S = 60.0
"""Time to wait while the trainer of an earlier, killed run still holds the lock on the checkpoint folder."""
HUB_S = 10.0
"""Time for the Hugging Face hub to answer whether it has a model."""
DRIVER_S = 15.0
"""Time for the accelerators' driver to report the memory of the accelerators."""

MOST_S = 5.0
"""If more seconds than this pass between two checks of a component, only this number counts as the component's silence.
The reason is that the checking process itself must have been suspended.
"""


class Silence:
    """Measures how long a component has been silent, and decides when that is too long.

    Time in which the checking process was itself suspended (SIGSTOP, a sleeping machine) does not count, because that
    process could not receive anything then.

    Args:
        part: text for messages that names the component and says that it is silent.
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
        """Record that the component has answered just now."""
        self.seconds = 0.0

    def too_long(self, heard_ago_s: float = math.inf) -> bool:
        """Add the time since the last call to the component's silence, and return whether the silence is too long.

        Call this at least every `MOST_S` seconds, because longer gaps do not count in full. ``heard_ago_s`` says how
        many seconds ago the component last answered, if known; the silence is never longer than that.
        """
        now = self._clock()
        self.seconds = min(self.seconds + min(now - self._looked, MOST_S), heard_ago_s)
        self._looked = now
        return self.seconds > self.limit_s
