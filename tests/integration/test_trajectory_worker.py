# SPDX-License-Identifier: Apache-2.0
"""One trajectory at a time: user-defined loops, verl's post-processing, a real tokenizer and client; fake servers."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import mlflow
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from ray import cloudpickle
from remote_fakes import Handle, ScriptedServer, balancer_of, part
from verl import DataProto
from verl.experimental.agent_loop import agent_loop as stock
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
    _agent_loop_registry,
)
from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager
from verl.trainer.ppo.reward import extract_reward
from verl.utils.rollout_trace import RolloutTraceConfig
from verl.workers.rollout.replica import TokenOutput

from recipe.async_engine.actors.worker_set import WorkerDied, WorkerRestarted
from recipe.async_engine.core.columns import VERSION_RUNS
from recipe.async_engine.record.activity import Work
from recipe.async_engine.record.events import Away
from recipe.async_engine.rollout import trajectory_worker
from recipe.async_engine.rollout.client import ResumingClient
from recipe.async_engine.rollout.group_run import (
    AgentLoopError,
    TrajectoryCancelled,
    TrajectoryScored,
)
from recipe.async_engine.rollout.kept_answers import TokenAccount
from recipe.async_engine.rollout.loop_output import NonFinite, NonFiniteReward, RewardError, UnusableAnswer
from recipe.async_engine.rollout.teachers import TeacherClient, TeacherError
from recipe.async_engine.rollout.trajectory_codec import pack, unpack
from recipe.async_engine.rollout.trajectory_manager import TrajectoryManager
from recipe.async_engine.rollout.trajectory_worker import TrajectoryWorker
from recipe.laptop.task.tokenizer import build_tokenizer

SOON = 10.0
LIMITS = {
    "startup": SOON,
    "agent_worker": SOON,
    "batch_wait": SOON,
    "weight_sync": SOON,
    "checkpoint": SOON,
    "validation": SOON,
}
LOOPS = "recipe_test_agent_loops"
TOOL_TOKEN = 99


class Loop(AgentLoopBase):
    """A user's loop; it knows nothing of versions."""

    def __init__(self, server_manager: Any, **settings: Any) -> None:
        self.client = server_manager

    async def ask(self, sampling_params: dict[str, Any], prompt: list[int]) -> list[int]:
        answer = await self.client.generate("conversation", prompt_ids=prompt, sampling_params=sampling_params)
        return answer.token_ids

    @staticmethod
    def output(prompt: list[int], response: list[int], mask: list[int] | None = None) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=mask or [1] * len(response),
            response_logprobs=[-0.5] * len(response),
            num_turns=2,
            metrics=AgentLoopMetrics(),
        )


class PlainLoop(Loop):
    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        return self.output([1, 2], await self.ask(sampling_params, [1, 2]))


class TruncatingLoop(Loop):
    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        return self.output([1, 2], (await self.ask(sampling_params, [1, 2]))[:3])


class ToolLoop(Loop):
    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        first = await asyncio.create_task(self.ask(sampling_params, [1, 2]))
        second = await asyncio.create_task(self.ask(sampling_params, [1, 2, *first, TOOL_TOKEN]))
        mask = [1] * len(first) + [0] + [1] * len(second)
        return self.output([1, 2], [*first, TOOL_TOKEN, *second], mask)


class RewritingLoop(Loop):
    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        await self.ask(sampling_params, [1, 2])
        return self.output([1, 2], [50, 51])


class ScriptedLoop(Loop):
    """Gives an output that differs from a sound one by what the sample asks for."""

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        sound = self.output([1, 2], await self.ask(sampling_params, [1, 2]))
        return sound.model_copy(update=sample["changes"])


class RaisingLoop(Loop):
    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        raise KeyError("calculator")


class SeveralLoop(Loop):
    """Asks as often as the sample says, each time in a context of its own, and gives an output for each answer."""

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> Any:
        self.asked.append(sampling_params)
        outputs = []
        for number in range(sample.get("outputs", 2)):
            outputs.append(self.output([1, number], await self.ask(sampling_params, [1, number])))
        for output, score in zip(outputs, sample.get("scores", ()), strict=False):
            output.reward_score = score
        return outputs * sample.get("times", 1)

    asked: ClassVar[list[dict[str, Any]]] = []


class HangingLoop(Loop):
    """A tool call never returns."""

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        await self.ask(sampling_params, [1, 2])
        await asyncio.get_running_loop().create_future()


class StubbornLoop(Loop):
    """Goes on when it is cancelled, and asks for another answer."""

    ends: ClassVar[list[str]] = []

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        for _ in range(8):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        try:
            await self.ask(sampling_params, [1, 2])
        except Exception as error:
            self.ends.append(type(error).__name__)
            raise


