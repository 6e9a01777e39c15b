# SPDX-License-Identifier: Apache-2.0
"""The rollout side of a checkpoint is written whole, and read back with payloads as object references."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from ray.exceptions import ObjectLostError

from recipe.async_engine.core.errors import SnapshotError
from recipe.async_engine.trainer import rollout_state


class Store:
    """Ray's object store."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.deadlines: list[float] = []
        self.lost: set[str] = set()

    def put(self, value: Any) -> str:
        self.objects[f"reference-{len(self.objects)}"] = value
        return f"reference-{len(self.objects) - 1}"

    def get(self, references: Any, timeout: float) -> Any:
        self.deadlines.append(timeout)
        if isinstance(references, list):
            return [self.get(reference, timeout) for reference in references]
        if references in self.lost:
            raise ObjectLostError(references, "node-1", "callsite")
        return self.objects[references]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(rollout_state, "ray", store)
    return store


LIVE = [[4, 40, 0, "0-40", 2, "ready", 1, None], [5, 50, 0, "0-50", 3, "running", 1, None]]


def snapshot_of(store: Store) -> dict[str, Any]:
    kept = [None, "its answers"]
    ready = [store.put({"tokens": torch.arange(3)}), store.put({"tokens": torch.arange(4)})]
    return {
        "ledger": {"version": 3, "live": LIVE},
        "source": {"epoch": 1},
        "groups": {
            4: {"row": {"index": 40}, "scored": ["a", "b"], "payloads": ready, "kept": [None, None]},
            5: {"row": {"index": 50}, "scored": ["a", None], "payloads": [ready[0], None], "kept": kept},
        },
        "validation": {"first": 0.5, "last": 0.75},
    }


def test_groups_come_back_with_the_payloads_that_were_there_and_what_is_kept_of_the_others(
    tmp_path: Path, store: Store
) -> None:
    rollout_state.save(str(tmp_path / "global_step_3"), snapshot_of(store), timeout_s=7.0)
    loaded = rollout_state.load(str(tmp_path / "global_step_3"))
    rollout_state.put_payloads(loaded)
    assert {key: loaded[key] for key in ("ledger", "source", "validation")} == {
        "ledger": {"version": 3, "live": LIVE},
        "source": {"epoch": 1},
        "validation": {"first": 0.5, "last": 0.75},
    }
    ready, running = loaded["groups"][4], loaded["groups"][5]
    payloads = [store.objects[reference] for reference in ready["payloads"]]
    assert [payload["tokens"].tolist() for payload in payloads] == [[0, 1, 2], [0, 1, 2, 3]]
    assert (ready["row"], ready["scored"]) == ({"index": 40}, ["a", "b"])
    assert (running["row"], running["scored"], running["kept"]) == ({"index": 50}, ["a", None], [None, "its answers"])
    assert [None if payload is None else store.objects[payload] for payload in running["payloads"]][1] is None
    assert store.objects[running["payloads"][0]]["tokens"].tolist() == [0, 1, 2]
    assert max(store.deadlines) <= 7.0
    assert store.deadlines == sorted(store.deadlines, reverse=True), "one deadline for all of them"


def test_payload_is_written_as_it_is_in_memory_and_one_of_an_earlier_version_as_the_bytes_that_it_was(
    tmp_path: Path, store: Store
) -> None:
    packed = np.random.default_rng(0).integers(0, 256, 200_000).astype(np.uint8)
    packed.flags.writeable = False  # as what the object store hands over
    snapshot = snapshot_of(store)
    snapshot["groups"][4]["payloads"] = [store.put(packed), store.put(packed.tobytes())]
    rollout_state.save(str(tmp_path), snapshot, timeout_s=1.0)
    # Neither is written as text, which would take half as much again.
    assert (tmp_path / "rollout_state.pt").stat().st_size < 2 * len(packed) + 10_000
    loaded = rollout_state.load(str(tmp_path))
    rollout_state.put_payloads(loaded)
    array, plain = (store.objects[reference] for reference in loaded["groups"][4]["payloads"])
    assert np.array_equal(array, packed) and array.dtype == np.uint8
    assert plain == packed.tobytes()


def test_write_that_breaks_off_leaves_the_file_before_it(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout_state.save(str(tmp_path), snapshot_of(store), timeout_s=1.0)

    def save(value: Any, file: BinaryIO, **options: Any) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(rollout_state.torch, "save", save)
    with pytest.raises(OSError, match="no space left"):
        rollout_state.save(str(tmp_path), {**snapshot_of(store), "source": {"epoch": 2}}, timeout_s=1.0)
    assert rollout_state.load(str(tmp_path))["source"] == {"epoch": 1}


def test_group_of_which_the_object_store_lost_an_answer_is_saved_as_one_that_still_runs(
    tmp_path: Path, store: Store
) -> None:
    snapshot = snapshot_of(store)
    store.lost.add(snapshot["groups"][4]["payloads"][1])
    rollout_state.save(str(tmp_path), snapshot, timeout_s=1.0)
    loaded = rollout_state.load(str(tmp_path))
    assert [row[5] for row in loaded["ledger"]["live"]] == ["running", "running"]
    group = loaded["groups"][4]
    assert (group["row"], group["scored"], group["payloads"][1]) == ({"index": 40}, ["a", None], None)
    assert [row[5] for row in snapshot["ledger"]["live"]] == ["ready", "running"], "the run's own is not changed"


def test_rollout_side_of_another_version_of_the_package_is_refused_by_its_format(tmp_path: Path) -> None:
    for form in ({}, {"format": 2}):
        torch.save({"groups": {}, **form}, tmp_path / "rollout_state.pt")
        with pytest.raises(SnapshotError, match=r"reads format 1\. Resume with the version that wrote it"):
            rollout_state.load(str(tmp_path))
    torch.save({"groups": {}, "format": 1}, tmp_path / "rollout_state.pt")
    assert rollout_state.load(str(tmp_path))["groups"] == {}, "checkpoints of this format are on disks already"
