# SPDX-License-Identifier: Apache-2.0
"""What an agent-loop worker tells of a trajectory, and how one ends that fails.

The worker that tells it is `recipe.async_engine.rollout.trajectory_worker`; the scheduler and its parts take it in.
"""

from dataclasses import dataclass

from recipe.async_engine.core.errors import RecipeError


class AgentLoopError(RecipeError):
    """An agent loop raised; a note has its traceback, which Ray cuts short for streaming calls."""


class TrajectoryFailed(RecipeError):
    """One attempt failed; a note has the traceback."""


class TrajectoryDisturbed(TrajectoryFailed):
    """It ended by what another trajectory of its worker may have done: the worker died, or it was cancelled there."""


class TrajectoryCancelled(RecipeError):
    """The trajectory was ended on request."""


@dataclass(frozen=True)
class TrajectoryGenerated:
    """The answer is complete; its reward is not known yet."""


@dataclass(frozen=True)
class TrajectoryScored:
    """What the scheduler needs to know of a finished trajectory.

    Attributes:
        score: the reward, None if the trainer computes it (reward model on the trainer's accelerators).
        oldest_version, newest_version: of the response's sampled tokens.
        exact_versions: False if the agent loop rewrote its answer, or left out parts of it so that two readings fit:
            what is not sure counts as sampled by the oldest version that it may be of.
        interruptions: weight syncs that cut this trajectory and were resumed.
        cut_tokens: tokens that were sampled before one of them, in the answer it cut.
        reprefilled_tokens: tokens sent to an engine again because of them.
        response_tokens: length of the response, tool tokens included.
        recovered_tokens: of answers whose server died, which went on elsewhere from them.
        restored_tokens: of answers that a checkpoint held.
        filter_metric: by which groups are filtered (``algorithm.filter_groups``), None if they are not.
        sampled_tokens: of the response, those that a policy sampled.
        received_tokens: of all answers of servers in this process, whatever the agent loop made of them.
        tool_s: seconds that it was in tools.
        asked_s: seconds that it waited for answers of servers.
    """

    score: float | None
    oldest_version: int
    newest_version: int
    exact_versions: bool
    interruptions: int
    reprefilled_tokens: int
    response_tokens: int
    cut_tokens: int = 0
    recovered_tokens: int = 0
    restored_tokens: int = 0
    filter_metric: float | None = None
    sampled_tokens: int = 0
    received_tokens: int = 0
    tool_s: float = 0.0
    asked_s: float = 0.0
