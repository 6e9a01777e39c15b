# SPDX-License-Identifier: Apache-2.0
"""Rules for the engines of training and generation, and for the accelerators that they need."""

from collections import Counter
from collections.abc import Iterator, Sequence

from recipe.async_engine.config.facts import NodeRoom
from recipe.async_engine.config.legacy import INTERRUPTS
from recipe.async_engine.config.packages import attention, needs
from recipe.async_engine.config.placement import unplaceable, wanted
from recipe.async_engine.config.plan import replica_size, rollout_accelerators
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.rules.names import UNTRIED_ENGINES
from recipe.async_engine.config.rules.servers import reward_accelerators
from recipe.async_engine.config.sections import ELASTIC, SHARED
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT

AT_SWAP = "async_training.weights.at_swap"
MODEL, OVERRIDE = "actor_rollout_ref.model", "override_config.max_position_embeddings"
# Model families whose experts have other names in Transformers' model than in a checkpoint. verl's FSDP engines send
# the names of the model, and rollout engines expect those of the checkpoint.
OTHER_EXPERTS = ("minimax", "minimax_m2", "mixtral", "phimoe")
STRATEGIES = {
    "dp": ("fsdp", "fsdp2"),
    "megatron": ("megatron",),
    "torchtitan": ("torchtitan",),
    "veomni": ("veomni",),
}
"""The values of ``strategy`` that verl has for each ``model_engine``."""
# Number of tokens of the built-in task's longest answer with lengths=long_tail, including the end token.
LONG_TAIL_TOKENS = 121


def rollout(context: RuleContext) -> Iterator[Problem]:
    """Check that the engines' `max_model_len` and `max_num_batched_tokens` are large enough."""
    room = context.count(f"{ROLLOUT}.max_model_len")
    if room is not None and room < context.room:
        advice = "Raise it, or lower data.max_prompt_length or data.max_response_length."
        beside = " and the position that verl's SGLang server keeps free" if context.on_sglang else ""
        allowed = f"at least prompt and response together{beside}, {context.room}"
        yield context.problem(f"{ROLLOUT}.max_model_len", allowed, advice)
    positions = context.positions
    if room is not None and positions is not None and room > positions:
        advice = f"verl's server refuses more; where the model can have more, set {MODEL}.{OVERRIDE}."
        yield context.problem(f"{ROLLOUT}.max_model_len", f"at most the model's {positions} positions", advice)
    for engine in context.vllm_engines:
        budget, sequences = context.count(f"{engine}.max_num_batched_tokens"), context.count(f"{engine}.max_num_seqs")
        if budget is not None and sequences is not None and budget < sequences:
            advice = "vLLM's scheduler needs a token for each sequence in a step. Raise it, or lower max_num_seqs."
            yield context.problem(f"{engine}.max_num_batched_tokens", f"at least max_num_seqs, {sequences}", advice)


def early_ends(context: RuleContext) -> Iterator[str]:
    """Warn if the model has too few positions for the longest answers, so that they would be truncated."""
    positions = context.positions
    if context.get(f"{ROLLOUT}.max_model_len") is None and positions is not None and positions < context.room:
        yield (
            f"the model has {positions} positions, and data.max_prompt_length and max_response_length are "
            f"{context.longest} tokens together: answers that come to the end of the positions are cut off there; "
            f"lower data.max_response_length, or set {MODEL}.{OVERRIDE} where the model can have more"
        )


