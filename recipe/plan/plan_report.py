# SPDX-License-Identifier: Apache-2.0
"""Formats the plan of a run as text: its processes, accelerators, batches, and memory of devices and hosts."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fractions import Fraction

from recipe.async_engine.config.plan import (
    batch_size,
    hybrid_replicas,
    places_per_replica,
    proximal_source,
    replica_size,
    rollout_accelerators,
    slots_per_replica,
    staleness_bound,
    trainer_ranks,
)
from recipe.async_engine.config.problems import ConfigError
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.rules.servers import reward_accelerators, teachers_accelerators
from recipe.async_engine.config.sections import ELASTIC, SHARED
from recipe.async_engine.config.validation import Findings
from recipe.plan.memory import estimate as memory
from recipe.plan.memory.items import Item, Part, gib

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TEACHING = "distillation.n_gpus_per_node"
WIDTH = 34


def report(title: str, found: Findings, of_verl: bool) -> str:
    """Return the whole plan as text; ``of_verl`` is whether one of verl's own trainers runs and forms the batches."""
    context = found.context
    sections = {
        "processes": _processes(context),
        "accelerators": _accelerators(context),
        "batches": _batches_of_verl(context) if of_verl else _batches(found),
        "memory of an accelerator": _memory(context),
        "memory of the hosts": _host(memory.parts(context)),
    }
    lines = [f"plan of {title}; nothing is started"]
    for name, rows in sections.items():
        lines += ["", name, *(f"  {row}" for row in rows)]
    for name, texts in (("warnings", found.warnings), ("problems", found.problems)):
        if texts:
            lines += ["", name, *(f"  - {text}" for text in texts)]
    return "\n".join(lines) + "\n"


def _row(name: str, value: object, why: str = "") -> str:
    return f"{name:<{WIDTH}} {value!s:>12}  {why}".rstrip()


