# SPDX-License-Identifier: Apache-2.0
"""Writes every setting of verl's, with its verdict in each mode and for each way to start it.

``python tests/config/verl_keys.py`` writes ``verl_keys.tsv`` beside this file. Read the changes in it, and give a new
setting a verdict in `recipe.async_engine.config.verdicts` if that of its section is wrong for it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.sections import AsyncTraining, LogProbServers, RolloutResources, Settings
from recipe.async_engine.config.verdicts import Verdict, verdict_of

FILE = Path(__file__).with_name("verl_keys.tsv")
SPEC = importlib.util.find_spec("verl")
assert SPEC is not None and SPEC.origin is not None
VERL = Path(SPEC.origin).parent
STOCK = {
    **{
        ("trainer/config", "ppo_trainer", engine): [f"model_engine={engine}"]
        for engine in ("dp", "torchtitan", "veomni")
    },
    ("trainer/config", "ppo_megatron_trainer", ""): [],
    **{
        (f"experimental/{mode}_policy/config", f"{mode.removesuffix('_policy')}_ppo{engine}_trainer", ""): []
        for mode in ("fully_async", "one_step_off")
        for engine in ("", "_megatron")
    },
}
# Settings that verl reads although its configurations lack them: scripts add them with a +.
ADDED = (
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    "actor_rollout_ref.rollout.checkpoint_manager_class",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    "actor_rollout_ref.rollout.skip.enable",
    "actor_rollout_ref.rollout.standalone_gpu_memory_utilization",
    "data.datagen.path",
    "data.sampler.class_path",
    "reward.reward_kwargs.overlong_buffer_cfg",
    "trainer.wandb_proxy",
)


def settings_of_verl() -> set[str]:
    """Return every setting in verl's configurations, except the types that verl makes of sections."""
    found = set(ADDED)
    for (folder, name, _), overrides in STOCK.items():
        GlobalHydra.instance().clear()
        found_in = f"hydra.searchpath=[file://{VERL}/trainer/config]"
        with initialize_config_dir(str(VERL / folder), version_base=None):
            config = compose(name, overrides=[*overrides, found_in])
        found |= set(_leaves(OmegaConf.to_container(config, resolve=False)))
    GlobalHydra.instance().clear()
    return {setting for setting in found if not setting.endswith("_target_")}


def _leaves(section: Any, above: str = "") -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def runs() -> dict[str, RuleContext]:
    """Return runs by placement and by way to start them, and one with SGLang, with all that verdicts depend on."""
    found = {}
    for placement in ("separate", "shared"):
        for way, trainer in (("main", "sync"), ("flag", "recipe_")):
            settings = Settings(AsyncTraining(placement=placement), RolloutResources(), None, LogProbServers())
            config: dict[str, Any] = {
                "trainer": {"v1": {"trainer_mode": trainer}},
                "critic": {"enable": True},
                "reward": {"reward_model": {"enable": True}},
            }
            found[f"{placement} by {way}"] = RuleContext(config, settings, None, None, ())
            if (placement, way) == ("separate", "main"):
                config = config | {"actor_rollout_ref": {"rollout": {"name": "sglang"}}}
                found["separate by main with SGLang"] = RuleContext(config, settings, None, None, ())
    return found


def table() -> str:
    """Return the file's text: settings by section and verdict, with the verdicts of all runs if they differ."""
    contexts = runs()
    rows: dict[tuple[str, str], list[str]] = {}
    for setting in sorted(settings_of_verl()):
        words = {run: _word(verdict_of(setting, context)) for run, context in contexts.items()}
        alike = next(iter(words.values())) if len(set(words.values())) == 1 else None
        section, _, name = setting.rpartition(".")
        said = alike or ", ".join(f"{word} ({run})" for run, word in words.items())
        rows.setdefault((section, said), []).append(name)
    return "".join(f"{section}\t{said}\t{' '.join(names)}\n" for (section, said), names in sorted(rows.items()))


def _word(verdict: Verdict | None) -> str:
    if verdict is None:
        return "NO VERDICT"
    within = f" with {verdict.setting}.{verdict.switch}" if verdict.switch else ""
    return f"{verdict.kind}{within}"


if __name__ == "__main__":
    FILE.write_text(table(), "utf-8")