class Reward:
    """A reward worker; ``script`` has scores, whole reports, exceptions, or futures to wait for."""

    def __init__(self, *script: Any, **fields: Any) -> None:
        self.script = list(script)
        self.fields = fields
        self.calls = 0

    async def compute_score(self, data: Any) -> dict[str, Any]:
        self.calls += 1
        step = self.script.pop(0)
        if isinstance(step, asyncio.Future):
            step = await step
        if isinstance(step, BaseException):
            raise step
        if isinstance(step, dict):
            return {"reward_score": 1.0, "reward_extra_info": step}
        return {"reward_score": step, "reward_extra_info": {"acc": step is not None and step > 0.5, **self.fields}}


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType(LOOPS)
    for loop in (
        PlainLoop,
        TruncatingLoop,
        ToolLoop,
        RewritingLoop,
        ScriptedLoop,
        RaisingLoop,
        SeveralLoop,
        HangingLoop,
        StubbornLoop,
    ):
        setattr(module, loop.__name__, loop)
        monkeypatch.setitem(_agent_loop_registry, loop.__name__, {"_target_": f"{LOOPS}.{loop.__name__}"})
    monkeypatch.setitem(sys.modules, LOOPS, module)

    def begin(self: AgentLoopWorker, config: Any, llm_client: Any, rewards: list[Any] | None) -> None:
        self.config, self.llm_client, self.reward_loop_worker_handles = config, llm_client, rewards
        self.teacher_client = self.dataset_cls = self.processor = None
        self.rollout_config = SimpleNamespace(
            prompt_length=4,
            response_length=8,
            temperature=0.7,
            top_p=1.0,
            top_k=-1,
            calculate_log_probs=True,
            agent=SimpleNamespace(default_agent_loop="PlainLoop"),
            val_kwargs=SimpleNamespace(temperature=0.0, top_p=0.9, top_k=5),
        )
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(vocab_size=1_000))
        self.tokenizer = build_tokenizer()
        self.hf_model_type, self.mm_processor_kwargs, self.tools = "qwen3", {}, []
        self.distillation_enabled = False

    # In place of loading a model's configuration from disk.
    monkeypatch.setattr(AgentLoopWorker, "__init__", begin)

    def make(
        server: ScriptedServer,
        reward: Reward | None,
        retries: int = 1,
        reward_s: float = SOON,
        metric: str | None = None,
        gdpo_reward_keys: list[str] | None = None,
        trajectory_s: float = SOON,
    ) -> Any:
        config = OmegaConf.create(
            {
                "async_training": {
                    "partial_rollout": True,
                    "partial_tokens_interval": None,
                    "max_group_retries": retries,
                    "max_replica_restarts": 0,
                    "timeouts": {"generation": SOON, "reward": reward_s, "trajectory": trajectory_s, **LIMITS},
                },
                "actor_rollout_ref": {
                    "rollout": {"name": "vllm", "prompt_length": 4, "response_length": 8, "trace": {}},
                    "model": {},
                },
                "data": {},
                "algorithm": {
                    "filter_groups": {"enable": metric is not None, "metric": metric},
                    "adv_estimator": "grpo" if gdpo_reward_keys is None else "gdpo",
                    "gdpo_reward_keys": gdpo_reward_keys,
                },
            }
        )
        client = ResumingClient(config, load_balancer_handle=Handle(balancer_of(server)))
        return TrajectoryWorker(config, client, None if reward is None else [Handle(reward)])

    return make


async def run(
    worker: TrajectoryWorker, loop: str | None = "PlainLoop", key: str = "0-0-0", trace: bool = True, **fields: Any
) -> list[Any]:
    sample = {"raw_prompt": [{"role": "user", "content": "hi"}], "uid": "0-4", **fields}
    if loop is not None:
        sample["agent_name"] = loop

    async def collect() -> list[Any]:
        event, payload = await worker.run_trajectory(key, sample, 4, 0, 7, trace=trace)
        if event is None:
            return [event, *await finish()]
        return [event, *unpack(payload)]

    async def finish() -> list[Any]:
        scored, payload = await worker.finish_trajectory(key)
        return [scored, *unpack(payload)]

    return await asyncio.wait_for(collect(), SOON)


class Marker:
    """An argument of a loop that is an object; ``made``: how many there have been."""

    made: ClassVar[int] = 0

    def __init__(self, token: int) -> None:
        self.token = token
        type(self).made += 1


class LoopWithArguments(Loop):
    def __init__(self, first: int, second: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.tokens = [first, second.token if isinstance(second, Marker) else second]

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        await self.ask(sampling_params, [1, 2])
        return self.output([1, 2], self.tokens)


@pytest.mark.parametrize(
    ("second", "made"), [(12, 0), ({"_target_": f"{LOOPS}.Marker", "token": 12}, 2)], ids=["a number", "an object"]
)
async def test_loop_of_a_file_gets_its_arguments_and_each_trajectory_objects_of_its_own(
    make_worker: Any, monkeypatch: pytest.MonkeyPatch, second: Any, made: int
) -> None:
    worker = make_worker(ScriptedServer(part([10, 11], 7), part([10, 11], 7)), Reward(0.5, 0.5))
    for kind in (Marker, LoopWithArguments):
        monkeypatch.setattr(sys.modules[LOOPS], kind.__name__, kind, raising=False)
    # As verl has an entry of `agent_loop_config_path`, its name included.
    entry = {"name": f"own {made}", "_target_": f"{LOOPS}.LoopWithArguments", "first": 11, "second": second}
    monkeypatch.setitem(_agent_loop_registry, f"own {made}", OmegaConf.create(entry))
    monkeypatch.setattr(Marker, "made", 0)
    for key in ("0-0-0", "0-1-0"):
        _, output = await run(worker, f"own {made}", key)
        assert output.response_ids[0, :2].tolist() == [11, 12]
    assert Marker.made == made


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(output).items() if isinstance(value, torch.Tensor)}


