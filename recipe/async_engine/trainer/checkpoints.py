# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are complete: a marker written last says so, and a run resumes from no other.

Contract. A checkpoint is model, optimizer, data loader and rollout side together or not at all. Its folder gets the
marker ``committed.json`` when every file below it is on the disk: the marker names them all with their sizes, and the
small ones and the rollout side with their digests. From then on it is never written to again, only removed as a whole
or given another name. verl's ``latest_checkpointed_iteration.txt`` names the checkpoint to resume from; after a kill it
may be empty, or name one that is not complete.

Folders without a marker were cut off while they were written; they are removed. Folders of another trainer are left as
they are. Shown by tests/integration/test_checkpoints.py, test_checkpoint_faults.py and test_crash_fuzz.py.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from recipe.async_engine.core.errors import RecipeError
from recipe.async_engine.run import durable

logger = logging.getLogger(__name__)

MARKER = "committed.json"
TRACKER = "latest_checkpointed_iteration.txt"
ROLLOUT_STATE = "rollout_state.pt"
FOLDER = re.compile(r"global_step_(\d+)")
ASIDE = ".aside"
SMALL = 1 << 20
"""Files of at most so many bytes are named in the marker with their digests."""


class CheckpointError(RecipeError):
    """A checkpoint cannot be used by this run."""


def folder_of(root: str | Path, step: int) -> Path:
    """verl's folder of a step's checkpoint."""
    return Path(root) / f"global_step_{step}"


def commit(root: str | Path, step: int) -> None:
    """Every part of the checkpoint is written: from now on a run may resume from it."""
    folder = folder_of(root, step)
    durable.sync_tree(folder)
    track(root, step)
    files = {
        str(file.relative_to(folder)): [file.stat().st_size, _digest(file)]
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    durable.write(folder / MARKER, json.dumps({"step": step, "files": files}) + "\n")


def problem(folder: str | Path, sizes_only: bool = False) -> str | None:
    """Why the folder is no complete checkpoint; None if it is one."""
    folder = Path(folder)
    if not folder.is_dir():
        return "there is no such folder"
    try:
        files = json.loads((folder / MARKER).read_bytes())["files"]
        named = {str(name): (int(size), digest) for name, (size, digest) in files.items()}
    except FileNotFoundError:
        return f"it has no {MARKER}, so its writing was cut off"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its {MARKER} cannot be read ({type(error).__name__}: {error})"
    for name, (size, digest) in named.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
        if not sizes_only and digest is not None and _digest(file) != digest:
            return f"{name} has another content than was saved"
    return None


def candidates(root: str | Path) -> list[int]:
    """The steps that have a checkpoint with a marker, whatever it says: the one to try first is the first.

    That is the one that verl's tracker names, then those before it and those after it, the newest first.

    Raises:
        CheckpointError: the tracker names a checkpoint of another trainer.
    """
    named = tracked(root)
    if named is not None and folder_of(root, named).is_dir():
        require_ours(folder_of(root, named))
    steps = sorted((step for step in _steps(root) if _has_marker(root, step)), reverse=True)
    if named is None:
        return steps
    return [step for step in steps if step <= named] + [step for step in steps if step > named]


def tracked(root: str | Path) -> int | None:
    """The step that verl's tracker names; None if there is none or it was cut off."""
    try:
        text = (Path(root) / TRACKER).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isascii() and text.isdecimal() else None


def track(root: str | Path, step: int | None) -> None:
    """Have verl's tracker name this step, or none."""
    tracker = Path(root) / TRACKER
    if step is None:
        tracker.unlink(missing_ok=True)
    elif tracked(root) != step:
        durable.write(tracker, str(step))
    else:  # verl may have written it
        durable.sync(tracker)


def clear(root: str | Path) -> None:
    """Remove what was cut off while it was written or removed."""
    for folder in Path(root).glob("global_step_*"):
        if folder.name.endswith(durable.REMOVED):
            durable.remove_tree(folder.with_name(folder.name.removesuffix(durable.REMOVED)))
    for step in _steps(root):
        if not _has_marker(root, step) and _is_ours(folder_of(root, step)):
            logger.warning("%s was cut off while it was written; it is removed", folder_of(root, step))
            durable.remove_tree(folder_of(root, step))


def require_room(root: str | Path, after: int) -> None:
    """Raise `CheckpointError` if another trainer's checkpoint is where a run would save past this step."""
    foreign = [str(folder_of(root, step)) for step in _steps(root) if step > after]
    foreign = [folder for folder in foreign if not _is_ours(Path(folder))]
    if foreign:
        raise CheckpointError(
            f"{', '.join(foreign)}: not written by this trainer (no {ROLLOUT_STATE}), and in the way of this run's own "
            "checkpoints. Move them, or give the run another trainer.default_local_dir."
        )


def set_aside(root: str | Path, after: int) -> None:
    """Give checkpoints past this step other names: the run goes on from there, and they are of another history."""
    for step in _steps(root):
        folder = folder_of(root, step)
        if step > after and _has_marker(root, step):
            names = (folder.with_name(f"{folder.name}{ASIDE}{number}") for number in range(1, 1 << 30))
            aside = next(name for name in names if not name.exists())
            os.replace(folder, aside)
            durable.sync(root)
            logger.warning("%s is not of this run's history: it is kept as %s", folder, aside.name)


def abandon(root: str | Path, step: int, tracked_before: int | None) -> None:
    """What was written of this step's checkpoint goes, if it can; the one before is the newest one again."""
    if _has_marker(root, step):
        return
    with suppress(OSError):
        durable.remove_tree(folder_of(root, step))
    with suppress(OSError):
        track(root, tracked_before)


def require_ours(folder: str | Path) -> None:
    """Raise `CheckpointError` if another trainer wrote this checkpoint. Ours have the rollout side from the first."""
    if not _is_ours(Path(folder)):
        raise CheckpointError(
            f"{folder} has no {ROLLOUT_STATE}: it was not written by this trainer, and its prompts cannot be accounted "
            "for. Start from its model with actor_rollout_ref.model.path and trainer.resume_mode=disable."
        )


def retain(root: str | Path, step: int, count: int | None) -> None:
    """Remove complete checkpoints of earlier steps until ``count`` are left with this one; None keeps all."""
    if not count or count < 1:
        return
    earlier = sorted((other for other in _steps(root) if other < step), reverse=True)
    complete = [other for other in earlier if problem(folder_of(root, other), sizes_only=True) is None]
    for other in complete[count - 1 :]:
        try:
            durable.remove_tree(folder_of(root, other))
        except OSError as error:
            logger.warning("%s could not be removed: %s", folder_of(root, other), error)


def _steps(root: str | Path) -> Sequence[int]:
    found = [FOLDER.fullmatch(folder.name) for folder in Path(root).glob("global_step_*")]
    return [int(match[1]) for match in found if match]


def _has_marker(root: str | Path, step: int) -> bool:
    return (folder_of(root, step) / MARKER).exists()


def _is_ours(folder: Path) -> bool:
    """Whether this trainer wrote it, or began to: the rollout side is the first file, the marker the last one."""
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    return not names or not names.isdisjoint({MARKER, ROLLOUT_STATE, ROLLOUT_STATE + durable.PARTIAL})


def _digest(file: Path) -> str | None:
    if file.name != ROLLOUT_STATE and file.stat().st_size > SMALL:
        return None
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
