# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory of a whole run, and checks that it fits on the accelerators.

Contract: `parts_of` returns a `Part` for each set of accelerators with the same role (trainer ranks, rollout replicas,
log-prob servers), and `parts` one more for each teacher. A part has the contents of one accelerator's memory in each
phase of the run (`Moment`) in which memory use may peak. A run is refused in two cases: if a part's amounts that are
certain (`Item.certain`) exceed a device's memory, or if the part's total exceeds this memory by more than the share
`ERROR`. A total above the share `NEAR` of the memory causes a warning. `recipe.mains` passes this module to the
configuration's check, which calls `problems` and `warnings`. Shown by tests/plan/test_memory.py and
test_memory_parts.py; docs/memory.md compares the estimates with published and measured figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.plan import (
    rollout_accelerators,
    teacher_size,
    teachers,
    trainer_ranks,
)
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.rules.servers import teacher_servers
from recipe.async_engine.config.sections import ELASTIC, SHARED, Settings
from recipe.plan.memory.engines import (
    ACTOR,
    BUCKET,
    MODEL,
    ROLLOUT,
    SERVERS,
    Engine,
    actor_rank,
    asleep,
    bucket_bytes,
    copy_asleep,
    critic_rank,
    device_buckets,
    is_megatron,
    longest,
    outside_share,
    prompt_logits,
    reference_rank,
    rollout_engine,
    room,
    server_rank,
    teacher_engine,
)
from recipe.plan.memory.items import GIB, Item, Moment, Part, gib, listed
from recipe.plan.memory.parallel import parallel_sizes
from recipe.plan.memory.shape import ModelShape, model_of
from recipe.plan.memory.training import CONTEXT, Rank

# ERROR is the relative error of an estimate (docs/memory.md). A part whose memory is above the share NEAR of a device
# is reported in a warning.
ERROR = 0.15
NEAR = 0.92
POLICY, REFERENCE = "actor", "reference policy"


@dataclass(frozen=True, slots=True)
class Models:
    """Shape of the policy, shape of the critic (None if not known), and number of the policy's token positions."""

    policy: ModelShape
    critic: ModelShape | None = None
    positions: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A part that exceeds or nearly fills a device's memory in a phase (``moment``), and whether the run is refused."""

    part: Part
    moment: Moment
    refused: bool


def parts_of(context: RuleContext, models: Models, device: int | None) -> list[Part]:
    """Return the memory of each part of a run; ``device`` is an accelerator's memory in bytes, None if not known."""
    run = _Run(context, models, device)
    placement = context.settings.async_training.placement
    if placement == SHARED:
        return [run.in_turns()]
    parts = [run.in_turns() if placement == ELASTIC else run.trainer(), run.rollout()]
    return [*parts, run.servers()] if context.settings.servers.enabled else parts


def verdicts(parts: list[Part], device: int) -> Iterator[Verdict]:
    """Yield a verdict for each part of a run that exceeds or nearly fills a device of ``device`` bytes."""
    for part in parts:
        certain = max(part.moments, key=lambda moment: moment.certain)
        if certain.certain > device:
            yield Verdict(part, certain, refused=True)
        elif part.peak.total > NEAR * device:
            yield Verdict(part, part.peak, refused=part.peak.total > (1 + ERROR) * device)


