# SPDX-License-Identifier: Apache-2.0
"""Derives values that verl reads from other places of its configuration than this package."""

from typing import Any

from omegaconf import OmegaConf, open_dict

from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.config.rules import algorithm
from recipe.async_engine.config.rules.names import OWN_ENGINES
from recipe.async_engine.config.sections import SHARED, Timeouts, Weights
from recipe.async_engine.trainer.log_probs.losses import BYPASS, CHOSEN, LOGLINEAR


def derive_verl_settings(config: Any, plan: RunPlan) -> None:
    """Write the values that verl reads from elsewhere in its configuration, and resolve it, as verl's own main does.

    OmegaConf parses an interpolation each time that it is read. An agent loop reads several of them for each answer,
    which was two thirds of an agent-loop worker's CPU time.
    """
    with open_dict(config):
        # verl's constructor only supports this placement. The role mapping decides which processes exist.
        config.actor_rollout_ref.hybrid_engine = True
        config.trainer.total_training_steps = plan.total_steps
        config.data.gen_batch_size = 1
        rollout = config.actor_rollout_ref.rollout
        shared = plan.settings.async_training.placement == SHARED
        resources = config.trainer if shared else config.rollout
        rollout.nnodes, rollout.n_gpus_per_node = resources.nnodes, resources.n_gpus_per_node
        if not shared and rollout.get("standalone_gpu_memory_utilization") is not None:
            # Stock verl's fully-async rollouter does the same (fully_async_rollouter.py:113).
            rollout.gpu_memory_utilization = rollout.standalone_gpu_memory_utilization
        if shared:
            # This is verl's name for the transfer of weights between processes on the same accelerators.
            rollout.checkpoint_engine.backend = "naive"
        # The agent loops' client reads here whether an answer may be cut and continue under another version.
        config.async_training.partial_rollout = plan.settings.weights.at_swap != "drain"
        _tell_tokenizer(rollout, config.actor_rollout_ref.model.get("tokenizer_path"))
        places = plan.engine_places // plan.rollout_replicas
        tell_servers(rollout, plan.settings.async_training.timeouts, plan.settings.weights, places)
        derive_loss(config, plan.proximal)
    OmegaConf.resolve(config)


def _tell_tokenizer(rollout: Any, path: str | None) -> None:
    """Have vLLM use the run's tokenizer for stop strings and forbidden words, instead of the model folder's."""
    if path and rollout.name == "vllm":
        kwargs = rollout.get("engine_kwargs") or {}
        rollout.engine_kwargs = {**kwargs, "vllm": {"tokenizer": path, **(kwargs.get("vllm") or {})}}


def tell_servers(rollout: Any, timeouts: Timeouts, weights: Weights | None = None, places: int | None = None) -> None:
    """Write what this package's rollout servers and weight workers read from verl's configuration.

    This is that there is a trainer, the deadlines, how weights come, and how many answers an engine generates at once.
    """
    weights = weights or Weights()
    custom = OmegaConf.to_container(rollout.custom) if rollout.get("custom") else {}
    custom["recipe"] = {
        "has_trainer": True,
        "first_weights_timeout_s": timeouts.first_weights,
        "pause_timeout_s": timeouts.weight_sync + timeouts.trajectory,
        "weight_sync_timeout_s": timeouts.weight_sync,
        "staging": weights.staging,
        "places": places,
    }
    rollout.custom = custom
    _tell_checkpoint_engine(rollout.checkpoint_engine, timeouts, weights)


def _tell_checkpoint_engine(engine: Any, timeouts: Timeouts, weights: Weights) -> None:
    """Write the arguments of every checkpoint engine of a sync, unless they are set.

    verl's nccl engine has the ranks on the sender's node pass weights on, by broadcasts in their stream of training.
    Beside training these would wait for the collectives of training and the other way round, so only rank 0 sends then.
    """
    derived: dict[str, Any] = {}
    if engine.backend == "nccl" and weights.publish == "beside":
        derived["multi_sender"] = False
    # only this package's engines take it
    if OWN_ENGINES.get(engine.get("custom_backend_module", "")) == engine.backend:
        derived["timeout_s"] = timeouts.weight_sync
    if derived:
        # A struct accepts no new keys, so the mapping is replaced.
        engine.engine_kwargs = {**(engine.get("engine_kwargs") or {})}
        engine.engine_kwargs[engine.backend] = derived | dict(engine.engine_kwargs.get(engine.backend) or {})


def derive_loss(config: Any, source: Proximal) -> None:
    """Write the loss that the workers use. Call this before the workers are given their configuration."""
    loss = config.actor_rollout_ref.actor.policy_loss
    correction = config.algorithm.rollout_correction
    correction.bypass_mode = source in (Proximal.BYPASS, Proximal.LOGLINEAR)
    if correction.bypass_mode:
        chosen = algorithm.chosen_loss(loss.loss_mode, correction.get("loss_type"), source)
        loss.rollout_correction = {**correction, CHOSEN: chosen}
        loss.loss_mode = BYPASS if source is Proximal.BYPASS else LOGLINEAR
