# Copyright 2026 The recipe authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Which checkpoints are complete: a marker written last says so, and a run resumes from no other.

Contract. A checkpoint is model, optimizer, data loader and rollout side together or not at all. Its folder has the
marker ``committed.json`` when every part is on disk, and at no other time: saving to a folder takes the marker away
first. verl's ``latest_checkpointed_iteration.txt`` is what names the checkpoint to resume from; after a process was
killed while saving it may be empty, or name one that is not complete. `settle` then points it to the newest complete
one. An old checkpoint is removed only after a newer one is committed.
Shown by tests/integration/test_checkpoints.py and test_crash_fuzz.py.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path

from recipe.async_engine.core.errors import RecipeError

logger = logging.getLogger(__name__)

MARKER = "committed.json"
TRACKER = "latest_checkpointed_iteration.txt"
ROLLOUT_STATE = "rollout_state.pt"
FOLDER = re.compile(r"global_step_(\d+)")


class CheckpointError(RecipeError):
    """A checkpoint cannot be used by this run."""


def folder_of(root: str | Path, step: int) -> Path:
    """verl's folder of a step's checkpoint."""
    return Path(root) / f"global_step_{step}"


def begin(folder: str | Path) -> None:
    """The folder is about to be written: from now on it is no checkpoint."""
    (Path(folder) / MARKER).unlink(missing_ok=True)


def commit(folder: str | Path, step: int) -> None:
    """Every part of the checkpoint is written: from now on a run may resume from it."""
    sizes = {file.name: file.stat().st_size for file in sorted(Path(folder).iterdir()) if file.is_file()}
    write_whole(Path(folder) / MARKER, json.dumps({"step": step, "files": sizes}) + "\n")


def is_committed(folder: str | Path) -> bool:
    """Whether the folder has a marker, and the files that it names in their sizes."""
    folder = Path(folder)
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in marker["files"].items()
    )


def settle(root: str | Path) -> int | None:
    """Make verl's tracker name a complete checkpoint, and return its step; None if there is none to resume from.

    Raises:
        CheckpointError: the tracker names a checkpoint of another trainer.
    """
    tracker = Path(root) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    named = int(text) if text.isdecimal() else None
    if named is not None and is_committed(folder_of(root, named)):
        return named
    if named is not None and folder_of(root, named).is_dir():
        require_ours(folder_of(root, named))
    committed = _committed(root)
    if not committed:
        logger.warning("no checkpoint in %s is complete: the run starts from the beginning", root)
        tracker.unlink()
        return None
    # The one written last: a run that was taken back to an earlier step has left later steps behind.
    step = max(committed, key=lambda step: (folder_of(root, step) / MARKER).stat().st_mtime_ns)
    logger.warning("the newest checkpoint (%r) was cut off while it was written; resuming from step %d", text, step)
    write_whole(tracker, str(step))
    return step


def require_committed(folder: str | Path) -> None:
    """Raise `CheckpointError` unless the folder, named by ``trainer.resume_from_path``, is a complete checkpoint."""
    require_ours(folder)
    if not is_committed(folder):
        raise CheckpointError(
            f"trainer.resume_from_path={folder} is not complete: it has no valid {MARKER}, so its writing was cut off. "
            "Name another one, or set trainer.resume_mode=auto to resume from the newest complete one."
        )


def require_ours(folder: str | Path) -> None:
    """Raise `CheckpointError` if another trainer wrote this checkpoint. Ours have the rollout side from the first."""
    if not (Path(folder) / ROLLOUT_STATE).is_file():
        raise CheckpointError(
            f"{folder} has no {ROLLOUT_STATE}: it was not written by this trainer, and its prompts cannot be accounted "
            "for. Start from its model with actor_rollout_ref.model.path and trainer.resume_mode=disable."
        )


def retain(root: str | Path, step: int, count: int | None) -> None:
    """Remove complete checkpoints of earlier steps until ``count`` are left with this one; None keeps all."""
    if not count or count < 1:
        return
    earlier = sorted((other for other in _committed(root) if other < step), reverse=True)
    for other in earlier[count - 1 :]:
        begin(folder_of(root, other))
        shutil.rmtree(folder_of(root, other))


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, also after a power cut."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _committed(root: str | Path) -> list[int]:
    found = [FOLDER.fullmatch(folder.name) for folder in Path(root).iterdir()]
    steps = [int(match[1]) for match in found if match]
    return [step for step in steps if is_committed(folder_of(root, step))]