async def test_payload_is_the_whole_trajectory_in_one_array_and_its_tensors_are_views_of_that(make_worker: Any) -> None:
    _, output = await run(make_worker(ScriptedServer(part([10, 11], 7)), Reward(0.5)))
    output.extra_fields["of the user"] = lambda: "anything that cloudpickle takes"
    packed = pack([output])
    assert (packed.dtype, packed.ndim) == (np.uint8, 1)
    packed.flags.writeable = False  # as what the object store hands over
    (again,), tensors = unpack(packed), tensors_of(output)
    assert {"prompt_ids", "response_ids", "response_mask", "attention_mask", "position_ids"} <= tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(getattr(again, name), value)
        assert getattr(again, name).dtype == value.dtype
        assert np.shares_memory(getattr(again, name).numpy(), packed)
    assert again.extra_fields.pop("of the user")() == output.extra_fields.pop("of the user")()
    rest = vars(output).keys() - tensors.keys()
    assert {name: getattr(again, name) for name in rest} == {name: getattr(output, name) for name in rest}


async def test_payload_has_nothing_that_nobody_reads_or_that_the_trainer_has_already(make_worker: Any) -> None:
    _, output = await run(make_worker(ScriptedServer(part([10, 11], 7)), Reward(0.5)))
    plain = len(pack([output]))
    pixels, image = torch.rand(64, 1176), np.zeros((1000, 1000, 3), np.uint8)
    output.multi_modal_inputs = {"pixel_values": pixels, "half": pixels[:2].bfloat16(), "name": "of no tensor"}
    output.multi_modal_data = {"images": [image]}
    output.mm_processor_output = [{"video": image}]
    output.extra_fields["raw_prompt"] = [{"role": "user", "content": [image]}]
    packed = pack([output])
    assert len(packed) - plain < pixels.nbytes + 16_384
    (again,) = unpack(packed)
    assert (again.multi_modal_data, again.mm_processor_output) == (None, None)
    assert "raw_prompt" not in again.extra_fields
    inputs = again.multi_modal_inputs
    assert torch.equal(inputs["pixel_values"], pixels) and np.shares_memory(inputs["pixel_values"].numpy(), packed)
    assert torch.equal(inputs["half"], pixels[:2].bfloat16()) and inputs["name"] == "of no tensor"
    assert output.multi_modal_data == {"images": [image]}, "the worker's own is not changed"


async def test_payload_of_a_checkpoint_of_an_earlier_version_is_taken_too(make_worker: Any) -> None:
    _, output = await run(make_worker(ScriptedServer(part([10, 11], 7)), Reward(0.5)))
    arrays = {name: value.numpy() for name, value in tensors_of(output).items()}
    (again,) = unpack(cloudpickle.dumps(output.model_copy(update=arrays), protocol=5))
    for name, value in tensors_of(output).items():
        assert torch.equal(getattr(again, name), value)


async def test_slot_is_freed_before_the_reward_is_known(make_worker: Any) -> None:
    score = asyncio.get_running_loop().create_future()
    worker = make_worker(ScriptedServer(part([10, 11], 7)), Reward(score))
    begun = worker.run_trajectory("0-0-0", {"raw_prompt": []}, 4, 0, 7)
    assert await asyncio.wait_for(begun, SOON) == (None, None)
    assert not score.done()
    score.set_result(0.25)
    scored, payload = await asyncio.wait_for(worker.finish_trajectory("0-0-0"), SOON)
    expected = TrajectoryScored(0.25, 7, 7, True, 0, 0, 2, sampled_tokens=2, received_tokens=2)
    assert scored.asked_s > 0
    assert replace(scored, asked_s=0.0) == expected
    (output,) = unpack(payload)
    assert output.reward_score == 0.25
    assert output.response_ids[0, :2].tolist() == [10, 11]
    assert worker._running == {}


async def test_end_of_a_trajectory_that_another_process_began_is_the_death_of_its_worker(make_worker: Any) -> None:
    worker = make_worker(ScriptedServer(), Reward(0.5))
    with pytest.raises(WorkerRestarted, match="trajectory 0-0-0 was begun before"):
        await worker.finish_trajectory("0-0-0")


async def test_trajectory_that_is_ended_between_its_two_calls_says_so_in_the_second(make_worker: Any) -> None:
    worker = make_worker(ScriptedServer(part([10, 11], 7)), Reward(asyncio.get_running_loop().create_future()))
    assert (await worker.run_trajectory("0-0-0", {"raw_prompt": []}, 4, 0, 7))[0] is None
    await worker.cancel(["0-0-0"])
    with pytest.raises(TrajectoryCancelled, match="trajectory 0-0-0 was ended on request"):
        await asyncio.wait_for(worker.finish_trajectory("0-0-0"), SOON)
    assert worker._running == {}


@pytest.mark.parametrize(("metric", "value"), [(None, None), ("reward", 0.75), ("acc", 1.0)])
async def test_what_groups_are_filtered_by_is_the_reward_or_a_field_of_it(
    make_worker: Any, metric: str | None, value: float | None
) -> None:
    worker = make_worker(ScriptedServer(part([10, 11], 7)), Reward(0.75), metric=metric)
    scored, _ = await run(worker)
    assert scored.filter_metric == value


