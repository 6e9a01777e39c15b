# SPDX-License-Identifier: Apache-2.0
"""Translates verl's old settings and the settings of verl's asynchronous modes, and lists removed settings.

Contract: verl renames its old reward settings only in the trainer's process. `migrated` renames them before any check,
in the same way as `verl.experimental.reward_loop.migrate_legacy_reward_impl`, so that rules need only the new names;
tests/config/test_verdicts.py compares the two functions. Neither `migrated` nor `of_stock` changes its argument.
"""

from collections.abc import Mapping
from typing import Any

from recipe.async_engine.config.problems import lookup

OLDER = {
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    **{f"reward_model.{name}": f"reward.reward_model.{name}" for name in ("enable", "enable_resource_pool")},
    **{f"reward_model.{name}": f"reward.reward_model.{name}" for name in ("n_gpus_per_node", "nnodes")},
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
}
"""The present name of each old reward setting of verl."""
# verl renames these settings only if `reward_loop_source` is set; in that case it renames them even if they are null.
OF_LOOPS = {
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
}
SECTIONS = ("custom_reward_function", "sandbox_fusion")
"""Old sections of verl that are now in the section `reward`, with the same name."""


def migrated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with verl's old reward settings under their new names, without the old sections."""
    moved = {new: value for old, new in OLDER.items() if (value := lookup(config, old)) is not None}
    if "reward.reward_manager.source" in moved:
        moved |= {new: lookup(config, old) for old, new in OF_LOOPS.items()}
    for name in SECTIONS:
        section = config.get(name)
        if isinstance(section, Mapping) and any(value is not None for value in section.values()):
            moved[f"reward.{name}"] = section
    rollout = lookup(config, "reward_model.rollout")
    for name, value in rollout.items() if isinstance(rollout, Mapping) else ():
        if value is not None:
            moved[f"reward.reward_model.rollout.{name}"] = value
    kept = {name: value for name, value in config.items() if name not in (*SECTIONS, "reward_model")}
    for setting, value in moved.items():
        *parents, last = setting.split(".")
        node: Any = kept
        for parent in parents:
            # If `section` is not a mapping, `value` has no place in it and is dropped, and `well_formed` reports the
            # section.
            section = node.get(parent, {}) if isinstance(node, dict) else None
            if isinstance(node, dict) and isinstance(section, Mapping):
                node[parent] = section = dict(section)
            node = section
        if isinstance(node, dict):
            node[last] = value
    return kept


UNREAD_OF_STOCK = {
    "async_training.use_trainer_do_validate": False,
    "async_training.use_dynamic_resource_scheduling": False,
    "async_training.dynamic_schedule_policy": "default",
    "async_training.dynamic_schedule_deactivate_ratio": 0.3,
    "async_training.dynamic_schedule_enable_rebalance": True,
    "rollout.n": None,
}
"""Settings of stock verl's asynchronous modes that this package ignores, with their defaults."""
INTERRUPTS = "async_training.partial_rollout"
"""Stock verl's counterpart of `async_training.weights.at_swap`: true means `interrupt`, false means `drain`."""
_GONE = {
    "async_training.weights.encoding": "Versions are now always sent whole, as with encoding=full; remove it.",
    "async_training.pipeline_depth": "Set async_training.staleness_threshold, which is the pipeline depth.",
    "async_training.prometheus": "The run's figures always go to Ray's exporter; remove it.",
    "async_training.timeouts.drain": "Set async_training.timeouts.trajectory, which also limits a drain.",
    "async_training.timeouts.validation": "Set async_training.timeouts.batch_wait.",
    "async_training.timeouts.trackers": "Set async_training.timeouts.stop: trackers get a third of it, 120 s at most.",
    "builtin_task.family": "The task's model is always a qwen3; remove it.",
    "model_engine_server.drain": "Weights wait 10 s for late requests; remove it.",
    "model_engine_server.while_loading": "Requests wait for the version that is on its way; remove it.",
}
REMOVED = {name: ("nothing: it is no setting any more", advice) for name, advice in _GONE.items()} | {
    INTERRUPTS: ("true or false, or null", "It is stock verl's name for async_training.weights.at_swap.")
}
"""For each removed setting, the allowed values and what to use instead."""


LENDS = "use_dynamic_resource_scheduling"
"""Stock verl's setting for additional replicas on the trainer's accelerators. Here it means `placement=elastic`."""


def placement(config: Mapping[str, Any]) -> Any:
    """Return the placement of a configuration: `async_training.placement`, unless other settings change it.

    `rollout.nnodes=0` changes `separate` and `elastic` to `shared`. Otherwise, if the setting `LENDS` is true,
    `separate` is changed to `elastic`.
    """
    said, nodes = lookup(config, "async_training.placement"), lookup(config, "rollout.nnodes")
    if said in ("separate", "elastic") and type(nodes) is int and nodes == 0:
        return "shared"
    return "elastic" if said == "separate" and lookup(config, f"async_training.{LENDS}") is True else said


def of_stock(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the settings of stock verl's asynchronous modes translated.

    The settings in `UNREAD_OF_STOCK` are removed, `INTERRUPTS` becomes `async_training.weights.at_swap`, and
    `async_training.placement` becomes what `placement` returns.
    """
    found = dict(config)
    if (where := placement(config)) is not None:
        found["async_training"] = {**found["async_training"], "placement": where}
        if where == "shared" and isinstance(rollout := found.get("rollout"), Mapping):
            found["rollout"] = {key: value for key, value in rollout.items() if key != "nnodes"}
    for setting in (*UNREAD_OF_STOCK, INTERRUPTS):
        name, _, last = setting.partition(".")
        if isinstance(section := found.get(name), Mapping) and last in section:
            found[name] = {key: value for key, value in section.items() if key != last}
            if setting == INTERRUPTS and isinstance(section[last], bool):
                found[name] = _at_swap(found[name], "interrupt" if section[last] else "drain")
            elif setting == INTERRUPTS and section[last] is not None:
                found[name] = dict(section)  # Keep the wrong value, so that `read_section` refuses it.
    return found


def _at_swap(training: dict[str, Any], said: str) -> dict[str, Any]:
    """Return the section ``training`` with `weights.at_swap` set to ``said``, unless it already has a value."""
    weights = training.get("weights") or {}
    if not isinstance(weights, Mapping) or weights.get("at_swap") is not None:
        return training
    return training | {"weights": {**weights, "at_swap": said}}