@dataclass(frozen=True, slots=True)
class _Run:
    context: RuleContext
    models: Models
    device: int | None

    @property
    def config(self) -> Mapping[str, Any]:
        return self.context.config

    @property
    def settings(self) -> Settings:
        return self.context.settings

    def trainer(self) -> Part:
        """Return the memory of the trainer's ranks, for a run whose rollout engines use other accelerators."""
        buckets = listed(device_buckets(self.config, hands_over=False))
        moments = tuple(Moment(moment.name, (*moment.items, *buckets)) for moment in self._training())
        devices, settings = trainer_ranks(self.config), self._less_training()
        host = (*self._on_host(), *self._kept())
        return Part("trainer rank", devices, moments, settings, host, self._snapshot())

    def _training(self) -> Iterator[Moment]:
        """Yield a trainer rank's memory in each phase. In each of them, one model computes and the others are idle."""
        for name, rank in self._ranks().items():
            rest = self._beside(name)
            if name != REFERENCE:
                yield Moment("update" if name == POLICY else f"update of the {name}", (*rank.updating, *rest))
            if name == REFERENCE or (name == POLICY and self.context.trainer_scores):
                yield Moment("log-probs" if name == POLICY else f"log-probs of the {name}", (*rank.scoring, *rest))

    def _ranks(self) -> dict[str, Rank]:
        ranks = {POLICY: actor_rank(self.config, self.models.policy)}
        if self.context.has_critic and self.models.critic is not None:
            ranks["critic"] = critic_rank(self.config, self.models.critic)
        if self.context.uses_reference:
            ranks[REFERENCE] = reference_rank(self.config, self.models.policy)
        return ranks

    def _beside(self, working: str) -> tuple[Item, ...]:
        """Return the device memory that a trainer rank's other models keep while the model ``working`` computes."""
        others = ((name, rank) for name, rank in self._ranks().items() if name != working)
        return tuple(_of(name, item) for name, rank in others for item in rank.at_rest)

    def _on_host(self) -> tuple[Item, ...]:
        policy, *others = self._ranks().items()
        return (*policy[1].host, *(_of(name, item) for name, rank in others for item in rank.host))

    def _kept(self) -> tuple[Item, ...]:
        """Return the copies of weights that a rank keeps in host memory while it is ahead of the published version.

        There are none if every step is published, or if nothing would read the copies.
        """
        saves = (self.context.get("trainer.save_freq") or -1) > 0
        scores = self.context.trainer_scores or self.settings.async_training.placement == ELASTIC
        if self.settings.async_training.trigger_parameter_sync_step == 1 or not (saves or scores):
            return ()
        weights = self._ranks()[POLICY].weights
        return listed(
            Item("copy of the published weights", weights),
            Item("copy of the trained weights, while the published ones are in use", weights) if scores else None,
        )

    def _less_training(self) -> tuple[str, ...]:
        """Return the settings that can lower the memory need of training, most effective first."""
        dynamic = self.context.get(f"{ACTOR}.use_dynamic_bsz")
        tokens = f"{ACTOR}.ppo_max_token_len_per_gpu" if dynamic else f"{ACTOR}.ppo_micro_batch_size_per_gpu"
        if is_megatron(self.config, ACTOR):
            layers = f"{ACTOR}.megatron.override_transformer_config.recompute_granularity"
            return tokens, layers, f"{ACTOR}.megatron.tensor_model_parallel_size", "trainer.n_gpus_per_node", BUCKET
        layers = f"{MODEL}.enable_gradient_checkpointing"
        return tokens, layers, f"{MODEL}.use_fused_kernels", "trainer.n_gpus_per_node", BUCKET

    def _snapshot(self) -> tuple[Item, ...]:
        """Return the copy of the weights in host memory from which a weight sync sends while training continues.

        If training waits for the weight sync, there is no such copy, and the result is empty.
        """
        weights = self.settings.weights
        if weights.publish != "beside":
            return ()
        copy = 2 * self.models.policy.parameters
        return (Item("copy of the weights that is sent, at rank 0", copy),)

    def rollout(self) -> Part:
        """Return the memory of rollout replicas. During a weight sync they may have two versions of the weights."""
        engine, weights = rollout_engine(self.config, self.models.policy), self.settings.weights
        staged = Item("next weights", engine.weights)
        on_device = weights.staging == "device"
        items = listed(
            *self._engine(),
            staged if on_device else None,
            device_buckets(self.config, hands_over=True),
            Item("processes beside the engine", CONTEXT.bytes, certain=False),
        )
        host = listed(staged if weights.staging == "host" else None)
        settings = (f"{ROLLOUT}.gpu_memory_utilization", "async_training.weights.staging", BUCKET)
        moment = Moment("generation and a weight sync", items)
        devices = rollout_accelerators(self.config, self.settings)
        return Part("rollout replica", devices, (moment,), settings, host, notes=self._cache())

    def teacher(self, section: str, shape: ModelShape) -> Part:
        """Return the memory of a teacher's servers."""
        engine = teacher_engine(self.config, section, shape)
        beside = Item("processes beside the engine", CONTEXT.bytes, certain=False)
        items = (*self._of_engine("engine", engine), prompt_logits(self.config, section, shape), beside)
        servers = teacher_servers(self.context, section)
        names = ("gpu_memory_utilization", "tensor_model_parallel_size", "max_num_batched_tokens")
        return Part(
            f"teacher {section.rpartition('.')[2]}",
            servers * teacher_size(self.config, section),
            (Moment("log-probs", items),),
            tuple(f"{section}.inference.{name}" for name in names),
            notes=self._requests(engine, teacher_room(self.context, section)),
        )

    def _engine(self, hybrid: bool = False) -> tuple[Item, ...]:
        """Return a rollout engine's memory. If the memory of a device is not known, return only that of the weights."""
        engine = rollout_engine(self.config, self.models.policy, hybrid)
        outside = None if self.device is None else outside_share(self.config, self.device)
        return self._of_engine("rollout engine", engine, outside)

    def _of_engine(self, name: str, engine: Engine, outside: Item | None = None) -> tuple[Item, ...]:
        weights = Item(f"{name}: weights", engine.weights)
        if self.device is None:
            return (weights,)
        cache = max(0, int(engine.share * self.device) - engine.weights)
        return listed(weights, Item(f"{name}: KV cache{'' if outside else ' and activations'}", cache), outside)

    def _cache(self, hybrid: bool = False) -> tuple[str, ...]:
        engine = rollout_engine(self.config, self.models.policy, hybrid)
        return self._requests(engine, room(self.config, self.models.positions))

    def _requests(self, engine: Engine, request: int) -> tuple[str, ...]:
        if self.device is None or not request:
            return ()
        tokens = engine.cache_tokens(self.device)
        requests = int(tokens / request) if tokens < 10 * request else round(tokens / request)
        return (f"KV cache: at most {tokens} tokens, {requests} requests of {request} tokens",)

    def servers(self) -> Part:
        servers = self.settings.servers
        rank = server_rank(self.config, servers, self.models.policy)
        staged = Item("next weights", rank.weights)
        on_device = servers.staging == "device"
        items = listed(*rank.scoring, staged if on_device else None, device_buckets(self.config, hands_over=False))
        settings = (f"{SERVERS}.max_batch_tokens", f"{SERVERS}.staging", f"{SERVERS}.n_gpus_per_node", BUCKET)
        host = () if on_device else (staged,)
        return Part("log-prob server", servers.accelerators, (Moment("log-probs", items),), settings, host)

    def in_turns(self) -> Part:
        """Return the memory of the trainer's accelerators if they also generate (in turns, or while they are lent)."""
        actor = actor_rank(self.config, self.models.policy)
        engine = rollout_engine(self.config, self.models.policy, hybrid=True)
        elastic = self.settings.async_training.placement == ELASTIC
        sleeps = self.context.get(f"{ROLLOUT}.free_cache_engine", True)
        beside = (asleep(self.config),) if sleeps else self._engine(hybrid=True)
        # With placement=elastic, the trainer also sends weights to standalone replicas, from buckets on its devices.
        beside += listed(device_buckets(self.config, hands_over=False)) if elastic else ()
        turns = [Moment(moment.name, (*moment.items, *beside)) for moment in self._training()]
        bucket = Item("weight-sync bucket", bucket_bytes(self.config))
        whole = Item("gathered parameters", 2 * self.models.policy.embedding * 2, certain=False)
        states = listed(
            Item("weights", actor.weights), None if actor.optimizer_rest else Item("optimizer", actor.optimizer)
        )
        others = self._beside(POLICY)
        handing = (*states, *others, Item("rollout engine: weights", engine.weights), bucket, whole, CONTEXT)
        resting = (*actor.at_rest, *others, *self._engine(hybrid=True), CONTEXT)
        moments = (*turns, Moment("handing weights over", handing), Moment("generation", resting))
        engine_settings = f"{ACTOR}.megatron" if is_megatron(self.config, ACTOR) else f"{ACTOR}.fsdp_config"
        offload = (f"{engine_settings}.param_offload", f"{engine_settings}.optimizer_offload")
        settings = (f"{ROLLOUT}.gpu_memory_utilization", *offload, *self._less_training())
        devices, host, notes = trainer_ranks(self.config), self._on_host(), self._cache(hybrid=True)
        if sleeps:
            host += listed(copy_asleep(self.config, engine))
        if elastic:
            host, once = (*host, *self._kept()), self._snapshot()
            return Part("accelerator that is lent", devices, moments, settings, host, once, notes=notes)
        return Part("accelerator in turns", devices, moments, settings, host, notes=notes)


