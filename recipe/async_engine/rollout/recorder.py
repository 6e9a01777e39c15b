# SPDX-License-Identifier: Apache-2.0
"""One trajectory under way at its agent-loop worker: what it generated, request by request, and how it ends.

Contract: verl's agent loops know nothing of versions, so the client that they call records every answered request here,
in order. The recorder of the trajectory under way is found through a context variable, which asyncio passes on to the
tasks that an agent loop starts. Shown by tests/integration/test_client.py.
"""

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from recipe.async_engine.log_prob_servers.client import PartScorer
from recipe.async_engine.record.activity import ToolTime, Work
from recipe.async_engine.rollout.kept_answers import TrajectoryAnswers


@dataclass
class TrajectoryRecorder:
    """The answered requests of one trajectory.

    Attributes:
        segments: (version, token ids) of every answer with tokens, in the order of the answers.
        interruptions: how often an answer was cut, by a weight sync or a server's death, and then resumed.
        cut_tokens: tokens of the cut parts; all of them are in ``segments``.
        reprefilled_tokens: prompt and kept tokens that a resume sent to an engine again.
        recovered_tokens: of parts whose server died, fetched from it before.
        answers: as servers gave them, and those of an earlier process that are to be given again.
        scorer: has the answers scored by log-prob servers; None if there are none, or they cannot.
        text_only: nothing but tokens went to an engine. Log-prob servers know no images.
        sampled: done with its last token.
        told: done with the word that it is to end.
        over: set when it has ended.
        task: what runs its agent loop.
        work: what its requests are for.
        order: of its group among all groups, as they were issued; engines that go by it take older ones first.
        tools: how long it was in tools.
        asked_s: how long it waited for answers of servers.
    """

    segments: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    interruptions: int = 0
    cut_tokens: int = 0
    reprefilled_tokens: int = 0
    recovered_tokens: int = 0
    answers: TrajectoryAnswers = field(default_factory=TrajectoryAnswers)
    scorer: PartScorer | None = None
    text_only: bool = True
    work: Work = Work.NEW
    order: int = 0
    tools: ToolTime = field(default_factory=ToolTime)
    asked_s: float = 0.0
    sampled: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    told: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    over: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Any] = field(init=False)

    @property
    def validates(self) -> bool:
        """Whether it is one of a validation, of which nothing is trained."""
        return self.work is Work.VALIDATION

    def mark_multimodal(self) -> None:
        """A request has something else than tokens: log-prob servers cannot score this trajectory."""
        self.text_only = False
        self.drop_scores()

    def drop_scores(self) -> None:
        """Nobody waits for the scores of this trajectory."""
        if self.scorer is not None:
            self.scorer.cancel()
        self.scorer = None

    def record(self, version: int, token_ids: list[int], context: list[int]) -> None:
        """``token_ids`` were sampled by ``version`` after ``context``."""
        if not token_ids:
            return
        self.segments.append((version, tuple(token_ids)))
        if self.scorer is not None:
            self.scorer.add(version, context, token_ids)


_current: ContextVar[TrajectoryRecorder | None] = ContextVar("recipe_trajectory_recorder", default=None)


def current_recorder() -> TrajectoryRecorder | None:
    """The recorder of the trajectory that this task belongs to; None outside a trajectory (validation by hand)."""
    return _current.get()


def start_recording(
    scorer: PartScorer | None = None,
    answers: TrajectoryAnswers | None = None,
    work: Work = Work.NEW,
    tools: ToolTime | None = None,
    order: int = 0,
) -> TrajectoryRecorder:
    """Begin a trajectory in this context and return its recorder."""
    recorder = TrajectoryRecorder(
        scorer=scorer,
        answers=answers or TrajectoryAnswers(),
        work=work,
        order=order,
        tools=tools or ToolTime(),
    )
    _current.set(recorder)
    return recorder
