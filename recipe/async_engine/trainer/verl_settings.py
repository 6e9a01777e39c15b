# SPDX-License-Identifier: Apache-2.0
"""Writes this package's settings to those places of the configuration where verl reads them."""

import copy
from typing import Any

from omegaconf import OmegaConf, open_dict

from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.config.rules import algorithm
from recipe.async_engine.config.rules.names import OWN_ENGINES
from recipe.async_engine.config.sections import ELASTIC, SHARED, Timeouts, Weights
from recipe.async_engine.config.verdicts import TOKENIZER_ARGUMENTS
from recipe.async_engine.trainer.log_probs.losses import BYPASS, CHOSEN, LOGLINEAR

HYBRID_SHARE = "recipe_hybrid_gpu_memory_utilization"
"""Key in ``rollout.custom`` that has the ``gpu_memory_utilization`` of engines on the trainer's accelerators."""


def for_hybrid_replicas(config: Any) -> Any:
    """Return a copy of ``config`` for replicas on the trainer's accelerators. Call `derive_verl_settings` first."""
    config = copy.deepcopy(config)
    with open_dict(config):
        rollout = config.actor_rollout_ref.rollout
        rollout.nnodes, rollout.n_gpus_per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
        rollout.gpu_memory_utilization = rollout.custom[HYBRID_SHARE]
        # Otherwise verl would give Prometheus a list of only the hybrid replicas' servers when it launches them.
        rollout.prometheus.enable = False
        rollout.checkpoint_engine.backend, rollout.checkpoint_engine.custom_backend_module = "naive", None
    return config


def derive_verl_settings(config: Any, plan: RunPlan) -> None:
    """Write derived values into the configuration, in place, and then resolve its interpolations, as verl's main does.

    OmegaConf parses an unresolved interpolation each time it is read. Agent loops read several interpolations for each
    answer; without resolving them first, this took two thirds of an agent-loop worker's CPU time.
    """
    with open_dict(config):
        # The constructor of verl's trainer requires `hybrid_engine`, even for a separate rollout. The setting has no
        # effect on which processes are started: the role mapping decides this.
        config.actor_rollout_ref.hybrid_engine = True
        config.trainer.total_training_steps = plan.total_steps
        config.data.gen_batch_size = 1
        rollout = config.actor_rollout_ref.rollout
        shared = plan.settings.async_training.placement == SHARED
        resources = config.trainer if shared else config.rollout
        rollout.nnodes, rollout.n_gpus_per_node = resources.nnodes, resources.n_gpus_per_node
        rollout.custom = {**(rollout.get("custom") or {}), HYBRID_SHARE: rollout.gpu_memory_utilization}
        if not shared and rollout.get("standalone_gpu_memory_utilization") is not None:
            # Stock verl's fully-async rollouter does the same (fully_async_rollouter.py:113).
            rollout.gpu_memory_utilization = rollout.standalone_gpu_memory_utilization
        if shared:
            # With this backend, verl passes weights between processes on the same accelerators.
            rollout.checkpoint_engine.backend = "naive"
        # The agent loops' client reads here whether an interrupted answer may continue under another version.
        lends = plan.settings.async_training.placement == ELASTIC
        config.async_training.partial_rollout = lends or plan.settings.weights.at_swap != "drain"
        _tell_tokenizer(rollout, config.actor_rollout_ref.model.get("tokenizer_path"))
        places = plan.engine_places // plan.rollout_replicas
        tell_servers(rollout, plan.settings.async_training.timeouts, plan.settings.weights, places)
        derive_loss(config, plan.proximal)
    OmegaConf.resolve(config)


def _tell_tokenizer(rollout: Any, path: str | None) -> None:
    """Make the engine use the run's tokenizer, not the one in the model's folder, for stop strings and bad words."""
    argument = TOKENIZER_ARGUMENTS.get(rollout.name)
    if path and argument:
        kwargs = rollout.get("engine_kwargs") or {}
        rollout.engine_kwargs = {**kwargs, rollout.name: {argument: path, **(kwargs.get(rollout.name) or {})}}


def tell_servers(rollout: Any, timeouts: Timeouts, weights: Weights | None = None, places: int | None = None) -> None:
    """Write the settings that this package's rollout servers and weight workers read from verl's configuration.

    They include the deadlines, how weights are staged, and ``places``, the number of answers that an engine generates
    at the same time.
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
    """Write the arguments of the checkpoint engines, except for those that the user has set.

    With verl's nccl engine, all trainer ranks on rank 0's node take part in the broadcasts of a transfer, in the CUDA
    stream in which they train. If training continues during a transfer, the broadcasts and the collectives of training
    could wait for each other. So if ``weights.publish`` is ``beside``, only rank 0 takes part in the broadcasts.
    """
    derived: dict[str, Any] = {}
    if engine.backend == "nccl" and weights.publish == "beside":
        derived["multi_sender"] = False
    # Only this package's checkpoint engines have the argument `timeout_s`.
    if OWN_ENGINES.get(engine.get("custom_backend_module", "")) == engine.backend:
        derived["timeout_s"] = timeouts.weight_sync
    if derived:
        # OmegaConf's struct mode refuses new keys, so replace the whole mapping.
        engine.engine_kwargs = {**(engine.get("engine_kwargs") or {})}
        engine.engine_kwargs[engine.backend] = derived | dict(engine.engine_kwargs.get(engine.backend) or {})


def derive_loss(config: Any, source: Proximal) -> None:
    """Write the training workers' loss into ``config``. Call this before the workers get their configuration."""
    loss = config.actor_rollout_ref.actor.policy_loss
    correction = config.algorithm.rollout_correction
    correction.bypass_mode = source in (Proximal.BYPASS, Proximal.LOGLINEAR)
    if correction.bypass_mode:
        chosen = algorithm.chosen_loss(loss.loss_mode, correction.get("loss_type"), source)
        loss.rollout_correction = {**correction, CHOSEN: chosen}
        loss.loss_mode = BYPASS if source is Proximal.BYPASS else LOGLINEAR