def _of(name: str, item: Item) -> Item:
    return Item(f"{item.name} of the {name}", item.bytes, item.certain)


def told(verdict: Verdict, device: int) -> str:
    """Return a text with the amounts of memory that a part needs on a device of ``device`` bytes."""
    items = sorted(verdict.moment.items, key=lambda item: -item.bytes)
    amounts = ", ".join(f"{item.name} {gib(item.bytes)}" for item in items)
    return f"{verdict.part.name}, {verdict.moment.name}: {gib(verdict.moment.total)} of {gib(device)} ({amounts})"


POLICY_PATH = f"{MODEL}.path"
MODELS_OWN = "{}.max_model_len, which defaults to the model's number of positions"


def parts(context: RuleContext) -> list[Part]:
    """Return the memory of each part of the run.

    The result is [] on a CPU, if the policy model's shape is not known, or with training engines other than FSDP and
    Megatron.
    """
    policy = model_of(context, POLICY_PATH)
    strategies = {context.get(f"{section}.strategy") for section in context.trained}
    if policy is None or context.on_cpu or not strategies <= {"fsdp", "fsdp2", "megatron"}:
        return []
    models, device = Models(policy, model_of(context, "critic.model.path"), context.positions), device_bytes(context)
    run, found = _Run(context, models, device), parts_of(context, models, device)
    for teacher in teachers(context.config):
        if (shape := model_of(context, f"{teacher}.model_path")) is not None:
            found.append(run.teacher(teacher, shape))
    return found