def weights(context: RuleContext) -> Iterator[Problem]:
    """Check how weights are sent and swapped, and what a swap does to answers that are being generated."""
    training = context.settings.async_training
    chosen, at_swap = training.weights, context.settings.weights.at_swap
    # The problem names the setting that the user has set: `at_swap`, or stock verl's `partial_rollout`.
    stock = context.get("async_training.weights.at_swap") is None and context.get(INTERRUPTS) is not None
    setting, cut, drained = (INTERRUPTS, "true", "false") if stock else (AT_SWAP, "interrupt", "drain")
    if training.placement == SHARED:
        if chosen.at_swap not in (None, "interrupt"):
            advice = (
                "The engines give their memory to the trainer between turns, so answers are interrupted. Remove it, or"
                " set async_training.staleness_threshold=0 for synchronous training, in which none is."
            )
            yield context.problem(setting, f"{cut} with placement=shared", advice)
        if chosen.publish == "beside":
            advice = "Trainer and engines take turns on the same accelerators. Remove it."
            yield context.problem("async_training.weights.publish", "inline with placement=shared", advice)
        return
    if training.whole_batches and chosen.at_swap not in (None, "drain"):
        advice = "A batch is generated by one version of the weights; remove the setting."
        yield context.problem(setting, f"{drained} with whole batches", advice)
    if at_swap == "keep" and chosen.staging == "none":
        advice = "Answers cannot be held while the weights under them are loaded in place."
        yield context.problem("async_training.weights.staging", "device or host with at_swap=keep", advice)
    connector = f"{ROLLOUT}.engine_kwargs.vllm.kv_transfer_config"
    if at_swap == "keep" and context.get(connector) and not context.on_sglang:
        advice = "A connector keeps keys and values of older weights, which cannot be told from new ones; remove it."
        yield context.problem(connector, "null with async_training.weights.at_swap=keep", advice)
    if chosen.staging != "none":
        yield from _stageable(context)
    if context.settings.weights.publish == "beside":
        yield from _relays(context)


def _relays(context: RuleContext) -> Iterator[Problem]:
    """Check that trainer ranks do not relay weights to replicas while they train."""
    setting = f"{ROLLOUT}.checkpoint_engine.engine_kwargs.nccl.multi_sender"
    if context.get(f"{ROLLOUT}.checkpoint_engine.backend") == "nccl" and context.get(setting):
        advice = (
            "Trainer ranks that pass weights on would fall behind, and rank 0 would wait for them in the collectives of"
            " training. Remove it, or set async_training.weights.publish=inline."
        )
        yield context.problem(setting, "false where weights are published beside training", advice)


def _stageable(context: RuleContext) -> Iterator[Problem]:
    """Refuse to stage weights with model settings that allow only loading in place."""
    for setting in (f"{ROLLOUT}.quantization", "actor_rollout_ref.model.mtp.enable_rollout"):
        if context.get(setting):
            advice = "Its weights can only be loaded in place: set async_training.weights.staging=none, or remove it."
            allowed = f"null or false with async_training.weights.staging={context.settings.weights.staging}"
            yield context.problem(setting, allowed, advice)


def engine(context: RuleContext) -> Iterator[Problem]:
    """Check that the training engines match `model_engine`, for which the configuration was composed."""
    engine = context.get("model_engine", "dp")
    strategies = STRATEGIES.get(str(engine), ())
    if not strategies:
        advice = "It names the one of verl's configurations that the trainer uses."
        yield context.problem("model_engine", f"one of {', '.join(STRATEGIES)}", advice)
    for section in context.trained if strategies else ():
        if context.get(f"{section}.strategy") not in strategies:
            advice = f"The configuration was composed with model_engine={engine}; change one of the two."
            yield context.problem(f"{section}.strategy", " or ".join(strategies), advice)
    yield from _torchtitan(context)
    servers = ("model_engine_server.engine",) if context.settings.servers.backend == "fsdp2" else ()
    for section in (*context.trained, *servers):
        yield from _sequence_parallel(context, section)


def _torchtitan(context: RuleContext) -> Iterator[Problem]:
    """Check what verl lacks with torchtitan: a critic, and copies of weights (separation/engine_workers.py:118)."""
    setting, training = "async_training.trigger_parameter_sync_step", context.settings.async_training
    keeps = context.trainer_scores or training.placement == ELASTIC or (context.get("trainer.save_freq") or -1) > 0
    if context.get(f"{ACTOR}.strategy") == "torchtitan" and training.trigger_parameter_sync_step > 1 and keeps:
        advice = "verl keeps no copy of published weights with this engine, which scoring and checkpoints would need."
        yield context.problem(setting, f"1 with {ACTOR}.strategy=torchtitan", advice)
    if context.has_critic and context.get("critic.strategy") == "torchtitan":
        yield context.problem("critic.strategy", "fsdp, fsdp2, megatron or veomni", "verl has no critic on torchtitan.")


