# SPDX-License-Identifier: Apache-2.0
"""Who is asked for a sign of life, how long each part may be silent, and every deadline that is not a setting.

Settings are named as in ``async_training.timeouts``. Capitals name the constants below.

| part | who watches, and what counts as a sign of life | limit | then |
|---|---|---|---|
| trainer's process | `run/supervisor.py` asks it every second | ``startup``, then ``heartbeat`` | the run ends |
| Ray's control process | `run/supervisor.py` asks it every second | `CONTROL_S` or ``heartbeat`` | the run ends |
| the main's own thread | a thread beside it; each pass of its loop | twice ``heartbeat`` | it is killed |
| Ray's local processes | the main, after an error; that they run | none | the run ends |
| the whole run | `actors/watch.py`; anything that begins or ends | ``stall`` | the run ends |
| start-up, checkpoints | `actors/watch.py`; the end of the stage | ``startup``, ``checkpoint`` | the run ends |
| training workers | `actors/watch.py` asks each; any answer, as they may be busy | none | the run ends |
| agent-loop workers | `actors/worker_set.py` asks each all the time | ``agent_worker`` | restarted |
| reward workers | `actors/worker_set.py` asks after a call timed out | `REWARD_WORKER_S` | restarted |
| rollout replicas | `weights/publisher.py` asks each at a sync | ``weight_sync`` | given up |
| log-prob servers | `weights/publisher.py` asks each at a sync | `PING_S` | left out of this sync |

Three parts have no such question, because the call itself tells: a process that scores rewards closes its socket when
it dies, a log-prob server's death fails the request, and an answer that no longer grows ends by ``generation``.

How often a loop looks again is written beside the loop, since it decides nothing. Limits are here, so that they can be
compared, but for one in `inspection/node_probe.py`, which is sent to nodes that may not have this package.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# The main process.

BEAT_S = 1.0
"""The main asks the trainer's process and Ray's control process this long after each answer."""
CONTROL_S = 40.0
"""Ray ends a process without a message when its control process is gone for 60 s; the main has to be faster."""
CLOSE_S = 60.0
"""After its last event the trainer may still write files for this long; then the main stops listening."""
LEAVE_S = 20.0
"""A trainer whose watch ends the run leaves within 15 s; a stopped fork may keep its connections open for longer."""
END_S = 40.0
"""Ending a run's processes and writing its summary takes at most this long; then the main is ended by force."""
ACCOUNT_S = 120.0
"""Adding up a long record for the summary may take this long in addition to `END_S`."""
FORCE_S = 20.0
"""A stuck main has this long to kill what it started and to write the summary before it exits."""
PROCESS_END_S = 5.0
"""Processes of a run have this long to end by themselves after Ray was left; then they are killed."""
RAY_PORT_S = 120
"""One start of Ray waits at most this long for its control process's port, since that process may have died."""

# The watch in the trainer's process.

REPORT_S = 15.0
"""The report on who waits for whom is left out if it is not done in this time: it may ask the part that is stuck."""
REPORT_ANSWER_S = 3.0
"""A part that has not answered the report in this time is listed as not answering."""
GRACE_S = 5.0
"""A trainer has this long to end by itself, and its main to hear why, before its process is ended."""
LEAVING_S = 5.0
"""Trackers have this long to be told how the run failed before the process is ended."""
HELD_AGAIN_S = 15.0
"""A training worker is asked again this long after its last answer; Ray reports its death without a new question."""
BLAME_S = 5.0
"""When a call failed, training workers have this long to show whether one of them has died and caused it."""

# Agent-loop and reward workers.

REWARD_WORKER_S = 30.0
"""A reward worker whose call timed out has this long to answer; its callers add up to half, so that one ends it."""
REWARD_PROCESS_S = 1.0
"""The end of a scoring process and the end of its socket are seen within this time of each other."""
REHEARSED_S = 10.0
"""A made-up trajectory that rehearses a restarted worker may take this long."""
CANCELLED_S = 10.0
"""A cancelled trajectory has this long to end; its agent loop may catch the cancellation and continue."""
HANDED_OVER_S = 5.0
"""A payload that its worker has handed over arrives within this time, or it is lost."""
SCHEDULER_S = 60.0
"""The scheduler's event loop does what the trainer asks of it within this time, or it is stuck."""
ROUTING_S = 60.0
"""The load balancer only counts requests, so one that does not answer for this long is stuck or gone."""
FETCH_S = 10.0
"""A server has this long to say which tokens an answer has so far."""

# Replicas and log-prob servers.

PING_S = 10.0
"""A log-prob server answers within this time at a weight sync, and so does every replica after a failed transfer."""
SERVERS_END_S = 30.0
"""The names of a lost replica's servers are free within this time of their end."""
CLEARED_S = 60.0
"""Ray counts the resources of a lost replica as free within this time of its end."""
FREE_S = 3.0
"""A replica that is started during a run looks this long for accelerators, which Ray counts as free a little late."""

# What only reports. A run never waits longer for it.

TOLD_S = 2.0
"""Parts have this long to tell what they did, for the record and for metrics; a late one is left out."""
AGENTS_TOLD_S = 0.3
"""Agent-loop workers have only this long: what they tell of tools is a detail of the record."""
RECORD_WRITE_S = 5.0
"""The record is written this often; at the end of a run a write that takes longer is given up."""
BOOKS_S = 20.0
"""At the end of a run agent-loop workers have this long to end their trajectories and count their tokens."""
BOOKS_OF_A_FAILED_RUN_S = 4.0
"""At the end of a failed run they have only this long, since one of them may be why it failed."""
TRACKERS_S = 120.0
"""All trackers together get at most this long at a run's end, and at most a third of ``stop``."""
REFUSED_S = 60.0
"""If one tracker cannot be set up, the others have this long to be told that the run failed."""

# Before a run.

EARLIER_RUN_S = 60.0
"""The trainer of an earlier run whose main was killed may still hold the checkpoint folder for this long."""
HUB_S = 10.0
"""Hugging Face's hub has this long to answer whether it knows a model."""
DRIVER_S = 15.0
"""The accelerators' driver has this long to tell their memory."""

MOST_S = 5.0
"""A longer gap between two looks means that the watching process itself was stopped; only this much of it counts."""


class Silence:
    """Measures how long a part has given no sign of life, and says when that is too long.

    Time in which the watching process was itself stopped (SIGSTOP, a suspended machine) does not count, because it
    could have heard nothing then.

    Args:
        part: names the part, or what it does, in messages.
        limit_s: how long it may be silent, in seconds.
        clock: never runs backwards, in seconds.
    """

    def __init__(self, part: str, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.part = part
        self.limit_s = limit_s
        self.seconds = 0.0
        self._clock = clock
        self._looked = clock()

    def heard(self) -> None:
        """Note a sign of life that came just now."""
        self.seconds = 0.0

    def too_long(self, heard_ago_s: float = math.inf) -> bool:
        """Count the time since the last call, and return whether the silence exceeds its limit.

        It has to be called at least every `MOST_S` seconds, or time is missed. If it is known how long ago the newest
        sign of life came, ``heard_ago_s`` says so, and the silence is no longer than that.
        """
        now = self._clock()
        self.seconds = min(self.seconds + min(now - self._looked, MOST_S), heard_ago_s)
        self._looked = now
        return self.seconds > self.limit_s
