# SPDX-License-Identifier: Apache-2.0
"""Checks whether the folder of a verl checkpoint contains what a run would load from it.

Contract: verl loads only what ``load_contents`` names and does not report anything else as missing, so after a resume
from a checkpoint without weights, training would continue from the base model. Before anything is loaded, this module
names the parts that actor and critic need to resume but would not get. FSDP checkpoints have one file for each rank and
part (model, optimizer, extra); Megatron checkpoints have verl's manifest of their contents. Shown by
tests/integration/test_contents.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from recipe.async_engine.config.problems import lookup
from recipe.async_engine.core.snapshots import RESUMED_PARTS, not_carried

logger = logging.getLogger(__name__)

MANIFEST = "ckpt_contents.json"
FSDP_FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
MANIFEST_KEYS = {"model": ("model", "hf_model"), "optimizer": ("optimizer",), "extra": ("rng_state",)}
CHANGE = {
    "model": "There are no weights to go on from: resume from another checkpoint, or set trainer.resume_mode=disable.",
    "rest": "Resume from another checkpoint, or begin anew with its weights: async_training.start_from={folder} and "
    "trainer.resume_mode=disable.",
}


def trained_models(has_critic: bool) -> dict[str, str]:
    """Return the configuration section of each trained model, by the model's folder in a checkpoint (actor, critic)."""
    return {"actor": "actor_rollout_ref.actor"} | ({"critic": "critic"} if has_critic else {})


def lacking(config: Any, ranks: int, has_critic: bool, folder: Path) -> list[str]:
    """Return a text for each part of a checkpoint that a resume on ``ranks`` ranks needs but ``folder`` lacks."""
    found = []
    for model, section in trained_models(has_critic).items():
        setting = f"{section}.checkpoint.load_contents"
        load, strategy = lookup(config, setting), str(lookup(config, f"{section}.strategy"))
        if left_out := not_carried(RESUMED_PARTS if load is None else load, strategy):
            found.append(f"{setting} = {list(load)} leaves out {' and '.join(left_out)}, and a resume needs all of it")
        absent = dict(_absent(folder / model, strategy, ranks))
        if absent:
            names = ", ".join(f"{part} ({name})" for part, name in absent.items())
            change = CHANGE["model" if "model" in absent else "rest"].format(folder=folder)
            saved = f"the run that wrote it left this out ({section}.checkpoint.save_contents) or had other ranks"
            found.append(f"it does not have the {model}'s {names}: {saved}. {change}")
    return found


def without_weights(config: Any, ranks: int, has_critic: bool, folder: Path) -> str | None:
    """Return why a run with ``ranks`` training ranks cannot start from the weights in ``folder``; None if it can."""
    if not os.path.isdir(folder):
        return "is no folder"
    for model, section in trained_models(has_critic).items():
        strategy = str(lookup(config, f"{section}.strategy"))
        name = dict(_absent(folder / model, strategy, ranks)).get("model")
        if name is None:
            continue
        others = sorted(file.name for file in (folder / model).glob("model_world_size_*_rank_0.pt"))
        also = f" (it has {', '.join(others)})" if others else ""
        return (
            f"does not have the {model}'s weights as {section}.strategy={strategy} loads them on {ranks} training "
            f"ranks: {model}/{name} is missing{also}. Train on as many ranks as wrote it, or merge it: "
            f"python -m verl.model_merger merge --backend {strategy.rstrip('2')} --local_dir {folder / model} "
            "--target_dir MODEL, and set actor_rollout_ref.model.path=MODEL instead of this"
        )
    return None


def _absent(folder: Path, strategy: str, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield each part that a resume needs but the model's folder lacks, with the missing file or manifest key."""
    if strategy == "megatron":
        contents = _contents(folder)
        for part, keys in MANIFEST_KEYS.items():
            if not any(key in contents for key in keys):
                yield part, f"{keys[0]} in {MANIFEST}"
    for part, stem in FSDP_FILES.items() if strategy.startswith("fsdp") else ():
        names = (f"{stem}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks))
        name = next((name for name in names if not os.path.isfile(folder / name)), None)
        if name is not None:
            yield part, name


def _contents(folder: Path) -> dict[str, Any]:
    """Return the contents of a Megatron checkpoint, which verl lists in a manifest.

    The manifest is that of verl/utils/checkpoint/megatron_checkpoint_manager.py:470.
    """
    file = folder / MANIFEST
    try:
        contents = from_json(file.read_bytes())["contents"]
        if not isinstance(contents, dict):
            raise TypeError("the value of the manifest's key `contents` is not a JSON object")
        return contents
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError) as error:
        logger.warning("%s cannot be read: %r", file, error)
        return {}