def _sequence_parallel(context: RuleContext, section: str) -> Iterator[Problem]:
    """Check the conditions of Ulysses sequence parallelism: packed sequences and flash attention."""
    setting = f"{section}.ulysses_sequence_parallel_size"
    if context.get(f"{section}.strategy") == "megatron" or (context.count(setting) or 1) == 1:
        return
    model = "critic.model" if section == "critic" else "actor_rollout_ref.model"
    if not context.get(f"{model}.use_remove_padding"):
        advice = f"It slices packed sequences: set {model}.use_remove_padding=True, or the size to 1."
        yield context.problem(setting, f"1 with {model}.use_remove_padding=false", advice)
    if context.on_cpu:
        yield context.problem(setting, "1 where trainer.device=cpu", "It is done inside flash attention; set it to 1.")
    elif not attention(context.config, model).startswith("flash_attention"):
        advice = "It is done inside flash attention; with another one each rank would attend to its own slice alone."
        given = f"{model}.override_config.attn_implementation={attention(context.config, model)}"
        yield context.problem(setting, f"1 with {given}", advice)


def critic(context: RuleContext) -> Iterator[Problem]:
    """Check that the batch of a step is a multiple of the critic's mini-batch."""
    if not context.has_critic:
        return
    mini, batch = context.count("critic.ppo_mini_batch_size"), context.batch_groups
    if batch is not None and (mini is None or batch % mini):
        advice = "A step trains the critic in mini-batches of so many prompts."
        yield context.problem("critic.ppo_mini_batch_size", f"a divisor of the batch of {batch} prompts", advice)


def lora(context: RuleContext) -> Iterator[Problem]:
    """Check that trainer and rollout engines use the same LoRA rank, and that the engines can get the adapters."""
    megatron = context.get(f"{ACTOR}.strategy") == "megatron"
    mine, other = f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"
    if megatron:
        mine, other = other, mine
    if context.count(other) is not None:
        advice = f"Only other training engines read it, but the rollout would use it too: set {mine}."
        yield context.problem(other, f"0 with {ACTOR}.strategy={context.get(f'{ACTOR}.strategy')}", advice)
        return
    if context.count(mine) is None:
        if context.get(f"{MODEL}.lora_adapter_path"):
            advice = "Otherwise verl trains the whole model, without the adapter; set the adapter's own rank."
            yield context.problem(mine, f"an integer >= 1 with {MODEL}.lora_adapter_path", advice)
        return
    if context.get(f"{MODEL}.target_parameters"):
        advice = "Adapters of parameters that are no layers (fused experts) do not reach the rollout; remove it."
        yield context.problem(f"{MODEL}.target_parameters", "null", advice)
    if not context.get(f"{MODEL}.lora.merge"):
        yield from _adapters_alone(context, megatron)


def experts(context: RuleContext) -> Iterator[Problem]:
    """Refuse models for which verl sends names of experts that rollout engines do not know."""
    family, strategy = context.policy.get("model_type"), context.get(f"{ACTOR}.strategy")
    if family in OTHER_EXPERTS and strategy != "megatron":
        advice = (
            "verl's FSDP engines send experts by names that no rollout engine knows of this family; take another model"
        )
        advice += f", or {ACTOR}.strategy=megatron." if family == "mixtral" else "."
        yield context.problem(
            f"{MODEL}.path", f"no model of the family {family} with {ACTOR}.strategy={strategy}", advice
        )


