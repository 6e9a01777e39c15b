# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints that have verl's files and the rollout state, and finds the checkpoint to resume from.

Contract. A checkpoint is complete if it has model, optimizer, position in the data and rollout state. Then all its
files are on disk and its folder has the marker ``committed.json``. The marker lists the size of every file, and also
the digests of small files and of the rollout state. A folder with a marker is never changed, only removed as a whole or
renamed. `RunState.save` has verl write its files, and returns a function that writes the other files, the marker last,
on another thread while training continues. Until the marker is written, verl's ``latest_checkpointed_iteration.txt``
(the tracker) names the previous checkpoint. `RunState.find` tries the complete checkpoints in the order of
`candidates`, chooses the first one whose rollout state can be read, and refuses settings with which the run cannot
continue from it. After a kill the tracker may be empty, or name an incomplete checkpoint.

A folder without a marker was not written completely, so it is removed. Folders of other trainers are left alone. Shown
by tests/integration/test_checkpoints.py, test_saving.py, test_checkpoint_faults.py (kills, power cuts and full disks
at any write) and test_crash_fuzz.py (`kill -9`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import open_dict

from recipe.async_engine.config.plan import RunPlan
from recipe.async_engine.core.deadlines import EARLIER_RUN_S
from recipe.async_engine.core.errors import CheckpointError, RecipeError, SnapshotError
from recipe.async_engine.core.snapshots import changes
from recipe.async_engine.record import durable
from recipe.async_engine.record.owner import CHECKPOINTS, Owner
from recipe.async_engine.record.schema import FORMAT, BadFile, marker_in
from recipe.async_engine.rollout.prompts import PromptSource
from recipe.async_engine.trainer import rollout_state
from recipe.async_engine.trainer.rollout_state import ROLLOUT_STATE, new_ledger

logger = logging.getLogger(__name__)

MARKER = "committed.json"
TRACKER = "latest_checkpointed_iteration.txt"
DIGITS = 18
"""Largest number of digits of a step's number."""
FOLDER = re.compile(r"global_step_(0|[1-9][0-9]{0,17})")
ASIDE = ".aside"
BEGUN = "begun"
"""Name of the first file that this trainer writes to a checkpoint's folder. It is removed after the rollout state is
written.
"""
BEGUN_BY = (BEGUN, BEGUN + durable.PARTIAL, ROLLOUT_STATE, ROLLOUT_STATE + durable.PARTIAL)
"""A checkpoint folder that this trainer has begun to write, but has not completed, has at least one of these files."""
SMALL = 1 << 20
"""Largest size in bytes of a file whose digest is in the marker."""
FULL = 1 << 20
"""If fewer bytes than this are free when a save fails, a full disk is reported as the cause."""


def folder_of(root: str | Path, step: int) -> Path:
    """Return verl's folder for the checkpoint of a step."""
    return Path(root) / f"global_step_{step}"


def commit(root: str | Path, step: int) -> None:
    """Mark a step's checkpoint as complete, so that a run may resume from it, and name it in verl's file `TRACKER`."""
    folder = folder_of(root, step)
    durable.sync_tree(folder)
    track(root, step)
    written = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    files = {str(file.relative_to(folder)): [file.stat().st_size, _digest(file)] for file in written}
    durable.write(folder / MARKER, json.dumps({"format": FORMAT, "step": step, "files": files}) + "\n")


def problem(folder: str | Path, sizes_only: bool = False) -> str | None:
    """Return why the folder is not a complete checkpoint, or None if it is one.

    With ``sizes_only``, the files' sizes are checked, but not their contents.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return "there is no such folder"
    try:
        marker = marker_in(folder, MARKER)
    except FileNotFoundError:
        return f"it has no {MARKER}, so it was not written completely"
    except BadFile as error:
        return str(error)
    if (named := FOLDER.fullmatch(folder.name)) and int(named[1]) != marker.step:
        return f"its {MARKER} is of step {marker.step}"
    for name, (size, digest) in marker.files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
        if not sizes_only and digest is not None and _digest(file) != digest:
            return f"{name} has another content than was saved"
    return None


def candidates(root: str | Path) -> list[int]:
    """Return the steps whose folders have the marker `MARKER`, in the order in which a run should try to resume from
    them.

    The step that verl's file `TRACKER` names comes first, then earlier steps, the newest first, and then later steps.

    Raises:
        CheckpointError: `TRACKER` names a checkpoint of another trainer.
    """
    named = tracked(root)
    if named is not None and folder_of(root, named).is_dir():
        require_ours(folder_of(root, named))
    steps = [step for step, folder in _folders(root).items() if (folder / MARKER).exists()]
    return sorted(steps, key=lambda step: (named is None or step <= named, step), reverse=True)


def tracked(root: str | Path) -> int | None:
    """Return the step that verl's file `TRACKER` names, or None if the file is missing or incomplete."""
    try:
        text = (Path(root) / TRACKER).read_text(errors="replace").strip()
    except (FileNotFoundError, IsADirectoryError):
        return None
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else None


def track(root: str | Path, step: int | None) -> None:
    """Write ``step`` into verl's file `TRACKER`, or remove the file if ``step`` is None."""
    tracker = Path(root) / TRACKER
    if step is None:
        tracker.unlink(missing_ok=True)
    elif tracked(root) != step:
        durable.write(tracker, str(step))
    else:  # verl may have written the file without fsync, so call that here
        durable.sync(tracker)


def clear(root: str | Path) -> None:
    """Remove checkpoint folders that were not written, or not removed, completely."""
    for folder in Path(root).glob("global_step_*"):
        if folder.name.endswith(durable.REMOVED):
            durable.remove_tree(folder.with_name(folder.name.removesuffix(durable.REMOVED)))
    for folder in _folders(root).values():
        if not (folder / MARKER).exists() and _is_ours(folder):
            logger.warning("%s was cut off while it was written; it is removed", folder)
            durable.remove_tree(folder)


def require_room(root: str | Path, after: int) -> None:
    """Raise `CheckpointError` if ``root`` has a checkpoint of another trainer for a step later than ``after``.

    When this run reached that step, it would write its own checkpoint to the same folder.
    """
    foreign = [str(folder) for step, folder in _folders(root).items() if step > after and not _is_ours(folder)]
    if foreign:
        raise CheckpointError(
            f"this run would write its checkpoints among those of another trainer, which lack {ROLLOUT_STATE}: "
            f"{', '.join(foreign)}. "
            "Move them, or give the run another trainer.default_local_dir."
        )


def set_aside(root: str | Path, after: int) -> None:
    """Rename the checkpoints of steps later than ``after``, the step from which the run resumes."""
    for step, folder in _folders(root).items():
        if step > after and (folder / MARKER).exists():
            names = (folder.with_name(f"{folder.name}{ASIDE}{number}") for number in range(1, 1 << 30))
            aside = next(name for name in names if not name.exists())
            os.replace(folder, aside)
            durable.sync(root)
            logger.warning("%s is not of this run's history: it is kept as %s", folder, aside.name)


def require_ours(folder: str | Path) -> None:
    """Raise `CheckpointError` if the checkpoint has no rollout state, because another trainer wrote it."""
    if not _is_ours(Path(folder)):
        raise CheckpointError(
            f"{folder} has no {ROLLOUT_STATE}: it was not written by this trainer, and its prompts cannot be accounted "
            "for. Start from its model with actor_rollout_ref.model.path and trainer.resume_mode=disable."
        )


def retain(root: str | Path, step: int, count: int | None) -> None:
    """Of the complete checkpoints up to ``step``, keep the newest ``count`` (all if None), and remove the others."""
    if not count or count < 1:
        return
    earlier = [folder for other, folder in sorted(_folders(root).items(), reverse=True) if other < step]
    complete = [folder for folder in earlier if problem(folder, sizes_only=True) is None]
    for folder in complete[count - 1 :]:
        try:
            durable.remove_tree(folder)
        except OSError as error:
            logger.warning("%s could not be removed: %s", folder, error)


def _folders(root: str | Path) -> dict[int, Path]:
    matches = {folder: FOLDER.fullmatch(folder.name) for folder in Path(root).glob("global_step_*")}
    return {int(match[1]): folder for folder, match in matches.items() if match}


def _is_ours(folder: Path) -> bool:
    """Return whether this trainer has written a file into ``folder``, or there is no file in it.
    This trainer's folders have the file `BEGUN` until the rollout state is written, and `MARKER` when they are
    complete.
    """
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    return not names or not names.isdisjoint({MARKER, *BEGUN_BY})


def _digest(file: Path) -> str | None:
    if file.name != ROLLOUT_STATE and file.stat().st_size > SMALL:
        return None
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def _undone_on_error(root: str | Path, step: int, before: int | None) -> Iterator[None]:
    """If the ``with`` block fails, remove the incomplete checkpoint of ``step``, and restore verl's file `TRACKER`.

    ``before`` is the step that the file has to name again; if it is None, the file is removed.
    """
    folder = folder_of(root, step)
    try:
        yield
    except Exception as error:
        full = shutil.disk_usage(root).free < FULL
        if not (folder / MARKER).exists():
            with suppress(OSError):
                durable.remove_tree(folder)
            with suppress(OSError):
                track(root, before)
        if full:  # torch's own error would only say that a file has a wrong size
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise


class RunState:
    """Writes the checkpoints of one run, and finds and reads the checkpoint that the run resumes from.

    Args:
        config: the whole configuration. It is changed in place, so that verl does not remove old checkpoints itself.
        made_with: the values that decide whether a later run can resume from the checkpoints (`trainer.made_with`).
        lacking: a function that takes a checkpoint's folder and returns what this run needs but the folder lacks.
    """

    def __init__(
        self,
        config: Any,
        plan: RunPlan,
        made_with: Mapping[str, Any],
        lacking: Callable[[Path], list[str]] = lambda folder: [],
    ) -> None:
        self._plan, self._lacking = plan, lacking
        self._trainer = config.trainer
        limit = config.trainer.get("max_actor_ckpt_to_keep")
        self._kept = 1 if config.trainer.get("remove_previous_ckpt_in_save") else limit
        with open_dict(config):
            # Keep verl from removing old checkpoints. It would remove its files of a checkpoint before the next
            # checkpoint is complete, and would leave this trainer's files of the removed checkpoint behind.
            config.trainer.update({"max_actor_ckpt_to_keep": None, "max_critic_ckpt_to_keep": None})
            config.trainer.remove_previous_ckpt_in_save = False
        self._root = config.trainer.default_local_dir
        self._timeout_s = plan.settings.async_training.timeouts.checkpoint
        self._made_with = made_with
        self._owner: Owner | None = None
        self._found: dict[str, Any] | None = None
        self._history_from: int | None = -1
        """The step from which the run resumed, or -1 if it started from the beginning. The first save renames the
        checkpoints of later steps, and sets this to None.
        """
        self.resumed: dict[str, Any] = {"step": 0, "groups_kept": 0, "changed": []}
        """Describes the checkpoint that the run resumed from: its step, the number of its ready groups, and the
        settings that have changed since.
        """

    def save(self, step: int, snapshot: dict[str, Any], save_verl: Callable[[], None]) -> Callable[[], None]:
        """Have ``save_verl`` write verl's files, and return a function that completes the checkpoint with ``snapshot``.

        The caller must call the returned function once, on any thread, before the next save, and must not change
        ``snapshot``. That function also removes the oldest checkpoints, if there are more than should be kept. If the
        step already has a checkpoint, nothing is written.
        """
        root = self._root
        if self._history_from is not None:
            set_aside(root, self._history_from)
            self._history_from = None
        folder = folder_of(root, step)
        if (folder / MARKER).exists():
            return lambda: None
        before = tracked(root)
        with _undone_on_error(root, step, before):
            folder.mkdir(parents=True, exist_ok=True)
            durable.write(folder / BEGUN, f"{step}\n")
            save_verl()
            track(root, before)

        def write_rest() -> None:
            with _undone_on_error(root, step, before):
                rollout_state.save(str(folder), {**snapshot, "made_with": self._made_with}, self._timeout_s)
                (folder / BEGUN).unlink()
                commit(root, step)
            retain(root, step, self._kept)

        return write_rest

    def find(self) -> str | None:
        """Return the folder of the checkpoint to resume from, or None if the run starts from the beginning.

        Raises:
            CheckpointError: no checkpoint can be used, or a checkpoint belongs to another trainer.
            SnapshotError: the run cannot continue from the checkpoint with its settings.
            FolderTaken: an earlier launch is still writing to the folder.
        """
        Path(self._root).mkdir(parents=True, exist_ok=True)
        self._owner = Owner(self._root, CHECKPOINTS, EARLIER_RUN_S)
        clear(self._root)
        mode = self._trainer.resume_mode
        folder = None if mode == "disable" else self._named() if mode == "resume_path" else self._newest()
        if folder is not None:
            self.resumed["step"] = step = int(str(folder).rpartition("global_step_")[2])
            if folder.resolve() == folder_of(self._root, step).resolve():
                self._history_from = step
        if self._trainer.save_freq > 0:
            require_room(self._root, -1 if self._history_from is None else self._history_from)
        return None if folder is None else str(folder)

    def _named(self) -> Path:
        folder = Path(self._trainer.resume_from_path)
        require_ours(folder)
        why = problem(folder) or self._read(folder)
        if why is not None:
            raise CheckpointError(
                f"trainer.resume_from_path={folder} cannot be used: {why}. Name another checkpoint, or set "
                "trainer.resume_mode=auto to resume from the newest complete checkpoint."
            )
        if tracked(self._root) is None:
            # Remove an incomplete `TRACKER`: verl reads this file even if `resume_from_path` is set, and would fail.
            track(self._root, None)
        return folder

    def _newest(self) -> Path | None:
        refused = []
        for step in candidates(self._root):
            folder = folder_of(self._root, step)
            why = problem(folder) or self._read(folder)
            if why is None:
                track(self._root, step)
                return folder
            logger.warning("%s cannot be used, an older one is looked for: %s", folder, why)
            refused.append(f"{folder.name}: {why}")
        if refused:
            raise CheckpointError(
                f"no checkpoint in {self._root} can be used ({'; '.join(refused)}). Repair a checkpoint, or set "
                "trainer.resume_mode=disable to start from the beginning; the checkpoints are then renamed."
            )
        if (Path(self._root) / TRACKER).exists():
            logger.warning("no checkpoint in %s is complete: the run starts from the beginning", self._root)
        track(self._root, None)
        return None

    def _read(self, folder: Path) -> str | None:
        """Read the rollout state of a checkpoint, and return why the checkpoint cannot be used, or None if it can.

        Raises:
            SnapshotError: the rollout state can be read, but not used with the settings of this run.
        """
        try:
            found = rollout_state.checked(rollout_state.load(str(folder)))
        except SnapshotError:
            raise
        except BadFile as error:
            return str(error)
        except Exception as error:  # unpickling may raise anything
            return f"{ROLLOUT_STATE} cannot be read ({type(error).__name__}: {error})"
        ledger = found["ledger"]
        try:
            changed = changes(found["made_with"], self._made_with, len(ledger["live"]))
            if lacking := self._lacking(folder):
                raise SnapshotError("; ".join(lacking))
            new_ledger(self._plan, ledger)
        except SnapshotError as error:
            if isinstance(error.__cause__, RecipeError) and ledger["max_staleness"] == self._plan.max_staleness:
                return f"the ledger in {ROLLOUT_STATE} is not valid: {error.__cause__}"
            raise SnapshotError(f"cannot resume from {folder}: {error}") from None
        except (RecipeError, ArithmeticError, LookupError) as error:
            return f"the ledger in {ROLLOUT_STATE} is not valid: {error}"
        self._found, self.resumed["changed"] = found, changed
        if changed:
            logger.warning("changes since the checkpoint from which the run resumes: %s", "; ".join(changed))
        return None

    def load(self, prompts: PromptSource) -> dict[str, Any] | None:
        """Return the rollout state that `find` has read, and restore the position of ``prompts``.

        The result is None if the run starts from the beginning.
        """
        snapshot, self._found = self._found, None
        if snapshot is not None:
            rollout_state.put_payloads(snapshot)
            prompts.restore(snapshot["source"])
        return snapshot