def _processes(context: RuleContext) -> Iterator[str]:
    settings, servers = context.settings, context.settings.servers
    shared = settings.async_training.placement == SHARED
    ranks, size = trainer_ranks(context.config), replica_size(context.config)
    generation = rollout_accelerators(context.config, settings)
    yield _row("main, trainer's process", 2)
    yield _row("training ranks", ranks, f"{context.get(f'{ACTOR}.strategy')}")
    if context.has_critic:
        yield _row("critic's ranks", ranks, "in the training ranks' processes")
    if context.uses_reference:
        yield _row("reference policy's ranks", ranks, "in the training ranks' processes")
    replicas = f"of {size} accelerator{'s' * (size > 1)} each" + (", where training is" if shared else "")
    yield _row("rollout replicas", generation // size, replicas)
    if settings.async_training.placement == ELASTIC:
        hybrid = hybrid_replicas(context.config, settings)
        yield _row("hybrid replicas", hybrid, "on the training ranks' accelerators, while these wait")
    yield _row("agent-loop workers", context.get(f"{ROLLOUT}.agent.num_workers"))
    yield _row("reward workers", context.get("reward.num_workers"), f"each with {_scorers(context)}")
    if servers.enabled:
        yield _row("log-prob servers", servers.replicas, f"of {servers.ranks} ranks each, {servers.backend}")
    if servers.reference_replicas:
        yield _row("servers of the reference policy", servers.reference_replicas, f"of {servers.ranks} ranks each")


def _scorers(context: RuleContext) -> str:
    count = context.settings.async_training.reward_processes
    return f"{count} process{'es' * (count != 1)} beside it" if count else "threads"


def _accelerators(context: RuleContext) -> Iterator[str]:
    settings, servers = context.settings, context.settings.servers
    ranks, reward = trainer_ranks(context.config), reward_accelerators(context)
    shared, total = settings.async_training.placement == SHARED, ranks
    of_trainer = _nodes(context.get("trainer.nnodes"), context.get("trainer.n_gpus_per_node"))
    yield _row("training and generation in turns" if shared else "training", ranks, of_trainer)
    if not shared:
        rollout = settings.rollout
        generation = rollout.nnodes * rollout.n_gpus_per_node
        total += generation
        yield _row("generation", generation, _nodes(rollout.nnodes, rollout.n_gpus_per_node))
    if servers.enabled:
        total += servers.accelerators
        yield _row("log-probs", servers.accelerators, _nodes(servers.nnodes, servers.n_gpus_per_node))
    if reward:
        total += reward
        yield _row("reward model", reward)
    if teaching := teachers_accelerators(context):
        total += teaching
        yield _row("teachers", teaching, _nodes(context.get("distillation.nnodes"), context.get(TEACHING)))
    there = context.available.accelerators if context.available else None
    yield _row("in all", total, "" if there is None else f"{there} are available")


def _nodes(nodes: object, each: object) -> str:
    return f"{nodes} x {each} (nodes x accelerators of a node)"


def _batches(found: Findings) -> Iterator[str]:
    context = found.context
    training, config = context.settings.async_training, context.config
    batch, answers = context.batch_groups, context.count(f"{ROLLOUT}.n")
    if batch is None or answers is None:
        yield "not known: see the problems"
        return
    steps, bound = training.trigger_parameter_sync_step, staleness_bound(training)
    version = batch * steps
    depth = Fraction(str(training.staleness_threshold))
    replicas = rollout_accelerators(config, context.settings) // replica_size(config)
    yield _row("prompts of a step (b)", batch_size(config, training), f"{batch * answers} samples")
    yield _row("answers to each (n)", answers)
    yield _row("prompts of an update", context.get(f"{ACTOR}.ppo_mini_batch_size"))
    yield _row("steps of a version (k)", steps)
    yield _row("prompts of a version (B = k b)", version, f"{version * answers} samples")
    yield _row("staleness bound in versions (S)", bound, f"pipeline depth {training.staleness_threshold:g}")
    yield _row("versions of an answer", bound, "may pass while it is generated; training waits for a slower one")
    at_once = replicas * places_per_replica(config, training)
    if bound and not training.whole_batches:
        # `times` is the number of answers that each sequence slot generates, one after the other, while `bound`
        # versions are trained.
        times, longest = bound * version * answers / at_once, context.get("data.max_response_length")
        mean = f"{longest} tokens where the mean is {math.ceil(int(longest or 0) / times)}"
        yield _row("longest answer in these versions", f"{times:.1f}", f"times the mean, with all slots in use: {mean}")
    yield _row("prompts live at most", version + math.floor(depth * version), "by the pipeline's depth, (1 + depth) B")
    yield _row("slots of the gate", (1 + bound) * version, "at a version's begin, (1 + S) B")
    under_way = replicas * slots_per_replica(config, training)
    yield _row("trajectories at the engines", under_way, f"at most, {at_once} of them generated at once")
    yield _row("proximal log-probs", proximal_source(config, context.settings))
    steps = 0
    with suppress(ConfigError):
        steps = found.plan.total_steps
    if steps:
        yield _row("steps in all", steps, "at most")
    else:
        yield _row("steps in all", "not known", "the number of rows is unknown, and no setting limits steps")


def _batches_of_verl(context: RuleContext) -> Iterator[str]:
    batch, answers = context.get("data.train_batch_size"), context.get(f"{ROLLOUT}.n")
    threshold = context.count("trainer.v1.sampler.max_off_policy_threshold")
    yield _row("prompts of a version", batch, f"{batch * answers} samples" if batch and answers else "")
    yield _row("prompts of an update", context.get(f"{ACTOR}.ppo_mini_batch_size"))
    bound = "none" if threshold is None else threshold - 1
    yield _row("staleness bound in versions", bound, "trainer.v1.sampler.max_off_policy_threshold - 1")


def _memory(context: RuleContext) -> Iterator[str]:
    device, parts = memory.device_bytes(context), memory.parts(context)
    if context.on_cpu:
        yield "not estimated where trainer.device=cpu"
        return
    if not parts:
        yield "not known: no config.json of actor_rollout_ref.model.path is at hand, or its family is not known"
        return
    size = f"of {gib(device)}" if device else "of an unknown size; set async_training.device_memory_gib"
    yield f"estimated, {size}"
    for part in parts:
        yield f"{part.name} ({part.devices})"
        for moment in part.moments:
            yield f"  {moment.name:<{WIDTH}} {gib(moment.total):>12}"
            yield from (f"    {row}" for row in _items(moment.items))
        yield from (f"  {note}" for note in part.notes)


def _items(items: Sequence[Item]) -> Iterator[str]:
    for item in sorted(items, key=lambda item: -item.bytes):
        yield f"{item.name:<{WIDTH + 4}} {gib(item.bytes):>10}{'' if item.certain else '  (estimate)'}"


def _host(parts: Sequence[Part]) -> Iterator[str]:
    each = [(item, f"each {part.name}") for part in parts for item in part.host]
    once = [(item, "once") for part in parts for item in part.host_once]
    for item, where in (*each, *once):
        yield f"{item.name:<{WIDTH + 4}} {gib(item.bytes):>10}  {where}"
    if not each and not once:
        yield "nothing large"