def teacher_room(context: RuleContext, section: str) -> int:
    """Return the number of tokens of the longest request to a teacher, which must fit into its KV cache."""
    positions = context.positions_of(f"{section}.model_path")
    return context.count(f"{section}.inference.max_model_len") or positions or longest(context.config)


def device_bytes(context: RuleContext) -> int | None:
    """Return the memory of an accelerator in bytes, as configured or else as detected; None if not known."""
    asked = context.settings.async_training.device_memory_gib
    if asked is not None:
        return int(asked * GIB)
    return context.available.device_bytes if context.available else None


def problems(context: RuleContext) -> Iterator[Problem]:
    """Yield a problem for each part of the run that does not fit into memory, and for each wrong parallel size."""
    yield from parallel_sizes(context)
    for verdict in _verdicts(context):
        if verdict.refused:
            setting, *others = verdict.part.settings
            device = device_bytes(context) or 0
            fits = "what fits" if verdict.moment.certain > device else f"what fits within {ERROR:.0%}"
            advice = f"{told(verdict, device)}. Lower it, or change {', '.join(others)}; see docs/memory.md."
            yield context.problem(setting, f"{fits} into {gib(device)}", advice)

    yield from _cache(context)


def _cache(context: RuleContext) -> Iterator[Problem]:
    """Yield a problem if the longest request to an engine does not fit into its KV cache.

    An engine would not start, or would cut off answers.
    """
    shape, device = model_of(context, POLICY_PATH), device_bytes(context)
    if device is None or context.on_cpu:
        return
    if shape is not None and not _windowed(context.policy):
        engine, request = rollout_engine(context.config, shape), room(context.config, context.positions)
        yield from _one_request(context, ROLLOUT, engine, request, device)
    for section in teachers(context.config):
        path = f"{section}.model_path"
        if (shape := model_of(context, path)) is not None and not _windowed(context.model_config(path)):
            engine = teacher_engine(context.config, section, shape)
            yield from _one_request(context, f"{section}.inference", engine, teacher_room(context, section), device)


def _windowed(model: Mapping[str, Any]) -> bool:
    return bool(model.get("sliding_window") and model.get("use_sliding_window", True))


def _one_request(context: RuleContext, section: str, engine: Engine, request: int, device: int) -> Iterator[Problem]:
    other_size = context.get(f"{section}.engine_kwargs.{context.get(f'{section}.name')}.kv_cache_dtype")
    tokens = engine.cache_tokens(device)
    if tokens < request and not other_size:
        weights = f"its share of {gib(device)} has room for {tokens} beside weights of {gib(engine.weights)}"
        said = context.get(f"{section}.max_model_len")
        longest_of = f"{section}.max_model_len={request}" if said else MODELS_OWN.format(section)
        advice = f"{weights}. Raise it, lower {longest_of}, or raise {section}.tensor_model_parallel_size."
        setting = f"{section}.gpu_memory_utilization"
        yield context.problem(setting, f"enough for a KV cache of one request of {request} tokens", advice)


def warnings(context: RuleContext) -> list[str]:
    """Return a warning for each part of the run that nearly fills its accelerators."""
    device = device_bytes(context) or 0
    return [
        f"may not fit: {told(verdict, device)}; to need less, change {', '.join(verdict.part.settings)}"
        for verdict in _verdicts(context)
        if not verdict.refused
    ]


def _verdicts(context: RuleContext) -> list[Verdict]:
    device = device_bytes(context)
    return [] if device is None else list(verdicts(parts(context), device))