def _adapters_alone(context: RuleContext, megatron: bool) -> Iterator[Problem]:
    """Check that engines can load the base weights themselves, if only adapters are sent to them."""
    merge, allowed = f"{MODEL}.lora.merge", "with adapters that are sent alone"
    if context.on_sglang:
        yield context.problem(merge, f"true with {ROLLOUT}.name=sglang", "Adapters alone are sent to vLLM only.")
        return
    if megatron:
        advice = (
            "verl 0.9.1 sends the frozen base of a Megatron model alone (verl #7495), and nothing generates with the"
            " adapter."
        )
        yield context.problem(merge, f"true with {MODEL}.lora.rank and Megatron", advice)
        return
    if "dummy" in str(context.get(f"{ROLLOUT}.load_format", "dummy")):
        advice = f"Base weights are not sent then, so engines load them from the model's files; or set {merge}=true."
        yield context.problem(f"{ROLLOUT}.load_format", f"auto or safetensors {allowed}", advice)
    if context.settings.weights.at_swap == "keep":
        setting = "async_training.weights.at_swap"
        advice = f"A request that is held in an engine goes on with the adapter that it has; or set {merge}=true."
        yield context.problem(setting, f"interrupt or drain {allowed}", advice)
    if context.settings.servers.enabled:
        advice = f"Log-prob servers take whole weights: set {merge}=true, or remove them."
        yield context.problem("model_engine_server.backend", f"disabled {allowed}", advice)
    if context.get(f"{MODEL}.lora_adapter_path"):
        advice = f"The engines go by {MODEL}.lora_rank and lora_alpha, not by the adapter's file: set {merge}=true."
        yield context.problem(f"{MODEL}.lora_adapter_path", f"null {allowed}", advice)


def packages(context: RuleContext) -> Iterator[Problem]:
    """Report packages that the engines would import on this machine but that are not installed."""
    for need in needs(context.config):
        if context.available is not None and need.is_lacking(context.available.absent):
            yield context.problem(need.setting, need.allowed, need.advice)


def cpu(context: RuleContext) -> Iterator[Problem]:
    """Check that engines and weight transfer can run on a CPU, if the run is on a CPU."""
    if not context.on_cpu:
        return
    for section in context.trained:
        if context.get(f"{section}.strategy") != "fsdp2":
            advice = f"Other training engines need accelerators, FSDP1 too; set {section}.strategy=fsdp2."
            yield context.problem(f"{section}.strategy", "fsdp2 where trainer.device=cpu", advice)
    sleeping = [
        f"{engine}.{name}" for engine in context.vllm_engines for name in ("free_cache_engine", "enable_sleep_mode")
    ]
    for setting in dict.fromkeys((*sleeping, f"{ROLLOUT}.free_cache_engine")):
        if context.get(setting, True):
            advice = f"Engines have no sleep mode on a CPU; set ++{setting}=False."
            yield context.problem(setting, "false where trainer.device=cpu", advice)
    separate = context.settings.async_training.placement != SHARED
    if separate and context.get(f"{ROLLOUT}.checkpoint_engine.backend") in ("nccl", *UNTRIED_ENGINES):
        advice = (
            "It needs an accelerator; set the backend to recipe_gloo and custom_backend_module to"
            " recipe.laptop.transfer.gloo_engine."
        )
        allowed = "recipe_gloo where trainer.device=cpu"
        yield context.problem(f"{ROLLOUT}.checkpoint_engine.backend", allowed, advice)
    yield from _bucket(context)
    if context.on_sglang:
        return
    budget, sequences = context.count(f"{ROLLOUT}.max_num_batched_tokens"), context.count(f"{ROLLOUT}.max_num_seqs")
    length = context.count(f"{ROLLOUT}.max_model_len")
    if budget is None or sequences is None or length is None or not context.get(f"{ROLLOUT}.enable_chunked_prefill"):
        return
    if budget < sequences * length:
        allowed = f"at least max_num_seqs * max_model_len, {sequences * length}"
        advice = "vLLM's CPU sampler fails when the prefill of a seeded request is chunked: raise it, or lower either."
        yield context.problem(f"{ROLLOUT}.max_num_batched_tokens", allowed, advice)


