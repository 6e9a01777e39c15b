# SPDX-License-Identifier: Apache-2.0
"""Rules for mixtures of experts: their names in weight syncs, the replay of routers' choices, and expert parallelism.

With router replay a trainer computes each token with the experts that another pass chose for it: in mode R3 the pass of
the rollout engine that sampled the next token; in mode R2 the trainer's own pass that computes proximal log-probs. verl
0.9.1 replays only in its Megatron and VeOmni engines (verl/workers/engine_workers.py:496). Shown by
tests/config/test_config.py.
"""

from collections.abc import Iterator

from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.plan import proximal_source
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT

MODEL = "actor_rollout_ref.model"
RETURNED = f"{ROLLOUT}.enable_rollout_routing_replay"
"""The setting with which rollout engines return the experts that they chose."""
REPLAYING = ("megatron", "veomni")
"""The training engines that have router replay. The settings of each engine are in the section with its name."""
# Model families whose experts have other names in Transformers' model than in a checkpoint. verl's FSDP engines send
# the names of the model, and rollout engines expect those of the checkpoint.
OTHER_EXPERTS = ("minimax", "minimax_m2", "mixtral", "phimoe")


def families(context: RuleContext) -> Iterator[Problem]:
    """Refuse models whose experts' weights verl would send under names that rollout engines do not know."""
    family, strategy = context.policy.get("model_type"), context.get(f"{ACTOR}.strategy")
    if family in OTHER_EXPERTS and strategy != "megatron":
        advice = (
            "verl's FSDP engines send experts by names that no rollout engine knows of this family; take another model"
        )
        advice += f", or {ACTOR}.strategy=megatron." if family == "mixtral" else "."
        yield context.problem(
            f"{MODEL}.path", f"no model of the family {family} with {ACTOR}.strategy={strategy}", advice
        )


def replay_mode(context: RuleContext) -> str | None:
    """Return the name of the setting that has the actor's replay mode, or None if the actor does not replay."""
    strategy = context.get(f"{ACTOR}.strategy")
    if strategy not in REPLAYING:
        return None
    setting = f"{ACTOR}.{strategy}.router_replay.mode"
    return setting if context.get(setting, "disabled") != "disabled" else None


def router_replay(context: RuleContext) -> Iterator[Problem]:
    """Check that the trainer replays the experts that engines return, and that all engines involved support replay."""
    strategy, returned, mode = context.get(f"{ACTOR}.strategy"), context.get(RETURNED), replay_mode(context)
    if returned and strategy not in REPLAYING:
        advice = f"verl 0.9.1 replays no experts in this training engine: remove it, or set {ACTOR}.strategy=megatron."
        yield context.problem(RETURNED, f"false with {ACTOR}.strategy={strategy}", advice)
        return
    if returned and (mode is None or context.get(mode) != "R3"):
        advice = f"The trainer would not replay the experts that the engines return: set it to R3, or {RETURNED}=false."
        yield context.problem(f"{ACTOR}.{strategy}.router_replay.mode", f"R3 with {RETURNED}=true", advice)
    elif mode is not None:
        yield from _one_choice(context, mode)
        yield from _of_trainer(context, mode)
    if returned:
        yield from _of_engine(context)


def _one_choice(context: RuleContext, mode: str) -> Iterator[Problem]:
    """Check that the proximal log-probs and the update use the same choice of experts."""
    source, chosen = proximal_source(context.config, context.settings), context.get(mode)
    if chosen == "R3" and not context.get(RETURNED):
        advice = "The trainer replays the experts that the rollout engines return."
        yield context.problem(RETURNED, f"true with {mode}=R3", advice)
    if source is Proximal.SERVER:
        advice = f"Log-prob servers choose experts themselves: remove them, or set {mode}=disabled."
        yield context.problem("model_engine_server.backend", f"disabled with {mode}={chosen}", advice)
    elif chosen == "R2" and source is not Proximal.RECOMPUTE:
        advice = (
            "R2 replays the experts of the trainer's own pass over the batch, which this source of proximal log-probs"
            " does not make: set async_training.proximal_log_probs=recompute, or replay those of the engines with R3."
        )
        yield context.problem(mode, f"disabled or R3 with async_training.proximal_log_probs={source}", advice)


def _of_trainer(context: RuleContext, mode: str) -> Iterator[Problem]:
    """Check settings without which verl cannot replay (megatron/transformer_impl.py:1269, config/actor.py:368)."""
    with_replay = f"with {mode}={context.get(mode)}"
    packed, padded = f"{MODEL}.use_remove_padding", f"{ACTOR}.megatron.pad_to_length"
    if not context.get(packed):
        yield context.problem(packed, f"true {with_replay}", "verl replays experts only with packed sequences; set it.")
    if context.get(f"{ACTOR}.strategy") == "megatron" and context.get(padded):
        yield context.problem(padded, f"false {with_replay}", "Padding would have no experts to replay; remove it.")


def _of_engine(context: RuleContext) -> Iterator[Problem]:
    """Refuse SGLang, and the settings with which vLLM cannot return the chosen experts (vllm/config/vllm.py:1068)."""
    if context.on_sglang:
        advice = "verl 0.9.1 cannot read the experts that SGLang returns: generate with vLLM, or remove it."
        yield context.problem(RETURNED, f"false with {ROLLOUT}.name=sglang", advice)
    vllm, advice = f"{ROLLOUT}.engine_kwargs.vllm", "vLLM returns no experts with it: remove it."
    for name in ("pipeline", "decode_context"):
        setting = f"{vllm}.{name}_parallel_size"
        if (context.count(setting) or 1) > 1:
            yield context.problem(setting, f"1 with {RETURNED}=true", advice)
    if context.get(f"{vllm}.kv_transfer_config"):
        yield context.problem(f"{vllm}.kv_transfer_config", f"null with {RETURNED}=true", advice)


def expert_parallel(context: RuleContext) -> Iterator[Problem]:
    """Check that the expert-parallel size is 1 or tensor x data parallel size (verl/workers/config/rollout.py:295)."""
    for engine in context.engines:
        setting = f"{engine}.expert_parallel_size"
        size = context.count(setting) or 1
        tensor, data = (context.count(f"{engine}.{kind}_parallel_size") or 1 for kind in ("tensor_model", "data"))
        if size > 1 and size != tensor * data:
            advice = "An engine divides the experts among all ranks of tensor and data parallelism, or not at all."
            yield context.problem(setting, f"1, or {tensor} x {data}, tensor x data parallel size", advice)