async def test_metric_that_the_reward_does_not_give_is_named(make_worker: Any) -> None:
    worker = make_worker(ScriptedServer(part([10, 11], 7)), Reward(0.75), metric="accuracy")
    said = r"filter_groups\.metric=accuracy is not among the values that the reward function returned \(acc, reward\)"
    with pytest.raises(RewardError, match=said):
        await run(worker)


async def test_interrupted_answer_carries_the_versions_of_its_parts(make_worker: Any) -> None:
    server = ScriptedServer(part([10, 11], 7, "aborted"), part([12], 8))
    scored, payload = await run(make_worker(server, Reward(1.0)))
    assert tuple(payload.extra_fields[VERSION_RUNS]) == ((7, 2), (8, 1))
    expected = TrajectoryScored(1.0, 7, 8, True, 1, 2 + 2, 3, cut_tokens=2, sampled_tokens=3, received_tokens=3)
    assert scored.asked_s > 0
    assert replace(scored, asked_s=0.0) == expected
    assert (payload.extra_fields["min_global_steps"], payload.extra_fields["max_global_steps"]) == (7, 8)


async def test_workers_books_have_every_token_that_it_was_answered(make_worker: Any) -> None:
    """One trajectory is complete, one fails for good, and one waits for its second answer when the run ends."""
    server = ScriptedServer(part([10, 11], 7), part([12, 13, 14], 7))
    worker = make_worker(server, Reward(1.0))
    await run(worker)
    failing = make_worker(ScriptedServer(part([10, 11, 12], 7)), Reward(ValueError("no")), retries=0)
    with pytest.raises(RewardError):
        await run(failing)
    assert await failing.close_books() == TokenAccount(received=3, dropped=3)
    score = asyncio.get_running_loop().create_future()
    waiting = make_worker(ScriptedServer(part([10, 11, 12, 13], 7)), Reward(score))
    begun = waiting.run_trajectory("0-1-1", {"raw_prompt": []}, 4, 0, 7)
    assert await asyncio.wait_for(begun, SOON) == (None, None)
    ended = asyncio.create_task(waiting.finish_trajectory("0-1-1"))
    assert await waiting.close_books() == TokenAccount(received=4, unfinished=4)
    with pytest.raises(TrajectoryCancelled):
        await ended
    assert await worker.close_books() == TokenAccount(received=2)


async def test_servers_are_told_what_an_answer_is_for(make_worker: Any) -> None:
    server = ScriptedServer(*[part([10], 7), part([10], 7, "aborted"), part([11], 8), part([10], 7)])
    worker = make_worker(server, Reward(1.0, 1.0, 1.0))
    await run(worker, key="0-0-0")
    await run(worker, key="1-0-0")
    await run(worker, key="1-0-1")
    assert [request["work"] for request in server.calls] == [Work.NEW, Work.NEW, Work.AGAIN, Work.RETRY]


async def test_turns_and_tool_tokens_of_a_users_loop_are_told_apart(make_worker: Any) -> None:
    server = ScriptedServer(part([10, 11], 7), part([20], 9))
    scored, payload = await run(make_worker(server, Reward(1.0)), "ToolLoop")
    assert tuple(payload.extra_fields[VERSION_RUNS]) == ((7, 2), (-1, 1), (9, 1))
    assert (scored.oldest_version, scored.newest_version, scored.response_tokens) == (7, 9, 4)


async def test_answer_that_its_loop_cuts_keeps_the_versions_of_what_is_left(make_worker: Any) -> None:
    server = ScriptedServer(part([10, 11], 7, "aborted"), part([12, 13, 14], 8))
    scored, payload = await run(make_worker(server, Reward(1.0)), "TruncatingLoop")
    assert tuple(payload.extra_fields[VERSION_RUNS]) == ((7, 2), (8, 1))
    assert (scored.exact_versions, scored.response_tokens) == (True, 3)


async def test_answer_that_its_loop_rewrote_counts_as_sampled_by_the_oldest_version(make_worker: Any) -> None:
    server = ScriptedServer(part([10, 11], 5, "aborted"), part([12], 8))
    scored, payload = await run(make_worker(server, Reward(1.0)), "RewritingLoop")
    assert tuple(payload.extra_fields[VERSION_RUNS]) == ((5, 2),)
    assert scored.exact_versions is False


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"response_ids": [], "response_mask": [], "response_logprobs": []}, "0 tokens and the policy sampled none"),
        ({"response_mask": [0, 0]}, "2 tokens and the policy sampled none"),
        ({"response_mask": [1]}, "2 tokens and 1 mask"),
        ({"response_logprobs": [-0.5]}, "2 tokens and 1 log-probs"),
        ({"response_logprobs": [-0.5] * 9}, "2 tokens and 9 log-probs"),
        ({"response_logprobs": None}, "2 tokens and no log-probs"),
        (
            {"response_ids": [3] * 9, "response_mask": [1] * 9, "response_logprobs": [-0.5] * 9},
            r"response of 9 tokens is longer than data\.max_response_length=8",
        ),
        ({"prompt_ids": [1] * 5}, r"prompt of 5 tokens is longer than data\.max_prompt_length=4"),
    ],
)
async def test_answer_that_no_batch_can_hold_is_named(make_worker: Any, output: dict[str, Any], words: str) -> None:
    reward = Reward(1.0)
    with pytest.raises(UnusableAnswer, match=words):
        await run(make_worker(ScriptedServer(part([10, 11], 7)), reward), "ScriptedLoop", changes=output)
    assert reward.calls == 0


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), None])
async def test_log_prob_that_is_no_number_fails_its_trajectory_by_name(make_worker: Any, value: Any) -> None:
    output = {"response_logprobs": [-0.5, value]}
    with pytest.raises(NonFinite, match=f"log-prob of token 1 of 2 is {value}"):
        await run(make_worker(ScriptedServer(part([10, 11], 7)), Reward(1.0)), "ScriptedLoop", changes=output)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e39, 10**400, None])
