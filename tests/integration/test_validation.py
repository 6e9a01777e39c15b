# SPDX-License-Identifier: Apache-2.0
"""A validation whose answers fail in every way: real agent-loop workers, client, reports and verl's own means.

Ray's actors are objects of this process (`remote_fakes`), the rollout servers are scripted.
"""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError
from remote_fakes import Handle, ScriptedServer, part
from test_trajectory_worker import SOON, Reward, make_worker, reported  # noqa: F401
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from recipe.async_engine.rollout.group_run import RolloutFailed
from recipe.async_engine.rollout.trajectory_manager import TrajectoryManager
from recipe.async_engine.rollout.trajectory_worker import TrajectoryWorker
from recipe.async_engine.trainer.finite_stage import with_scores

FAILED = ValueError("no closing brace")


def rows(count: int, n: int = 1, **columns: list[Any]) -> DataProto:
    """``count`` answers, ``n`` to each prompt, as verl's ``_validate`` asks for them."""
    fields = {
        "raw_prompt": [[{"role": "user", "content": f"prompt {row // n}"}] for row in range(count)],
        "uid": [f"uid {row // n}" for row in range(count)],
        **columns,
    }
    arrays = {name: np.fromiter(values, dtype=object, count=count) for name, values in fields.items()}
    batch = DataProto.from_dict({"dummy_tensor": torch.zeros(count, 1)}, arrays)
    batch.meta_info = {"validate": True, "global_steps": 7}
    return batch


class Dying:
    """A worker of which the first calls find that it has died."""

    def __init__(self, worker: TrajectoryWorker, deaths: int) -> None:
        self.worker, self.deaths = worker, deaths

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    async def is_there(self) -> None:
        """A sign of life."""

    async def run_trajectory(self, *arguments: Any) -> Any:
        if self.deaths:
            self.deaths -= 1
            raise ActorDiedError()
        return await self.worker.run_trajectory(*arguments)


