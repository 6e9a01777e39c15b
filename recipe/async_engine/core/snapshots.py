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
"""Whether a ledger can be restored from a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipe.async_engine.core.errors import SnapshotError
from recipe.async_engine.core.gate import GateSettings

SNAPSHOT_FORMAT = 3


def check_restorable(snapshot: Mapping[str, Any], settings: GateSettings, whole_batches: bool) -> None:
    """Raise `SnapshotError` unless a run with these settings can go on from this snapshot."""
    if snapshot.get("format") != SNAPSHOT_FORMAT:
        raise SnapshotError(f"snapshot format {snapshot.get('format')!r}, this version reads {SNAPSHOT_FORMAT}")
    for name in ("batch_groups", "batches_per_version"):
        if snapshot[name] != getattr(settings, name):
            raise SnapshotError(
                f"{name} = {getattr(settings, name)}, but the checkpoint was made with {snapshot[name]}: "
                "resume with the same value, or start a new run from its weights"
            )
    if snapshot["whole_batches"] != whole_batches:
        raise SnapshotError(
            f"whole_batches = {whole_batches}, but the checkpoint was made with {snapshot['whole_batches']}: resume in "
            "the mode that wrote it, or start a new run from its weights"
        )
