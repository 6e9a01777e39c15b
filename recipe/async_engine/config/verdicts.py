# SPDX-License-Identifier: Apache-2.0
"""Lists, for each of verl's settings, whether it takes effect in a run of this package, has no effect, or is refused.

Contract: a verdict says which of these three cases applies. The verdict of a setting is the entry of `TABLE` for the
setting itself or, without one, for the innermost section around it. Of several entries for the same name, the first
that applies to the run counts. `config.notices` warns of settings without effect whose values differ from verl's
defaults. `refusals` reports each refused value and what to use instead. Conditions on several settings, on files or on
nodes are in `config.rules`. tests/config/test_verdicts.py composes all of verl's configurations and fails if a setting
has no verdict.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from recipe.async_engine.config.engine_arguments import SGLANG, VLLM
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import REWARD_MODEL, RuleContext
from recipe.async_engine.config.sections import SHARED
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT

ENGINES = {
    "vllm": "recipe.async_engine.engines.vllm.replica.GatedVLLMReplica",
    "sglang": "recipe.async_engine.engines.sglang.replica.GatedSGLangReplica",
}
"""The replica class of each rollout engine, by ``rollout.name``."""
ADAPTERS = {
    "vllm": "recipe.async_engine.engines.vllm.adapter.DeadlineServerAdapter",
    "sglang": "recipe.async_engine.engines.sglang.adapter.SGLangServerAdapter",
}
"""For each engine, the class with which a trainer rank or a weight worker passes weights to the engine's servers."""
TEACHERS_ENGINE = "vllm"
"""The engine that serves teacher models; `config.rules` refuses others."""
TOKENIZER_ARGUMENTS = {"vllm": "tokenizer", "sglang": "tokenizer_path"}
"""For each rollout engine, its argument for a tokenizer other than the one in the model's folder."""

SGLANG_ALONE, VLLM_ALONE = "only SGLang reads it", "only vLLM reads it"
INSTEAD = {
    **dict.fromkeys(
        ("enable_chunked_prefill", "max_num_batched_tokens"), f"set {ROLLOUT}.engine_kwargs.sglang.chunked_prefill_size"
    ),
    "enable_prefix_caching": f"set {ROLLOUT}.engine_kwargs.sglang.disable_radix_cache",
    "cudagraph_capture_sizes": f"set {ROLLOUT}.engine_kwargs.sglang.cuda_graph_bs",
    "limit_images": f"set {ROLLOUT}.engine_kwargs.sglang.limit_mm_data_per_request",
    "logprobs_mode": "SGLang's log-probs are those after the temperature, before top_k and top_p",
    "seed": "each engine of SGLang draws a seed of its own",
}
"""For each setting that verl passes to vLLM only, what to set with SGLang instead, or how SGLang behaves."""
UNREAD = "verl 0.9.1 does not read it either; remove it"
QUEUE = "this package does not use TransferQueue"
V1 = "trainer.v1"
PLACEHOLDER = "recipe.mains.trainer.NoAgentLoops"
"""Name of the empty class that verl's task runner gets as agent-loop manager when it runs a mode of this package."""


class Kind(StrEnum):
    """The effect of a setting on a run."""

    TAKES = "takes effect"
    NO_EFFECT = "has no effect"
    REFUSED = "is refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The effect of a setting on a run. A section's verdict applies to all settings in it that have none of their own.

    Attributes:
        advice: what to use instead.
        allowed: the accepted values, in words, if `kind` is REFUSED.
        refuses: returns whether a value is refused; by default, all truthy values are.
        switch: for a section, the name of the setting in it that turns the section on. `refusals` checks the value of
            this setting instead of the section's.
        here: returns whether the verdict applies to a run.
        quiet: values that cause no warning although they differ from verl's defaults, because this package's own YAML
            files set them.
    """

    setting: str
    kind: Kind = Kind.TAKES
    advice: str = ""
    allowed: str = "false"
    refuses: Callable[[Any], bool] = bool
    switch: str = ""
    here: Callable[[RuleContext], bool] = lambda context: True
    quiet: Sequence[Any] = ()


def shared(context: RuleContext) -> bool:
    return context.settings.async_training.placement == SHARED


def separate(context: RuleContext) -> bool:
    return not shared(context)


def apart(context: RuleContext) -> bool:
    """Return whether no replica is on the trainer's accelerators."""
    return context.settings.async_training.placement == "separate"


def by_flag(context: RuleContext) -> bool:
    """Return whether the run was started by stock verl's main, with a ``trainer.v1.trainer_mode`` of this package."""
    return str(context.get(f"{V1}.trainer_mode", "")).startswith("recipe_")


def on_sglang(context: RuleContext) -> bool:
    return context.on_sglang


def on_vllm(context: RuleContext) -> bool:
    return not context.on_sglang