async def test_reward_that_is_no_number_fails_its_trajectory_by_name_and_is_not_asked_for_again(
    make_worker: Any, value: Any
) -> None:
    """Nor is one that float32, which a batch has it in, cannot hold."""
    reward = Reward(value)
    with pytest.raises(NonFiniteReward, match="the reward function gave reward="):
        await run(make_worker(ScriptedServer(part([10, 11], 7)), reward))
    assert reward.calls == 1


async def test_fields_that_advantages_or_the_filter_are_computed_from_must_be_numbers_and_others_may_not_be(
    make_worker: Any,
) -> None:
    fields = {"style": float("nan"), "note": "fine"}

    def worker(**settings: Any) -> TrajectoryWorker:
        return make_worker(ScriptedServer(part([10, 11], 7)), Reward(1.0, **fields), **settings)

    assert len(await run(worker())) == 2
    for settings in ({"metric": "style"}, {"gdpo_reward_keys": ["acc", "style"]}, {"metric": "note"}):
        with pytest.raises(NonFiniteReward, match=r"gave (style|note)="):
            await run(worker(**settings))
    with pytest.raises(NonFiniteReward, match=r"gave form=None"):
        await run(worker(gdpo_reward_keys=["acc", "form"]))


@pytest.fixture
def join(make_worker: Any) -> Any:
    """How the trainer joins a batch."""
    return TrajectoryManager(make_worker(ScriptedServer(), None).config, llm_client=None).join


def reported(batch: DataProto) -> dict[str, list[Any]]:
    """As verl's trainers take it from a batch."""
    return {name: values.tolist() for name, values in extract_reward(batch)[1].items()}


async def test_rewards_of_a_training_batch_may_report_what_others_do_not(make_worker: Any, join: Any) -> None:
    script = [{"acc": 0.5}, {"acc": 1, "pred": "4"}, {}, {"acc": 0.0, "min_global_steps": "kept from the reward"}]
    worker = make_worker(ScriptedServer(*[part([10, 11], 7)] * len(script)), Reward(*script))
    batch = join([(await run(worker, key=f"0-0-{n}"))[-1] for n in range(len(script))])
    kept = {"reported_min_global_steps": [None, None, None, "kept from the reward"]}
    assert reported(batch) == {"acc": [0.5, 1, None, 0.0], "pred": [None, "4", None, None], **kept}
    assert batch.non_tensor_batch["min_global_steps"].tolist() == [7] * len(script)


async def test_numbers_that_all_rewards_report_are_a_column_of_numbers(make_worker: Any, join: Any) -> None:
    worker = make_worker(ScriptedServer(*[part([10, 11], 7)] * 2), Reward({"style": 0.5}, {"style": 1}))
    batch = join([(await run(worker, key=f"0-0-{n}"))[-1] for n in range(2)])
    assert batch.non_tensor_batch["style"].dtype == float


async def test_default_loop_is_the_configured_one_and_sampling_is_the_rollouts(make_worker: Any) -> None:
    server = ScriptedServer(part([10], 7))
    await run(make_worker(server, Reward(1.0)), loop=None)
    sampling = server.calls[0]["sampling_params"]
    assert (sampling["temperature"], sampling["logprobs"]) == (0.7, True)


async def test_score_is_left_to_the_trainer_where_no_reward_worker_exists(make_worker: Any) -> None:
    scored, payload = await run(make_worker(ScriptedServer(part([10], 7)), None))
    assert scored.score is None
    assert payload.reward_score is None


async def test_failing_reward_is_asked_again_for_the_same_answer(make_worker: Any) -> None:
    server, reward = ScriptedServer(part([10, 11], 7)), Reward(OSError("sandbox is busy"), 0.5)
    scored, _ = await run(make_worker(server, reward))
    assert scored.score == 0.5
    assert (len(server.calls), reward.calls) == (1, 2)


async def test_reward_that_fails_every_time_is_a_reward_error_with_its_cause(make_worker: Any) -> None:
    reward = Reward(OSError("sandbox is busy"), ValueError("no closing brace"))
    worker = make_worker(ScriptedServer(part([10], 7)), reward)
    with pytest.raises(RewardError, match="failed 2 times, last with ValueError: no closing brace") as caught:
        await run(worker)
    assert caught.value.__cause__ is None
    assert "raise step" in caught.value.__notes__[0]
    assert worker._running == {}