def _bucket(context: RuleContext) -> Iterator[Problem]:
    """Check that a transfer bucket holds the largest tensor: on a CPU, an engine gets each tensor in one bucket."""
    setting = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
    megabytes = context.count(setting)
    wide = context.get(f"{ACTOR}.fsdp_config.model_dtype", "fp32") in ("fp32", "float32")
    for fact in context.files:
        if megabytes is not None and fact.largest_tensor is not None:
            name, elements = fact.largest_tensor
            needed = -(-elements * (4 if wide else 2) // (1 << 20))
            if needed > megabytes:
                allowed = f"at least {needed} where trainer.device=cpu, the megabytes of the model's {name}"
                yield context.problem(setting, allowed, f"Set {setting}={needed}.")


def resources(context: RuleContext) -> Iterator[Problem]:
    """Check that replicas divide their accelerators evenly, and that the cluster has enough accelerators in total."""
    nodes, per_node = context.count("trainer.nnodes"), context.count("trainer.n_gpus_per_node")
    shared = context.settings.async_training.placement == SHARED
    if shared and (nodes is None or per_node is None):
        return
    generation, size = rollout_accelerators(context.config, context.settings), replica_size(context.config)
    if context.settings.async_training.placement == ELASTIC and nodes and per_node:
        advice = "Hybrid replicas fill the trainer's accelerators; change their number or the parallel sizes."
        within = min(size, per_node)
        if nodes * per_node % size:
            yield context.problem("trainer.n_gpus_per_node", f"such that {nodes * per_node} divides by {size}", advice)
        elif size % within or per_node % within:
            allowed = f"a multiple or a divisor of a replica's {size} accelerators"
            yield context.problem("trainer.n_gpus_per_node", allowed, advice)
    setting = "trainer.n_gpus_per_node" if shared else "rollout.n_gpus_per_node"
    if generation % size:
        advice = "A replica takes tensor x data x pipeline parallel size; change those or the number of accelerators."
        yield context.problem(setting, f"such that {generation} divides by {size}", advice)
    on_a_node = min(size, per_node if shared and per_node else context.settings.rollout.n_gpus_per_node)
    if size % on_a_node:
        advice = (
            "A replica larger than a node fills whole ones; change the parallel sizes or the number of accelerators."
        )
        yield context.problem(setting, f"a divisor of a replica's {size} accelerators, or a number above it", advice)
        return
    there = context.available.accelerators if context.available else None
    if context.available is None or there is None or nodes is None or per_node is None:
        return
    training = nodes * per_node
    generation = 0 if shared else generation
    reward, scoring = reward_accelerators(context), context.settings.servers.accelerators
    if training + generation + reward + scoring > there:
        parts = (
            f"{training} trainer ranks" if shared else f"{training} trainer ranks and {generation} for rollout replicas"
        )
        parts += f" and {reward} for the reward model" if reward else ""
        parts += f" and {scoring} for log-prob servers" if scoring else ""
        local = " On a CPU they are logical: raise ray_kwargs.ray_init.num_gpus." if context.on_cpu else ""
        advice = f"The run needs {parts}. Ask for fewer, or for a larger cluster.{local}"
        yield context.problem(setting, f"at most what is there, {there} accelerators in all", advice)
    elif context.available.nodes and not generation % size:
        yield from _rooms(context, context.available.nodes)


def _rooms(context: RuleContext, nodes: Sequence[NodeRoom]) -> Iterator[Problem]:
    """Check that each group of accelerators that verl reserves on one node, with its CPUs, fits on the nodes."""
    part = unplaceable(wanted(context.config, context.settings), nodes)
    if part is None:
        return
    there = Counter(f"{node.accelerators} accelerators and {node.cpus:g} CPUs" for node in nodes)
    have = "; ".join(f"{count} with {what}" for what, count in there.items())
    advice = (
        f"{part.part.capitalize()} needs {part.on_a_node} accelerators and {part.on_a_node * part.cpus} CPUs on one"
        f" node, {part.groups} times, beside what needs as many or more; the nodes are: {have}."
    )
    if context.get("ray_kwargs.ray_init.num_cpus"):
        advice += " They are logical: ray_kwargs.ray_init.num_cpus, num_gpus."
    yield context.problem(part.setting, "what fits on the nodes, with the trainer's process on one CPU more", advice)


def builtin_task(context: RuleContext) -> Iterator[Problem]:
    """Check that the built-in task's longest answers fit into `data.max_response_length`."""
    task, length = context.settings.builtin_task, context.count("data.max_response_length")
    if task is not None and task.lengths == "long_tail" and length is not None and length < LONG_TAIL_TOKENS:
        allowed = f"at least {LONG_TAIL_TOKENS} with builtin_task.lengths=long_tail"
        advice = "The long answers could never be right; preset=tiny_cpu_long_tail has lengths that fit."
        yield context.problem("data.max_response_length", allowed, advice)
