# SPDX-License-Identifier: Apache-2.0
"""Reward settings by their older names, which verl moves to the newer ones in the trainer's process, after its checks.

Contract: `migrated` gives what `verl.experimental.reward_loop.migrate_legacy_reward_impl` makes of a configuration, so
that what was written by older names is judged as what it will be; it imports nothing, and changes nothing given. Shown
by tests/config/test_verdicts.py, which compares the two.
"""

from collections.abc import Mapping
from typing import Any

from recipe.async_engine.config.sections import lookup

OLDER = {
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    **{f"reward_model.{name}": f"reward.reward_model.{name}" for name in ("enable", "enable_resource_pool")},
    **{f"reward_model.{name}": f"reward.reward_model.{name}" for name in ("n_gpus_per_node", "nnodes")},
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
}
# Read with the source alone, null or not.
OF_LOOPS = {
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
}
SECTIONS = ("custom_reward_function", "sandbox_fusion")


def migrated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with each older name's value at its newer name, and without the older sections."""
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
            # A section of another type is named where types are judged.
            section = node.get(parent, {}) if isinstance(node, dict) else None
            if isinstance(node, dict) and isinstance(section, Mapping):
                node[parent] = section = dict(section)
            node = section
        if isinstance(node, dict):
            node[last] = value
    return kept