async def test_death_of_reward_workers_uses_up_no_attempt(make_worker: Any) -> None:
    died = [WorkerDied("reward worker 0 has died") for _ in range(3)]
    scored, _ = await run(make_worker(ScriptedServer(part([10], 7)), Reward(*died[1:], 0.5), retries=0))
    assert scored.score == 0.5
    with pytest.raises(RewardError, match="failed 1 times, last with reward worker 0 has died"):
        await run(make_worker(ScriptedServer(part([10], 7)), Reward(*died), retries=0))


async def test_reward_that_never_comes_ends_at_its_deadline_which_is_named(make_worker: Any) -> None:
    never = asyncio.get_running_loop().create_future()
    worker = make_worker(ScriptedServer(part([10], 7)), Reward(never), retries=0, reward_s=0.05)
    with pytest.raises(RewardError, match=r"no reward within 0\.05 s \(async_training\.timeouts\.reward\)"):
        await run(worker)


async def test_error_of_a_users_loop_comes_with_its_traceback(make_worker: Any) -> None:
    worker = make_worker(ScriptedServer(), Reward())
    with pytest.raises(AgentLoopError) as caught:
        await run(worker, "RaisingLoop")
    assert str(caught.value) == "KeyError: 'calculator'"
    assert "in run\n    raise KeyError" in caught.value.__notes__[0]
    assert caught.value.__cause__ is None, "a user's object leaves its process as text alone"


async def test_what_follows_the_only_answer_of_a_loop_is_no_tools_time_once_that_is_known(
    make_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(ScriptedServer(part([10, 11], 7), part([10, 11], 7)), Reward(0.5, 0.5))
    told: list[tuple[Away, int]] = []
    monkeypatch.setattr(worker._away, "change", lambda what, by: told.append((what, by)))
    await run(worker, "PlainLoop")
    assert [by for what, by in told if what is Away.TOOLS] == [1, -1]
    told.clear()
    await run(worker, "PlainLoop")
    assert [what for what, _ in told if what is Away.TOOLS] == []


async def test_cancelled_trajectory_ends_at_once_and_others_go_on(make_worker: Any) -> None:
    never = asyncio.get_running_loop().create_future()
    worker = make_worker(ScriptedServer("hang", part([10], 7)), Reward(1.0, never))
    doomed = asyncio.create_task(run(worker, key="2-0-0"))
    await asyncio.sleep(0)
    other = asyncio.create_task(run(worker, key="1-0-0"))
    await asyncio.wait({other}, timeout=SOON)
    await worker.cancel(["2-0-0", "unknown"])
    with pytest.raises(TrajectoryCancelled, match="2-0-0"):
        await asyncio.wait_for(doomed, SOON)
    assert len(other.result()) == 2
    assert worker._running == {}


@pytest.mark.parametrize("loop", ["HangingLoop", "StubbornLoop"])
async def test_agent_loop_that_does_not_end_fails_by_its_deadline_which_is_named(
    make_worker: Any, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_worker, "CANCELLED_S", 0.05)
    server = ScriptedServer(part([10], 7), part([10], 7))
    worker = make_worker(server, Reward(), trajectory_s=0.1)
    with pytest.raises(AgentLoopError, match=r"not done within 0\.1 s.*async_training\.timeouts\.trajectory"):
        await run(worker, loop)
    assert worker._running == {}
    assert (await worker.export(SOON))[0] == {}


@pytest.mark.parametrize("deadline", [True, False])
async def test_agent_loop_that_goes_on_after_its_end_is_given_up_and_asks_for_nothing_more(
    make_worker: Any, deadline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_worker, "CANCELLED_S", 0.05)
    monkeypatch.setattr(StubbornLoop, "ends", [])
    server = ScriptedServer(part([10], 7))
    worker = make_worker(server, Reward(), trajectory_s=0.1 if deadline else SOON)
    doomed = asyncio.create_task(run(worker, "StubbornLoop"))
    await asyncio.sleep(0.05)
    if not deadline:
        await worker.cancel(["0-0-0"])
    with pytest.raises(AgentLoopError if deadline else TrajectoryCancelled):
        await asyncio.wait_for(doomed, SOON)
    async with asyncio.timeout(SOON):
        while not StubbornLoop.ends:
            await asyncio.sleep(0.01)
    assert (StubbornLoop.ends, server.calls) == (["GenerationError"], [])


async def test_slow_reward_is_not_the_agent_loops_time(make_worker: Any) -> None:
    late = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.4, late.set_result, 1.0)
    worker = make_worker(ScriptedServer(part([10], 7)), Reward(late), trajectory_s=0.2)
    assert len(await run(worker)) == 3


async def test_time_that_a_trajectory_waits_for_its_turn_does_not_count(make_worker: Any) -> None:
    began = time.monotonic()
    worker = make_worker(ScriptedServer(part([10], 7)), Reward(), trajectory_s=0.1)
    worker.llm_client.gate.hold()
    asyncio.get_running_loop().call_later(0.5, worker.llm_client.gate.go_on)
    with pytest.raises(AgentLoopError, match=r"timeouts\.trajectory"):
        await run(worker, "HangingLoop")
    assert time.monotonic() - began > 0.55


def test_stock_registry_is_what_the_loops_are_found_in() -> None:
    assert {"single_turn_agent", "tool_agent"} <= stock._agent_loop_registry.keys()


