# SPDX-License-Identifier: Apache-2.0
"""The sides of the race and their overrides: stock verl's synchronous and asynchronous trainers, and this package's
modes.

Each side has `DEVICES` accelerators. With separate placement the trainer has half of them, or as many as the side's
name says, and one replica the others; with shared placement both have all of them in turns. Everything else is the same
preset, task and agent loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mains import stock

from recipe.laptop.task import TaskPaths

DEVICES = 8
BATCH, ANSWERS, SLOTS = 16, 4, 32
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Task:
    """The work to generate: a preset, an agent loop, the steps of a run, and the time scale.

    A token stands for `TOKEN_SCALE`, so answers of 6 have 1,536 tokens and those of 120 have 30,720.
    """

    preset: str
    loop: str
    steps: int
    skip: int
    time_scale: float
    reward_s: float = 0.0

    @property
    def lengths(self) -> str:
        return "long_tail" if self.preset.endswith("long_tail") else "uniform"


TOKEN_SCALE = 256
TASKS: Mapping[str, Task] = {
    "uniform": Task("tiny_cpu", "fixed_lengths.FixedLengthLoop", steps=18, skip=4, time_scale=0.16),
    "long_tail": Task("tiny_cpu_long_tail", "fixed_lengths.FixedLengthLoop", steps=26, skip=6, time_scale=0.08),
    "tools": Task("tiny_cpu", "race_loops.ToolLoop", steps=18, skip=4, time_scale=0.16),
    "growing": Task("tiny_cpu", "fixed_lengths.GrowingLengthLoop", steps=24, skip=2, time_scale=0.24),
    "slow_rewards": Task("tiny_cpu", "fixed_lengths.FixedLengthLoop", steps=18, skip=4, time_scale=0.16, reward_s=2.0),
}

ASYNC = "async_training"


@dataclass(frozen=True)
class Setting:
    """Staleness threshold and batches per version, for both packages, and settings that only this package has.

    Attributes:
        bypass: whether a mode that would compute log-probs uses those of its engines, as stock's fully_async does.
    """

    threshold: float = 1
    batches: int = 1
    bound: int | None = None
    at_swap: str | None = None
    bypass: bool = False


SETTINGS: Mapping[str, Setting] = {
    "defaults": Setting(0.1, 4),
    "threshold 1": Setting(),
    "threshold 1, keep": Setting(at_swap="keep"),
    "threshold 1, bypass": Setting(bypass=True),
    "threshold 1, bound 1": Setting(bound=1),
    "threshold 1, bound 2": Setting(bound=2),
    "threshold 1, bound 8": Setting(bound=8),
}


@dataclass(frozen=True)
class Side:
    """A trainer: its main and its own overrides.

    settings: the settings that make a difference to it; a side with a setting of its own runs only that one. lends:
    whether engines also sleep on the trainer's devices, to generate while the trainer waits.
    """

    main: str
    ours: bool
    shared: bool
    settings: tuple[str, ...]
    own: tuple[str, ...] = ()
    lends: bool = False
    training: int = DEVICES // 2
    """The trainer's number of accelerators, if placement is separate."""


V1 = "verl.trainer.main_ppo"
WAIT = "trainer.v1.sampler.max_off_policy_strategy=wait"
BOTH = ("defaults", "threshold 1")
OURS = tuple(name for name, setting in SETTINGS.items() if not setting.bypass)
# When taking turns, both sides wait for each other at a swap in any case.
IN_TURNS = tuple(name for name, setting in SETTINGS.items() if setting.at_swap is None)
SIDES: Mapping[str, Side] = {
    "stock fully_async": Side(stock.FULLY_ASYNC_MAIN, False, False, BOTH),
    "stock fully_async, lending": Side(
        stock.FULLY_ASYNC_MAIN, False, False, BOTH, (f"{ASYNC}.use_dynamic_resource_scheduling=true",), lends=True
    ),
    "stock one_step_off": Side(stock.ONE_STEP_MAIN, False, False, ("threshold 1",)),
    "stock separate_async": Side(V1, False, False, BOTH, ("trainer.v1.trainer_mode=separate_async", WAIT)),
    "stock colocate_async": Side(V1, False, True, BOTH, ("trainer.v1.trainer_mode=colocate_async", WAIT)),
    "stock synchronous": Side(V1, False, True, ("threshold 1",), ("trainer.v1.trainer_mode=sync",)),
    "fully_async": Side("recipe.fully_async.main", True, False, OURS),
    "elastic": Side("recipe.fully_async.main", True, False, BOTH, (f"{ASYNC}.placement=elastic",), lends=True),
    **{
        f"fully_async, {training} train": Side("recipe.fully_async.main", True, False, BOTH, training=training)
        for training in (2, 3, 5, 6)
    },
    "one_step_off": Side("recipe.one_step_off.main", True, False, ("threshold 1",)),
    "partial_rollout": Side("recipe.partial_rollout.main", True, True, IN_TURNS),
}