@pytest.fixture
def validation(make_worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Makes a manager over workers, each with a server and a reward of its own."""
    monkeypatch.setattr("recipe.async_engine.actors.control.ASK_AGAIN_S", 0.01)

    def make(*scripts: list[Any], answers: Any = None, deaths: int = 0, retries: int = 0, **settings: Any) -> Any:
        """``scripts``: of each worker, what its reward does. ``answers``: of each server."""
        workers = []
        for number, script in enumerate(scripts):
            served = [part([10, 11], 7)] * 99 if answers is None else answers[number]
            server = served if isinstance(served, ScriptedServer) else ScriptedServer(*served)
            worker = make_worker(server, Reward(*script), retries=retries, **settings)
            workers.append(Handle(Dying(worker, deaths if number == 0 else 0)))
        manager = TrajectoryManager(workers[0]._target.worker.config, llm_client=None)
        manager.agent_loop_workers = workers
        return manager

    return make


async def answered(manager: Any, batch: DataProto, limit_s: float = SOON) -> DataProto:
    """As verl's ``_validate`` does it: asked, and joined with what it was asked with."""
    names = {"uid", "extra_info", "data_source", "reward_model"} & batch.non_tensor_batch.keys()
    columns = {name: batch.non_tensor_batch[name] for name in names}
    asked = DataProto.from_dict({"dummy_tensor": batch.batch["dummy_tensor"]}, columns)
    with manager.validation(limit_s):
        found = await manager.generate_sequences(batch)
    return asked.union(found)


def means(batch: DataProto) -> dict[str, float]:
    """The metrics of verl's validation over a batch, with what this package leaves out of them."""
    scores = batch.batch["rm_scores"].sum(-1).tolist()
    infos = {"reward": scores, **reported(batch)}
    turns = [batch.non_tensor_batch["__num_turns__"]]
    *kept, failed = with_scores(["math"] * len(batch), batch.non_tensor_batch["uid"].tolist(), infos, turns)
    metrics = RayPPOTrainer._val_metrics_update(SimpleNamespace(), *kept)
    return {**metrics, "failed": failed}


ONE_FAILS: dict[str, dict[str, Any]] = {
    "raises": {"agent_name": [None, "RaisingLoop", "PlainLoop", ""]},
    "has no agent loop": {"agent_name": ["PlainLoop", "of no such name", None, None]},
    "is too long": {
        "agent_name": ["ScriptedLoop"] * 4,
        "changes": [{}, {"prompt_ids": [1] * 9}, {}, {}],
    },
    "has no tokens": {"agent_name": ["ScriptedLoop"] * 4, "changes": [{}, {"response_ids": []}, {}, {}]},
    "returns nothing": {"agent_name": ["PlainLoop", "SeveralLoop", None, None], "outputs": [0] * 4},
    "hangs": {"agent_name": ["PlainLoop", "HangingLoop", None, None]},
}


@pytest.mark.parametrize("columns", ONE_FAILS.values(), ids=ONE_FAILS)
async def test_answer_that_fails_costs_its_own_prompt_and_is_counted(validation: Any, columns: dict[str, Any]) -> None:
    manager = validation([0.5] * 9, [0.5] * 9, trajectory_s=1.0)
    batch = await answered(manager, rows(4, **columns))
    assert batch.batch["rm_scores"].sum(-1).isnan().tolist() == [False, True, False, False]
    assert batch.non_tensor_batch["uid"].tolist() == [f"uid {n}" for n in range(4)]
    metrics = means(batch)
    assert metrics["val-core/math/acc/mean@1"] == 0.0 and metrics["val-aux/math/reward/mean@1"] == 0.5
    # Nor is what stands for it among the numbers of turns.
    assert (metrics["failed"], metrics["val-aux/num_turns/min"]) == (1, 2)
    assert manager.failed_validations == 0


async def test_answer_is_tried_again_elsewhere_as_in_training(
    validation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    manager = validation([1.0] * 9, [1.0] * 9, answers=[[OSError("no room")] * 9, [part([10, 11], 7)] * 9], retries=1)
    batch = await answered(manager, rows(2))
    assert batch.batch["rm_scores"].sum(-1).tolist() == [1.0, 1.0]
    assert "a validation's answer failed, attempt 1" in caplog.text


async def test_worker_that_dies_costs_no_answer(validation: Any) -> None:
    batch = await answered(validation([1.0] * 9, [1.0] * 9, deaths=2), rows(6))
    assert batch.batch["rm_scores"].sum(-1).tolist() == [1.0] * 6


async def test_as_many_answers_run_at_once_as_there_are_slots(validation: Any) -> None:
    class Slow(ScriptedServer):
        at_once = most = 0

        async def generate(self, **request: Any) -> Any:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            await asyncio.sleep(0.02)
            self.at_once -= 1
            return part([10, 11], 7)

    server = Slow()
    manager = validation([1.0] * 9, answers=[server])
    manager.validation_slots = 2
    await answered(manager, rows(8))
    assert server.most == 2


async def test_validation_samples_as_its_own_settings_say_and_leaves_no_trace_in_the_books(validation: Any) -> None:
    manager = validation([1.0])
    await answered(manager, rows(1))
    worker = manager.agent_loop_workers[0]._target.worker
    assert (await worker.close_books()).received == 0
    assert worker._sampling_params(True, {})["temperature"] == 0.0
    sampled = worker._sampling_params(True, {"__do_sample__": False})
    assert (sampled["top_p"], sampled["top_k"]) == (0.9, 5)


async def test_validation_of_which_each_answer_fails_ends_a_run_that_never_had_one(validation: Any) -> None:
    manager = validation([FAILED] * 9)
    with pytest.raises(RolloutFailed, match=r"each of the 3 answers .* ValueError: no closing brace"):
        await answered(manager, rows(3))
    assert manager.failed_validations == 1


async def test_later_one_is_counted_and_the_run_goes_on(validation: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager = validation([1.0, FAILED, FAILED])
    await answered(manager, rows(1))
    batch = await answered(manager, rows(2))
    assert manager.failed_validations == 1
    assert means(batch) == {"failed": 2}
    assert "each of the 2 answers of a validation failed" in caplog.text


async def test_first_batch_of_a_validation_may_fail_whole(validation: Any) -> None:
    manager = validation([FAILED, FAILED, {"acc": 1.0}])
    with manager.validation(SOON):
        assert reported(await manager.generate_sequences(rows(2))) == {}
        # What began later than verl's lists is shown from the next validation on.
        assert reported(await manager.generate_sequences(rows(1))) == {}
    assert manager.failed_validations == 0


async def test_validation_has_a_deadline_that_names_its_setting(validation: Any) -> None:
    manager = validation([1.0], answers=[["hang"]])
    with pytest.raises(RolloutFailed, match=r"async_training\.timeouts\.batch_wait"):
        await answered(manager, rows(1), limit_s=0.05)


@pytest.mark.parametrize(
    ("script", "columns"),
    [
        ([1.0, FAILED, 0.0, 1.0], {"acc": [True, None, False, True]}),
        ([FAILED, FAILED, 0.0, 1.0], {"acc": [None, None, False, True]}),
        ([{"acc": 1.0}, FAILED, {}, {"pred": "4"}], {"acc": [1.0, None, None, None], "pred": [None, None, None, "4"]}),
        ([{"acc": 1.0}, {"acc": 2, "note": "x"}, {"note": None}], {"acc": [1.0, 2, None], "note": [None, "x", None]}),
        # Nor do their values have to be alike.
        ([{"steps": [1, 2]}, {"steps": [3]}], {"steps": [[1, 2], [3]]}),
        ([{"steps": [1, 2]}, {"steps": [3, 4]}], {"steps": [[1, 2], [3, 4]]}),
        ([{}, FAILED], {}),
    ],
)
async def test_rewards_may_fail_and_report_what_others_do_not(
    validation: Any, script: list[Any], columns: dict[str, list[Any]]
) -> None:
    batch = await answered(validation(script), rows(len(script)))
    assert reported(batch) == columns
    assert batch.batch["rm_scores"].sum(-1).isnan().tolist() == [step is FAILED for step in script]
    assert means(batch)["failed"] == script.count(FAILED)


TAKEN = ("reward", "extra_info", "data_source", "uid", "reward_model", "prompts", "advantages", "values", "index")
CARRIED = ("acc", "score", "num_turns", "pred", "reported_uid")


@pytest.mark.parametrize("names", [[name] for name in (*TAKEN, *CARRIED)] + [[*TAKEN, *CARRIED]], ids=str)
async def test_reports_may_have_any_names_and_no_column_of_verls_is_another(validation: Any, names: list[str]) -> None:
    report = {name: 0.25 for name in names}
    columns = {"extra_info": [{"level": 3}], "data_source": ["math"], "index": [5], "reward_model": [{}]}
    batch = await answered(validation([report]), rows(1, **columns))
    assert batch.non_tensor_batch["uid"].tolist() == ["uid 0"]
    assert batch.non_tensor_batch["extra_info"].tolist() == [{"level": 3}]
    found = reported(batch)
    assert list(found.values()) == [[0.25]] * len(names)
    assert {name for name in CARRIED if name in names} <= found.keys()
    assert "reward" not in found
    metrics = means(batch)
    assert metrics["failed"] == 0
    assert metrics["val-core/math/acc/mean@1" if "acc" in names else "val-core/math/reward/mean@1"] in (0.25, 1.0)


async def test_all_batches_of_a_validation_have_the_same_columns_and_the_next_one_has_the_new_ones(
    validation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # vLLM, where another module imports it, lets through errors only.
    caplog.set_level(logging.WARNING)
    manager = validation([{"acc": 1.0}, {"acc": 0.0}, {"pred": "4"}, FAILED, {"acc": 1.0}, FAILED])
    with manager.validation(SOON):
        assert list(reported(await manager.generate_sequences(rows(2)))) == ["acc"]
        assert reported(await manager.generate_sequences(rows(2))) == {"acc": [None, None]}
    assert "rewards report pred, as those of this validation's first batch did not" in caplog.text
    with manager.validation(SOON):
        assert reported(await manager.generate_sequences(rows(2))) == {"acc": [1.0, None], "pred": [None, None]}
