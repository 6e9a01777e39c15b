# SPDX-License-Identifier: Apache-2.0
"""Every documented command composes, is accepted by the rules and by verl's own types, and fits its accelerators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from documented import SCRIPTS, STOCK_MAIN, Command, cases, commands, composed, for_accelerators, shown
from omegaconf import OmegaConf

from recipe.async_engine.config.facts import FileFact, Resources
from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.plan import plan_of, rollout_accelerators
from recipe.async_engine.config.problems import Problem, lookup
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.config.v1_validation import as_placed, judge_v1
from recipe.async_engine.config.validation import judge
from recipe.async_engine.inspection.check import plain
from recipe.async_engine.inspection.verl_check import verl_problems
from recipe.async_engine.outside import MODES
from recipe.mains.arguments import PREFIX, take_arguments
from recipe.mains.plan_only import JUDGES, V1_JUDGES
from recipe.plan.memory import estimate as memory
from recipe.plan.memory.items import GIB
from recipe.plan.memory.shape import known_model

ROWS = 7000
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path"
# Of the accelerators that the pages speak of.
DEVICE_GIB = {"preset=one_gpu": 24, "qwen2_5_0_5b_gsm8k_2": 24}
COMMANDS = commands()


def facts(config: Mapping[str, Any]) -> list[FileFact]:
    """As if the models were there, and the data."""
    names = [MODEL, "critic.model.path"]
    found = [(name, lookup(config, name)) for name in names]
    shapes = [(name, known_model(str(path))) for name, path in found if path]
    return [FileFact(name, "there", "model", model_config=shape) for name, shape in shapes if shape is not None]


def device_bytes(command: Command) -> int:
    told = " ".join((command.where, *command.arguments))
    return next((gib for name, gib in DEVICE_GIB.items() if name in told), 80) * GIB


def judged(command: Command, accelerators: int | None = None) -> tuple[list[Problem], RuleContext]:
    """All problems of a command, by the rules and, where these have none, by verl's types."""
    config = composed(command)
    trainer = str(config.trainer.v1.trainer_mode)
    mode = trainer.removeprefix(PREFIX)
    if trainer.startswith(PREFIX) and mode in MODES:
        take_arguments(config, mode)
    settings = plain(config)
    there = Resources(accelerators, device_bytes(command))
    if trainer.startswith(PREFIX) and mode not in MODES:
        problems, context = judge_v1(settings, mode, there, facts(settings), V1_JUDGES)
        context = as_placed(context, mode)
    else:
        problems, context = judge(settings, there, facts(settings), ROWS, JUDGES)
    return [*problems, *verl_problems(context, problems)], context


def taken(context: RuleContext) -> int:
    """Accelerators of all parts of a run."""
    settings = context.settings
    shared = settings.async_training.placement == SHARED
    training = context.get("trainer.nnodes") * context.get("trainer.n_gpus_per_node")
    generation = 0 if shared else rollout_accelerators(context.config, settings)
    return int(training + generation + settings.servers.accelerators)


@pytest.mark.parametrize("command", COMMANDS, ids=[command.where for command in COMMANDS])
def test_command_is_accepted_by_the_rules_and_by_verls_own_types(command: Command) -> None:
    problems, context = judged(command)
    assert list(map(str, problems)) == []
    assert memory.warnings(context) == []
    if command.is_stock and command.flag not in MODES:
        return
    plan = plan_of(context.config, context.settings, ROWS)
    assert plan.total_steps >= 1
    servers = context.settings.servers
    assert (plan.proximal is Proximal.SERVER) == servers.enabled
    if context.on_cpu:
        return
    assert memory.parts(context), "its memory is not estimated"
    named = re.search(r"_(\d+(?:_\d+)*)\.sh", command.where)
    if named is not None:
        accelerators = sum(map(int, named[1].split("_")))
        shared = context.settings.async_training.placement == SHARED
        # The one script for "1 to 2": it takes the first of them in turns.
        assert taken(context) == (1 if shared and accelerators == 2 else accelerators)


def test_commands_of_every_kind_are_found() -> None:
    mains = {command.main for command in COMMANDS}
    assert mains == {STOCK_MAIN, *(f"recipe.{mode}.main" for mode in MODES)}
    assert {command.flag for command in COMMANDS if command.is_stock} >= {*MODES, "separate_async"}
    assert len(cases()) >= 18
    assert len(COMMANDS) >= 35


def test_accelerators_that_are_not_there_are_refused() -> None:
    command = next(command for command in COMMANDS if "qwen2_5_3b_gsm8k_8.sh fully_async_servers" in command.where)
    problems, _ = judged(command, accelerators=7)
    assert [problem.setting for problem in problems] == ["rollout.n_gpus_per_node"]


