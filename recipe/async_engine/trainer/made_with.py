# SPDX-License-Identifier: Apache-2.0
"""Collects the settings and data of a run that its checkpoints store, so that a resumed run notices changes.

`core.snapshots` decides which of these values may change. A file of the training data is identified by its size and a
digest of its content. If the file is larger than `WHOLE` bytes, the digest is of its first and last `PART` bytes. Data
that is not on a local disk is identified by its name, and the tokenizer by its vocabulary. Shown by
tests/integration/test_made_with.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic_core import from_json

from recipe.async_engine.config.plan import RunPlan, has_critic, teacher_keys, teachers
from recipe.async_engine.core.snapshots import BATCH, PER_VERSION
from recipe.async_engine.core.snapshots import WHOLE as WHOLE_BATCHES

WHOLE, PART = 256 << 20, 16 << 20


def made_with(config: Any, plan: RunPlan, dataset: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the values whose changes `core.snapshots.RULES` judges. ``dataset`` is verl's training data set."""
    data, training = config.data, plan.settings.async_training
    strategy = config.actor_rollout_ref.actor.strategy
    return {
        "actor_rollout_ref.rollout.n": plan.answers_per_group,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        BATCH: plan.batch_groups,
        PER_VERSION: plan.batches_per_version,
        WHOLE_BATCHES: training.whole_batches,
        "async_training.placement": training.placement,
        "async_training.max_staleness": plan.max_staleness,
        "actor_rollout_ref.actor.strategy": strategy,
        # The number of ranks only matters for FSDP, because Megatron's distributed checkpoints can be loaded by any
        # number of ranks.
        "trainer.nnodes * trainer.n_gpus_per_node": plan.trainer_ranks if "fsdp" in strategy else None,
        "data.train_files": files_fingerprint(getattr(dataset, "data_files", None) or _listed(data.train_files)),
        "rows of data.train_files": len(dataset),
        "data.shuffle": data.get("shuffle", True),
        "data.seed": data.get("seed"),
        "trainer.total_epochs": config.trainer.total_epochs,
        "tokenizer": _digest(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
        "chat template": _digest(str(getattr(tokenizer, "chat_template", None)).encode()),
        "distillation": _distillation(config),
        **_of_models(config),
    }


def _distillation(config: Any) -> str:
    """Return, as text, the settings that determine which columns the teachers add to an answer."""
    section = OmegaConf.to_container(config.get("distillation") or OmegaConf.create())
    sections = teachers({"distillation": section})
    if not sections:
        return "none"
    loss = config.distillation.distillation_loss
    models = [OmegaConf.select(config, f"{section}.model_path") for section in sections]
    if keys := teacher_keys({"distillation": section}):
        models = [f"{model} for {section['teacher_key']} {key}" for key, model in zip(keys, models, strict=True)]
    return f"{loss.loss_mode}, top {loss.topk}, of {', '.join(models)}"


SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
)
"""The keys of a model's config.json that decide the shapes of its tensors."""


def _of_models(config: Any) -> dict[str, Any]:
    """Return a description of the models, adapters and optimizers, with sizes only of models in local folders."""
    policy, found = config.actor_rollout_ref.get("model") or {}, {}
    sections = {"actor_rollout_ref.actor": policy.get("path")}
    if has_critic(config):
        sections["critic"] = OmegaConf.select(config, "critic.model.path")
        found["critic.strategy"] = OmegaConf.select(config, "critic.strategy")
    for section, path in sections.items():
        optimizer = OmegaConf.select(config, f"{section}.optim") or {}
        found |= {f"{section}.optim.{name}": optimizer.get(name) for name in ("optimizer", "lr") if name in optimizer}
        if (sizes := _sizes(path)) is not None:
            found[f"sizes of {section.removesuffix('.actor')}.model.path"] = sizes
    found["LoRA"] = _lora(policy)
    return found


def _sizes(path: Any) -> str | None:
    """Return the values of the keys `SIZES` in a model's config.json as text, or None if the file cannot be read."""
    file = Path(str(path)).expanduser() / "config.json"
    try:
        content = from_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    parts = (
        [part for part in (content, content.get("text_config")) if isinstance(part, dict)]
        if isinstance(content, dict)
        else []
    )
    return ", ".join(f"{name} {part[name]}" for part in parts for name in SIZES if part.get(name) is not None)


def _lora(model: Mapping[str, Any]) -> str:
    nested = model.get("lora") or {}
    rank = model.get("lora_rank") or nested.get("rank") or 0
    if not rank:
        return "none"
    alpha = nested.get("alpha") if nested.get("rank") else model.get("lora_alpha")
    weights = sorted(Path(str(model.get("path"))).expanduser().glob("*.safetensors"))
    base = files_fingerprint(weights) or str(model.get("path"))
    return f"rank {rank}, alpha {alpha}, modules {model.get('target_modules')}, of {base}"


def files_fingerprint(files: Iterable[Any]) -> str:
    """Return a text that identifies each file by its content, or, if it is not on a local disk, by its name."""
    return ", ".join(_fingerprint(str(file)) for file in files)


def _fingerprint(path: str) -> str:
    if not os.path.isfile(path):
        return path
    size = os.path.getsize(path)
    content = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= WHOLE:
            content = hashlib.file_digest(file, "sha256")
        else:
            content.update(file.read(PART))
            file.seek(-PART, os.SEEK_END)
            content.update(file.read(PART))
    return f"{os.path.basename(path)} ({size} bytes, sha256 {content.hexdigest()[:16]})"


def _listed(files: Any) -> list[Any]:
    return [files] if isinstance(files, str) else list(files or ())


def _digest(content: bytes) -> str:
    return "sha256 " + hashlib.sha256(content).hexdigest()[:16]