def common(task: Task, steps: int, loops: Path) -> list[str]:
    length = 256 if task.lengths == "long_tail" else 128
    return [
        "algorithm.adv_estimator=grpo",
        "data.shuffle=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.model.external_lib=benchmarks.emulation.trainer",
        f"{ROLLOUT}.n={ANSWERS}",
        f"{ROLLOUT}.max_num_seqs={SLOTS}",
        f"{ROLLOUT}.max_num_batched_tokens={SLOTS * length}",
        f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        f"{ROLLOUT}.agent.default_agent_loop=race",
        f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension",
        f"trainer.total_training_steps={steps}",
    ]


APART = [
    f"{ROLLOUT}.checkpoint_engine.backend=emulated_gloo",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=benchmarks.emulation.transfer",
]


def overrides(name: str, setting: str, task: Task) -> list[str]:
    """Return what a side needs in addition to what all have in common."""
    side, asked = SIDES[name], SETTINGS[setting]
    found = [*side.own, *([] if side.shared else APART)]
    depth = [f"{ASYNC}.staleness_threshold={asked.threshold}", f"{ASYNC}.trigger_parameter_sync_step={asked.batches}"]
    if side.main in (stock.FULLY_ASYNC_MAIN, "recipe.fully_async.main"):
        found += [*depth, f"rollout.total_rollout_steps={task.steps * BATCH}"]
    if name == "partial_rollout" and setting != "defaults":
        found += [depth[0]]
    if side.ours and name != "one_step_off" and asked.bound is not None:
        found += [f"{ASYNC}.max_staleness={asked.bound}"]
    if asked.at_swap is not None:
        found += [f"{ASYNC}.weights.at_swap={asked.at_swap}"]
    if asked.bypass:
        found += [f"{ASYNC}.proximal_log_probs=bypass"]
    if not side.ours:
        found += _stock(name, setting)
    return found


def _stock(name: str, setting: str) -> list[str]:
    found = ["trainer.logger=[console,file]", "trainer.resume_mode=disable"]
    if SIDES[name].main in (stock.FULLY_ASYNC_MAIN, stock.ONE_STEP_MAIN):
        # This package's mains set these, while stock's need them by hand; the default search path works only in a verl
        # checkout.
        found += ["hydra.searchpath=[pkg://verl.trainer.config]", "actor_rollout_ref.hybrid_engine=false"]
    if SIDES[name].main == stock.FULLY_ASYNC_MAIN:
        return [*found, "data.gen_batch_size=1", f"rollout.n={ANSWERS}"]
    found.append(f"data.train_batch_size={BATCH}")
    if name in ("stock separate_async", "stock colocate_async"):
        # The client reads this setting if the section exists, which the preset adds.
        found.append("+async_training.partial_rollout=true")
        found.append("trainer.v1.sampler.custom_sampler.path=pkg://quick_replay_buffer")
        found.append("trainer.v1.sampler.custom_sampler.name=QuickReplayBuffer")
        if setting != "defaults":
            found.append("trainer.v1.sampler.max_off_policy_threshold=2")
    if name == "stock separate_async":
        found += ["data.gen_batch_size=1", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1"]
        if setting != "defaults":
            found.append("trainer.v1.separate_async.parameter_sync_step=1")
    return found


def own_preset(task: Task, name: str) -> str:
    return f"{'' if SIDES[name].ours else '+'}preset={task.preset}"


def reward(task: Task, paths: TaskPaths, folder: Path) -> list[str]:
    """Return overrides for a slow reward, or none if the task uses its own reward."""
    if not task.reward_s:
        return []
    file = folder / "slow_reward.py"
    file.write_text(
        "import asyncio\n\n\n"
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        f"    await asyncio.sleep({task.reward_s})\n"
        "    return float(solution_str == ground_truth)\n"
    )
    return [f"reward.custom_reward_function.path={file}"]