def in_every_way() -> list[Command]:
    """The README's command for accelerators, in each mode and by each flag."""
    readme = for_accelerators()
    of_fully_async = ("rollout.total_rollout_steps", "async_training.staleness_threshold")
    others = readme.without(*of_fully_async, "async_training.trigger_parameter_sync_step")
    stock = others.without("rollout.n_gpus_per_node").arguments
    stock_as_well = (
        "data.train_batch_size=128",
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.checkpoint_engine.backend=nccl",
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node=4",
    )
    commands = [Command("fully_async", readme.main, readme.arguments)]
    for mode in ("one_step_off", "partial_rollout"):
        commands.append(Command(mode, f"recipe.{mode}.main", (*others.arguments, "data.train_batch_size=128")))
    for flag in (*MODES, "separate_async", "colocate_async"):
        commands.append(Command(f"flag {flag}", STOCK_MAIN, (*stock, *stock_as_well, f"+recipe={flag}")))
    return commands


@pytest.mark.parametrize("command", in_every_way(), ids=lambda command: command.where)
def test_readme_command_without_sizes_of_micro_batches_is_refused_by_name(command: Command) -> None:
    """verl asserts them when the actor is built, after placement (verl/workers/config/actor.py:199-209)."""
    problems, _ = judged(command.without(f"{ACTOR}.use_dynamic_bsz"))
    refused = {problem.setting: problem for problem in problems}
    assert set(refused) == {f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"}
    assert "use_dynamic_bsz=True" in refused[f"{ACTOR}.ppo_micro_batch_size_per_gpu"].advice


EXPERTS = [command for command in COMMANDS if "qwen3_30b_a3b_megatron_32.sh" in command.where]
RETURNED, REPLAY = f"{ROLLOUT}.enable_rollout_routing_replay", f"{ACTOR}.megatron.router_replay.mode"
DIVIDED, DIVIDED_BY_MEGATRON = f"{ROLLOUT}.expert_parallel_size", f"{ACTOR}.megatron.expert_model_parallel_size"


@pytest.mark.parametrize("command", EXPERTS, ids=[command.where for command in EXPERTS])
def test_experts_of_the_example_are_replayed_and_divided(command: Command) -> None:
    """In every mode; what cannot work is refused by name."""
    replayed = command.and_also(f"{RETURNED}=true", f"{REPLAY}=R3")
    cases = [
        (replayed.and_also(f"{DIVIDED}=4"), ["model_engine_server.backend"] if "servers" in command.where else []),
        (command.and_also(f"{DIVIDED}=4"), []),
        (command.and_also(f"{RETURNED}=true"), [REPLAY]),
        (command.and_also(f"{DIVIDED}=2"), [DIVIDED]),
        (command.and_also(f"{DIVIDED_BY_MEGATRON}=256"), [DIVIDED_BY_MEGATRON]),
    ]
    for changed, refused in cases:
        problems, _ = judged(changed)
        assert sorted({problem.setting for problem in problems}) == refused, list(map(str, problems))


# What verl refuses in a worker, and no rule of this package's has: by its own types.
BY_VERL = {
    f"{ROLLOUT}.mode=sync": f"{ROLLOUT}",
    f"{ROLLOUT}.pipeline_model_parallel_size=2": f"{ROLLOUT}",
    f"{ACTOR}.loss_agg_mode=mean": f"{ACTOR}",
    f"{ACTOR}.optim.lr_scheduler_type=linear": f"{ACTOR}",
    "+actor_rollout_ref.model.lora_ranks=8": "actor_rollout_ref.model",
    f"+{ACTOR}.ppo_epoch=2": f"{ACTOR}",
    f"{ROLLOUT}.trace.max_samples_per_step_per_worker=-1": f"{ROLLOUT}",
}


def test_what_verls_own_types_refuse_is_refused_before_a_process_starts() -> None:
    readme = for_accelerators().and_also(f"{ACTOR}.use_dynamic_bsz=true")
    config = plain(composed(readme))
    for argument, section in BY_VERL.items():
        changed = OmegaConf.create(config)
        name, _, value = argument.lstrip("+").partition("=")
        OmegaConf.update(changed, name, int(value) if value.lstrip("-").isdigit() else value, force_add=True)
        settings = plain(changed)
        problems, context = judge(settings, None, facts(settings), ROWS, JUDGES)
        found = verl_problems(context, problems)
        assert [problem.setting for problem in found] == [section], (argument, list(map(str, found)))
        assert "verl refuses it" in found[0].advice


def test_mode_that_a_script_does_not_have_is_refused_by_it() -> None:
    script = next(script for script in SCRIPTS if "MODE=" in Path(script).read_text())
    finished = shown(script, "asynchronous")
    assert finished.returncode == 2
    assert "MODE=asynchronous: one of one_step_off, fully_async" in finished.stderr
