# SPDX-License-Identifier: Apache-2.0
"""What alarms are told of verl's batches and updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto

from recipe.async_engine.core.alarms import AlarmLimit, Alarms, UnchangedWeights
from recipe.async_engine.trainer.alarm_stage import note_answers, note_rewards, note_validation
from recipe.async_engine.trainer.base import AsyncPPOTrainer

NAN, INF = float("nan"), float("inf")
END, PAD, TEXT = 2, 0, 7


class Trainer(AsyncPPOTrainer):
    """A loop whose workers report ``norms`` of an update."""

    norms: Any = (1.0,)

    def __init__(self) -> None:
        self.metrics, self.alarms = {}, Alarms({"skipped_updates": 3, "zero_gradients": 4})
        self.unchanged = UnchangedWeights()

    def updates(self, model: str) -> None:
        metrics = {f"{model}/grad_norm": list(self.norms), f"{model}/lr": 1e-6}
        self._updated(model, DataProto.from_single_dict(data={}, meta_info={"metrics": metrics}))


def rang(alarms: Alarms) -> dict[str, int]:
    return alarms.counts


def test_skipped_updates_are_counted_by_model_and_so_many_in_a_row_end_the_run() -> None:
    trainer = Trainer()
    trainer.norms = [1.0, NAN]
    trainer.updates("actor")
    trainer.updates("critic")
    assert trainer.metrics == {"actor/skipped_updates": 1, "critic/skipped_updates": 1}
    trainer.norms = [INF]
    trainer.updates("actor")
    trainer.alarms.check()
    trainer.updates("actor")
    with pytest.raises(AlarmLimit, match=r"^3 updates in a row, .*skipped_updates=3 allows: .* gradient of the actor"):
        trainer.alarms.check()
    trainer.norms = (2.5,)
    trainer.updates("critic")
    assert rang(trainer.alarms) == {"skipped_updates": 3, "critic_skipped_updates": 1}


@pytest.mark.parametrize(("model", "name"), [("actor", "zero_gradients"), ("critic", "critic_zero_gradients")])
def test_steps_whose_gradients_are_all_exactly_0_are_an_alarm(model: str, name: str) -> None:
    trainer = Trainer()
    for norms in ([0.0, 0.0], [0.0], [0.0, 1e-12], [0.0, NAN]):
        trainer.norms = norms
        trainer.updates(model)
    assert name not in rang(trainer.alarms)
    trainer.norms = [0.0, 0.0]
    for _ in range(3):
        trainer.updates(model)
    assert rang(trainer.alarms)[name] == 3
    trainer.alarms.check()
    trainer.updates(model)
    with pytest.raises(AlarmLimit, match=r"zero_gradients=4"):
        trainer.alarms.check()


@pytest.mark.parametrize(
    ("answers", "empty"),
    [
        # A prompt's answers, an underscore for what is not sampled (padding, a tool's tokens).
        (["", "", "text", "text"], 2),
        (["E", "E", "E", "text"], 3),
        (["EE", "PE", "text", "text"], 2),
        (["E____", "__", "textE", "t"], 2),
        (["t", "textE", "Et", "text"], 0),
        (["", "", "", ""], 4),
        (["E" * 16, "E" * 17, "t" * 17, "E" * 15 + "t"], 1),
    ],
)
def test_answers_without_a_token_of_text_are_counted_and_half_a_batch_of_them_is_an_alarm(
    answers: list[str], empty: int
) -> None:
    ids = {"E": END, "P": PAD}
    rows = [[ids.get(letter, TEXT) for letter in answer.ljust(20, "P")] for answer in answers]
    masks = [[int(n < len(answer) and answer[n] != "_") for n in range(20)] for answer in answers]
    batch = DataProto.from_single_dict({"responses": torch.tensor(rows), "response_mask": torch.tensor(masks)})
    alarms = Alarms({"empty_answers": 2})
    for _ in range(2):
        assert note_answers(batch, [END, PAD], alarms) == {"fully_async/empty_answers": empty}
    assert rang(alarms) == ({"empty_answers": 2} if empty >= 2 else {})


@pytest.mark.parametrize(
    ("uids", "scores", "alike"),
    [
        ("aabb", [1, 1, 0, 0], True),
        ("aabb", [1, 1, 0, 1], False),
        ("aabb", [0, 0, 0, 0], True),
        ("abab", [1, 0, 1, 0], True),
        ("abcd", [1, 1, 1, 1], True),
        ("abcd", [1, 1, 1, 0], False),
        ("aab", [1, 1, 0], True),
        ("aaaa", [NAN, NAN, NAN, NAN], False),
        ("a", [1], False),
    ],
)
def test_rewards_are_alike_where_each_prompts_are_or_with_one_answer_each_all_of_them(
    uids: str, scores: list[float], alike: bool
) -> None:
    columns = torch.zeros(len(scores), 3)
    # Wherever in its answer the reward stands.
    for row, score in enumerate(scores):
        columns[row, row % 3] = score
    batch = DataProto.from_single_dict({"token_level_scores": columns, "uid": np.array(list(uids), dtype=object)})
    alarms = Alarms({})
    for _ in range(3):
        note_rewards(batch, alarms)
    assert rang(alarms) == ({"uniform_rewards": 3} if alike else {})


def test_validation_with_prompts_that_have_no_score_is_an_alarm() -> None:
    alarms = Alarms({})
    note_validation({"val-core/task/reward/mean@1": 0.5, "val-aux/num_failed": 0}, alarms)
    note_validation({"val-core/task/reward/mean@1": 0.5}, alarms)
    assert rang(alarms) == {}
    note_validation({"val-aux/num_failed": 2}, alarms)
    note_validation({"val-aux/num_failed": 1}, alarms)
    assert rang(alarms) == {"failed_validation": 2}