async def test_worker_that_was_started_again_has_no_work_before_it_is_prepared(
    make_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_worker, "was_restarted", lambda: True)
    worker = make_worker(ScriptedServer(part([10, 11], 7)), Reward(0.5))
    with pytest.raises(WorkerRestarted):
        await run(worker)
    assert await worker.rescore(b"", 1, 0) is None
    await worker.be_prepared()
    assert await run(worker)


async def test_rollout_trace_has_an_answer_with_each_request_that_made_it(
    make_worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By MLflow's own store and client; a trajectory that is not among the traced ones leaves nothing there."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    RolloutTraceConfig.reset()
    RolloutTraceConfig.init("project", "experiment", "mlflow", token2text=True)
    try:
        worker = make_worker(
            ScriptedServer(part([10, 11], 7, "aborted"), part([12], 8), part([13], 8)), Reward(0.5, 0.5)
        )
        worker.llm_client.tokenizer = worker.tokenizer
        await run(worker)
        await run(worker, key="1-0-0", trace=False)
        mlflow.flush_trace_async_logging()
        (trace,) = mlflow.search_traces(return_type="list")
    finally:
        RolloutTraceConfig.reset()
        mlflow.set_tracking_uri(None)
    tags = {name: value for name, value in trace.info.tags.items() if not name.startswith("mlflow.")}
    said = {"step": "7", "sample_index": "4", "rollout_n": "0", "validate": "False", "experiment_name": "experiment"}
    assert tags == said
    names = {span.span_id: span.name for span in trace.data.spans}
    below = [(span.name, names.get(span.parent_id)) for span in trace.data.spans]
    whole = ("ResumingClient.generate", "agent_loop")
    assert sorted(below) == sorted([("agent_loop", None), whole, *[("LLMServerClient.generate", whole[0])] * 2])
    (answer,) = (span for span in trace.data.spans if span.name == whole[0])
    assert answer.outputs["token_ids"] == [10, 11, 12] and answer.outputs["response_text"]
    assert answer.outputs["extra_fields"]["max_global_steps"] == 8


async def test_each_output_of_a_list_is_a_row_and_the_last_ones_reward_is_for_all_without_their_own(
    make_worker: Any,
) -> None:
    reward = Reward(0.5)
    worker = make_worker(ScriptedServer(part([10, 11], 7), part([12], 8), part([10, 11], 9)), reward, metric="acc")
    scored, *outputs = await run(worker, "SeveralLoop", outputs=3, scores=[None, 0.25])
    assert reward.calls == 1
    assert [output.reward_score for output in outputs] == [0.5, 0.25, 0.5]
    assert [output.extra_fields.get("reward_extra_info") for output in outputs] == [
        {"acc": False},
        None,
        {"acc": False},
    ]
    assert [output.response_ids[0, : output.response_mask.sum()].tolist() for output in outputs] == [
        [10, 11],
        [12],
        [10, 11],
    ]
    # Those of the third answer have the same tokens as the first one's, and another version.
    assert [output.extra_fields["version_runs"] for output in outputs] == [[(7, 2)], [(8, 1)], [(9, 2)]]
    assert (scored.score, scored.filter_metric, scored.exact_versions) == (0.5, 0.0, True)
    assert (scored.oldest_version, scored.newest_version) == (7, 9)
    assert (scored.sampled_tokens, scored.received_tokens, scored.response_tokens) == (5, 5, 5)


async def test_a_list_whose_last_output_has_a_reward_needs_none(make_worker: Any) -> None:
    reward = Reward()
    worker = make_worker(ScriptedServer(part([10], 7), part([12], 7)), reward)
    scored, *outputs = await run(worker, "SeveralLoop", scores=[None, 2])
    assert (reward.calls, scored.score) == (0, 2.0)
    assert [output.reward_score for output in outputs] == [2.0, 2.0]


async def test_tokens_that_outputs_repeat_count_once_in_the_books(make_worker: Any) -> None:
    worker = make_worker(ScriptedServer(part([10, 11], 7), part([12], 7)), Reward(0.5))
    scored, *outputs = await run(worker, "SeveralLoop", times=3)
    assert len(outputs) == 6
    assert (scored.sampled_tokens, scored.received_tokens) == (3, 3)


@pytest.mark.parametrize("fault", [{"outputs": 0}, {"scores": [float("nan"), 1.0]}, {"scores": [0.5, "high"]}])
async def test_a_list_with_a_fault_costs_the_trajectory(make_worker: Any, fault: dict[str, Any]) -> None:
    worker = make_worker(ScriptedServer(part([10], 7), part([12], 7)), Reward(0.5))
    with pytest.raises((UnusableAnswer, NonFinite)):
        await run(worker, "SeveralLoop", **fault)


async def test_a_row_without_sampling_is_answered_greedily(make_worker: Any) -> None:
    """As verl does for a row whose ``__do_sample__`` is false."""
    worker = make_worker(ScriptedServer(*[part([10], 7)] * 6), Reward(*[0.5] * 3))
    SeveralLoop.asked.clear()
    for number, wants in enumerate((True, None, False)):
        await run(worker, "SeveralLoop", f"0-{number}-0", __do_sample__=wants)
    greedy = [(asked["temperature"], asked["top_p"], asked["top_k"]) == (0, 1.0, -1) for asked in SeveralLoop.asked]
    assert greedy == [False, False, True]


INFERENCE = {"name": "vllm", "tensor_model_parallel_size": 1}


class TeacherServer:
    """A teacher's server; ``script`` has errors, futures to wait for, or None for an answer of ``topk`` each token."""

    def __init__(self, name: float, *script: Any) -> None:
        self.name, self.script = name, list(script)
        self.asked: list[list[int]] = []

    def __ray_ready__(self) -> None:
        """It answers, although one of its answers is late."""

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        self.asked.append(prompt_ids)
        step = self.script.pop(0)
        if isinstance(step, asyncio.Future):
            await step
        if step is not None:
            raise step
        columns = range(sampling_params["prompt_logprobs"])
        found = {
            "prompt_ids": [[token + k for k in columns] for token in prompt_ids],
            "prompt_logprobs": [[self.name - k for k in columns] for _ in prompt_ids],
        }
        return TokenOutput(token_ids=[0], extra_fields=found)


def teach(worker: TrajectoryWorker, **teachers: TeacherServer) -> TrajectoryWorker:
    """Have ``worker`` ask these teachers, by their keys, for the two likeliest tokens."""
    models = {name: {"key": name, "model_path": "none", "num_replicas": 1, "inference": INFERENCE} for name in teachers}
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"name": "vllm"}},
            "distillation": {
                "_target_": "verl.workers.config.DistillationConfig",
                "enabled": True,
                "n_gpus_per_node": len(teachers),
                "nnodes": 1,
                "teacher_models": {"teacher_model": {"num_replicas": 0}, **models},
                "distillation_loss": {
                    "_target_": "verl.workers.config.DistillationLossConfig",
                    "loss_mode": "forward_kl_topk",
                    "topk": 2,
                },
            },
        }
    )
    worker.distillation_enabled, worker.teacher_key = True, "data_source"
    worker.teacher_client = {name: TeacherClient(config, name) for name in teachers}
    worker.teacher_server_manager = AsyncTeacherLLMServerManager(config, worker.teacher_client)
    for name, server in teachers.items():
        worker.teacher_client[name].use([Handle(server)])
    return worker