def judged(context: RuleContext) -> bool:
    return bool(context.get(f"{REWARD_MODEL}.enable"))


def _expanded(names: str) -> Iterator[str]:
    """Yield the full name of each setting in the text ``names``.

    In the text, ``a.{b,c}`` stands for `a.b` and `a.c`, and a key of `_SECTIONS` stands for the name of that section.
    """
    for name in names.split():
        for parts in itertools.product(*(part.split(",") for part in re.split("[{}]", name))):
            first, dot, rest = "".join(parts).partition(".")
            yield f"{_SECTIONS.get(first, first)}{dot}{rest}"


_SECTIONS = {
    "ROLLOUT": ROLLOUT,
    "ACTOR": ACTOR,
    "REF": "actor_rollout_ref.ref",
    "JUDGE": REWARD_MODEL,
    "MODEL": "actor_rollout_ref.model",
    "TRAINING": "async_training",
    "ENGINE": f"{ROLLOUT}.checkpoint_engine",
}


def _none(advice: str, names: str, **more: Any) -> tuple[Verdict, ...]:
    return tuple(Verdict(setting, Kind.NO_EFFECT, advice, **more) for setting in _expanded(names))


def _refused(advice: str, names: str, **more: Any) -> tuple[Verdict, ...]:
    return tuple(Verdict(setting, Kind.REFUSED, advice, **more) for setting in _expanded(names))


COMMITTED = "A checkpoint is committed only when all of it is written; remove the setting."
OWN = """actor_rollout_ref algorithm critic custom_reward_function data distillation global_profiler model_engine
    ray_kwargs reward reward_model sandbox_fusion trainer
    async_training chosen_by_flag builtin_task model_engine_server plan_only rehearse_only rollout"""
"""The top-level sections of verl's configuration and of this package that take effect."""

