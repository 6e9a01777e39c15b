# SPDX-License-Identifier: Apache-2.0
"""What a run's checkpoints are made with, so that a resumed run can tell what has changed (`core.snapshots`).

A file of the training data is known by its size and a digest: of its whole content up to `WHOLE` bytes, of its first
and last `PART` bytes above. What is not on a local disk is known by its name. The tokenizer is known by its vocabulary.
Shown by tests/integration/test_made_with.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

from recipe.async_engine.core.snapshots import BATCH, PER_VERSION
from recipe.async_engine.core.snapshots import WHOLE as WHOLE_BATCHES
from recipe.async_engine.settings.plan import RunPlan

WHOLE, PART = 256 << 20, 16 << 20


def made_with(config: Any, plan: RunPlan, dataset: Any, tokenizer: Any) -> dict[str, Any]:
    """The values of `core.snapshots.RULES`; ``dataset`` is verl's, of the training data."""
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
        # Megatron's distributed checkpoints can be loaded by another number of ranks.
        "trainer.nnodes * trainer.n_gpus_per_node": plan.trainer_ranks if "fsdp" in strategy else None,
        "data.train_files": files_fingerprint(getattr(dataset, "data_files", None) or _listed(data.train_files)),
        "rows of data.train_files": len(dataset),
        "data.shuffle": data.get("shuffle", True),
        "data.seed": data.get("seed"),
        "trainer.total_epochs": config.trainer.total_epochs,
        "tokenizer": _digest(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
        "chat template": _digest(str(getattr(tokenizer, "chat_template", None)).encode()),
    }


def files_fingerprint(files: Iterable[Any]) -> str:
    """By content where it can be read, else by name."""
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