async def test_teachers_columns_come_with_the_trajectory_from_the_teacher_of_its_row(make_worker: Any) -> None:
    math, code = TeacherServer(-1.0, None), TeacherServer(-2.0, None)
    worker = teach(make_worker(ScriptedServer(part([10, 11], 7)), Reward(1.0)), math=math, code=code)
    _, payload = await run(worker, data_source="code")
    assert (math.asked, code.asked) == ([], [[1, 2, 10, 11]])
    # The prompt has four places, the response eight.
    ids, log_probs = payload.teacher_ids[0], payload.teacher_logprobs[0]
    assert (ids.dtype, log_probs.dtype) == (torch.int32, torch.float32)
    assert ids[2:6].tolist() == [[1, 2], [2, 3], [10, 11], [11, 12]]
    assert log_probs.tolist() == [[0.0, 0.0]] * 2 + [[-2.0, -3.0]] * 4 + [[0.0, 0.0]] * 6
    assert not {"teacher_ids", "teacher_logprobs"} & payload.extra_fields.keys()


async def test_failed_or_late_teacher_is_asked_again_for_the_same_answer(make_worker: Any) -> None:
    never = asyncio.get_running_loop().create_future()
    teacher, server = TeacherServer(-1.0, ValueError("busy"), never, None), ScriptedServer(part([10, 11], 7))
    worker = teach(make_worker(server, Reward(1.0), retries=2, reward_s=0.3), one=teacher, other=TeacherServer(0.0))
    *_, payload = await run(worker, data_source="one")
    assert teacher.asked == [[1, 2, 10, 11]] * 3 and len(server.calls) == 1
    assert payload.teacher_logprobs[0, 3].tolist() == [-1.0, -2.0]


async def test_teacher_that_fails_every_time_fails_the_answer_by_name(make_worker: Any) -> None:
    teacher = TeacherServer(-1.0, ValueError("no room"), asyncio.get_running_loop().create_future())
    reward = Reward(1.0)
    worker = make_worker(ScriptedServer(part([10], 7)), reward, reward_s=0.3)
    with pytest.raises(TeacherError, match=r"failed 2 times, last with TimeoutError: .*async_training.timeouts.reward"):
        await run(teach(worker, one=teacher, other=TeacherServer(0.0)), data_source="one")
    # A scheduler starts no other attempt after such an error, as after that of a reward.
    assert issubclass(TeacherError, RewardError) and reward.calls == 1
    assert worker._running == {}


async def test_validation_asks_no_teacher(make_worker: Any) -> None:
    teacher = TeacherServer(-1.0)
    worker = teach(make_worker(ScriptedServer(part([10], 7)), Reward(1.0)), one=teacher, other=TeacherServer(0.0))
    sample = {"raw_prompt": [], "agent_name": "PlainLoop", "data_source": "one"}
    scored, payload = await asyncio.wait_for(worker.run_trajectory("0-0-0", sample, 4, 0, 7, validate=True), SOON)
    assert teacher.asked == [] and scored.score == 1.0
    assert [output.teacher_logprobs for output in unpack(payload)] == [None]