TABLE: tuple[Verdict, ...] = (
    *map(Verdict, OWN.split()),
    # Features of verl that this package does not support.
    *_refused(
        "Weights that are trained for quantization do not reach the engines here; use verl's own trainers.",
        "ACTOR.{qat,fsdp_config.qat,megatron.qat} ROLLOUT.qat",
        switch="enable",
    ),
    *_refused(
        "Each replica both prefills and decodes in this package; remove it.", "ROLLOUT.disaggregation", switch="enabled"
    ),
    *_refused(
        "Each server both prefills and decodes in this package; remove it.",
        "JUDGE.rollout.disaggregation",
        switch="enabled",
        here=judged,
    ),
    *_refused(
        "This package sends weights to the replicas itself; for another transport set your own checkpoint engine"
        f" ({ROLLOUT}.checkpoint_engine.backend and custom_backend_module).",
        "ROLLOUT.checkpoint_manager_class",
        allowed="null",
    ),
    *_refused(
        "Other accelerators were never tried with this package; use verl's own trainers.",
        "trainer.device",
        allowed="cuda or cpu",
        refuses=lambda device: device not in (None, "cuda", "cpu"),
    ),
    *_refused(
        "Only tensor parallelism was tried with SGLang: set it to 1, or use vLLM.",
        "ROLLOUT.{data_parallel,pipeline_model_parallel}_size",
        allowed=f"1 with {ROLLOUT}.name=sglang",
        refuses=lambda size: size not in (None, 1),
        here=on_sglang,
    ),
    *itertools.chain.from_iterable(
        _refused(
            argument.advice,
            f"ROLLOUT.engine_kwargs.{engine}.{{{argument.names.replace(' ', ',')}}}",
            allowed=argument.allowed,
            refuses=argument.refuses,
            here=here,
        )
        for engine, here, arguments in (("sglang", on_sglang, SGLANG), ("vllm", on_vllm, VLLM))
        for argument in arguments
    ),
    # Settings that a run of this package accepts with some values only.
    *_refused(
        "Other rollout engines are not supported yet in this mode.",
        "ROLLOUT.name",
        allowed=" or ".join(ENGINES),
        refuses=lambda name: name not in tuple(ENGINES),  # A list cannot be looked up in a dict.
    ),
    *_refused(
        "Other engines are not supported for reward models.",
        "JUDGE.rollout.name",
        allowed="vllm",
        refuses=lambda name: name != "vllm",
        here=judged,
    ),
    *_refused(
        "The model scores answers during generation and training, so it needs accelerators of its own.",
        "JUDGE.enable_resource_pool",
        allowed=f"true with {REWARD_MODEL}.enable=true",
        refuses=lambda pool: not pool,
        here=judged,
    ),
    *_refused(
        "This mode gives training and generation resources of their own; remove the setting.",
        "actor_rollout_ref.hybrid_engine",
        here=separate,
    ),
    *_refused(
        "Off-policy corrections and the staleness metrics need the log-probs of the policy that sampled.",
        "ROLLOUT.calculate_log_probs",
        allowed="true",
        refuses=lambda asked: not asked,
    ),
    *_refused(
        "verl then gives every request the same seed, so the answers to one prompt come out equal.",
        "ROLLOUT.full_determinism",
    ),
    *_refused(COMMITTED, "ACTOR.checkpoint.async_save"),
    *_refused(COMMITTED, "critic.checkpoint.async_save", here=lambda context: context.has_critic),
    *_refused(
        f"verl needs the engine's statistics for it: also set {ROLLOUT}.disable_log_stats=false.",
        "ROLLOUT.prometheus",
        switch="enable",
        allowed=f"false with {ROLLOUT}.disable_log_stats=true",
        here=lambda context: bool(context.get(f"{ROLLOUT}.disable_log_stats", True)),
    ),
    *_refused(
        "verl's servers need the engine's statistics for rl_insight.",
        "ROLLOUT.disable_log_stats",
        allowed="false with trainer.logger=rl_insight",
        here=lambda context: "rl_insight" in str(context.get("trainer.logger")),
    ),
    # Settings of other trainers, and settings that another setting replaces in this package.
    *_none("this run uses this package's trainer", "trainer.use_v1"),
    *_none("only verl's own v1 trainers read it; this package's trainer reads async_training", V1),
    Verdict(f"{V1}.trainer_mode", here=by_flag),
    *_none("set async_training.trigger_parameter_sync_step", f"{V1}.separate_async.parameter_sync_step"),
    *_none("set async_training.staleness_threshold", f"{V1}.{{separate,colocate}}_async.num_warmup_batches"),
    *_none("set async_training.max_staleness, the hard bound", f"{V1}.sampler.max_off_policy_threshold"),
    *_none(QUEUE, "transfer_queue"),
    *_none(QUEUE, "transfer_queue.enable", quiet=(True,)),
    *_none(QUEUE, "transfer_queue.backend.SimpleStorage.num_data_storage_units", quiet=(1,)),
    *_none("answers are always generated, and never written to a dump or read from one", "skip"),
    *_none("all validation data is generated at once, as far as the engines have places", "data.val_batch_size"),
    *_none("only verl's v1 trainers compute metrics of MoE routing", "ROLLOUT.moe_load_balance_metrics_interval"),
    *_none("prompts are issued one by one", "algorithm.filter_groups.max_inflight_gen_batches"),
    *_none("trainer.max_actor_ckpt_to_keep decides for whole checkpoints", "trainer.max_critic_ckpt_to_keep"),
    *_none(
        "set rollout.nnodes and rollout.n_gpus_per_node",
        "ROLLOUT.{nnodes,n_gpus_per_node}",
        here=lambda context: separate(context) and not by_flag(context),
    ),
    *_none(
        "replicas keep their memory, since nothing else uses their accelerators",
        "ROLLOUT.free_cache_engine",
        here=apart,
        quiet=(False,),
    ),
    *_none("rollout replicas validate, with the same scores", "TRAINING.use_trainer_do_validate"),
    *_none(
        "measured times decide when the trainer's accelerators are lent to the rollout",
        "TRAINING.dynamic_schedule_{policy,deactivate_ratio,enable_rebalance}",
    ),
    *_none(
        "the rollout shares the trainer's accelerators: set trainer.nnodes and trainer.n_gpus_per_node",
        "{rollout,ROLLOUT}.{nnodes,n_gpus_per_node}",
        here=shared,
        quiet=(1, 8),
    ),
    *_none(
        "no replica has accelerators of its own in this mode", "ROLLOUT.standalone_gpu_memory_utilization", here=shared
    ),
    *_none(
        "training and rollout share their accelerators in this mode", "actor_rollout_ref.hybrid_engine", here=shared
    ),
    *_none(
        "each trainer rank passes its weights to the engine on the same accelerators",
        "ENGINE.{backend,custom_backend_module,engine_kwargs}",
        here=shared,
        quiet=("recipe_gloo", "recipe.laptop.transfer.gloo_engine"),
    ),
    # Settings that nothing in verl reads.
    *_none(UNREAD, "ACTOR.use_rollout_log_probs", quiet=(True, False)),
    *_none(UNREAD, "data.return_raw_chat", quiet=(True,)),
    *_none(UNREAD, "ROLLOUT.layered_summon", here=apart),
    *_none(
        UNREAD,
        """ROLLOUT.{do_sample,over_sample_rate,multi_stage_wake_up,skip,engine_kwargs.trtllm}
        ROLLOUT.{agent.custom_async_server,multi_turn.interaction_config_path,multi_turn.num_repeat_rollouts}
        ROLLOUT.multi_turn.{tokenization_sanity_check_mode,use_inference_chat_template}
        JUDGE.rollout.{do_sample,layered_summon,multi_stage_wake_up,n} {actor_rollout_ref,critic}.nccl_timeout
        data.{tokenizer,sampler,datagen,return_full_prompt,return_raw_input_ids,return_multi_modal_inputs}
        trainer.ray_wait_register_center_timeout ACTOR.freeze_vision_tower {ACTOR,REF,critic}.rollout_n
        critic.forward_{micro_batch_size,micro_batch_size_per_gpu,max_token_len_per_gpu}
        {ACTOR,REF,critic}.veomni.{ckpt_manager,force_use_huggingface,load_checkpoint_path,entropy_checkpointing}
        {ACTOR,REF,critic}.megatron.dist_checkpointing_prefix
        {ACTOR,REF,critic}.{megatron,veomni}.router_replay.{record,replay}_file
        global_profiler.global_tool_config.torch_memory.{stacks,kw_args}""",
    ),
    *_none("verl replays experts in the actor only", "{REF,critic}.{megatron,veomni}.router_replay.mode"),
    *_none("verl 0.9.1 does not read it either; set optim.clip_grad of the same section", "{ACTOR,critic}.grad_clip"),
    *_none(
        "verl 0.9.1 does not read it either; data.filter_overlong_prompts leaves out prompts that are too long",
        "data.truncation",
    ),
    *_none("only an engine for NPUs reads it", "{ACTOR.fsdp_config,REF.fsdp_config,critic.fsdp}.turbo_config"),
    *_none(
        SGLANG_ALONE,
        """ROLLOUT.{skip_tokenizer_init,engine_kwargs.sglang}
        MODEL.mtp.speculative_{algorithm,eagle_topk,num_draft_tokens,num_steps}""",
        here=on_vllm,
    ),
    *_none(
        SGLANG_ALONE,
        """JUDGE.rollout.{skip_tokenizer_init,engine_kwargs.sglang}
        critic.model.mtp.speculative_{algorithm,eagle_topk,num_draft_tokens,num_steps}""",
    ),
    # The preset tiny_cpu sets arguments for both engines; do not warn of the values for the engine that is not used.
    *_none(
        SGLANG_ALONE,
        """ROLLOUT.engine_kwargs.sglang.{device,attention_backend,sampling_backend,grammar_backend,max_total_tokens}
        ROLLOUT.engine_kwargs.sglang.{enable_memory_saver,disable_piecewise_cuda_graph,disable_overlap_schedule}""",
        here=on_vllm,
        quiet=("cpu", "torch_native", "pytorch", "none", 16384, False, True),
    ),
    *_none(
        VLLM_ALONE,
        """ROLLOUT.{engine_kwargs.vllm,enable_sleep_mode,ignore_eos,quantization_config_file}
        MODEL.mtp.{method,num_speculative_tokens}""",
        here=on_sglang,
        quiet=(67108864, "uni", "recipe.laptop.engines.engine_extension.CPUStagingExtension", False),
    ),
    *(
        Verdict(f"{ROLLOUT}.{name}", Kind.NO_EFFECT, f"{VLLM_ALONE}; {instead}", here=on_sglang, quiet=("priority",))
        for name, instead in INSTEAD.items()
    ),
    *_none(
        f"set {ROLLOUT}.agent.default_agent_loop=tool_agent, or give the data a column agent_name",
        "ROLLOUT.multi_turn.enable",
    ),
    *_none("set actor_rollout_ref.model.use_fused_kernels", "ACTOR.use_fused_kernels"),
    *_none(
        "set actor_rollout_ref.model.use_remove_padding",
        "{ACTOR,REF}.use_remove_padding",
        here=lambda context: context.get(f"{ACTOR}.strategy") != "veomni",
    ),
    *_none("checkpoints are loaded in place, and are not deleted after that", "trainer.del_local_ckpt_after_load"),
)


def verdict_of(setting: str, context: RuleContext) -> Verdict | None:
    """Return the verdict of a setting in a run; None if the setting is unknown."""
    parts = setting.split(".")
    above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((verdict for name in above for verdict in BY_SETTING.get(name, ()) if verdict.here(context)), None)


BY_SETTING: dict[str, list[Verdict]] = {}
for _verdict in TABLE:
    BY_SETTING.setdefault(_verdict.setting, []).append(_verdict)


def refusals(context: RuleContext) -> Iterator[Problem]:
    """Yield a problem for every setting that has a refused value."""
    for verdict in TABLE:
        if verdict.kind is Kind.REFUSED and verdict.here(context):
            setting = f"{verdict.setting}.{verdict.switch}" if verdict.switch else verdict.setting
            if verdict.refuses(context.get(setting)):
                yield context.problem(setting, verdict.allowed, verdict.advice)
