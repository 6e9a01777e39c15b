# SPDX-License-Identifier: Apache-2.0
"""verl's trackers, of which some fail."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from recipe.async_engine.trainer.trackers import Trackers


class Unreachable:
    """A service that cannot be reached."""

    def log(self, data: dict[str, Any], step: int) -> None:
        raise ConnectionError("no route to the service")


def test_tracker_that_fails_is_named_once_and_the_others_get_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "steps.jsonl"))
    trackers = Trackers("project", "experiment", ["file"])
    trackers.logger = {"unreachable": Unreachable(), **trackers.logger}
    with caplog.at_level(logging.ERROR):
        for step in (1, 2):
            trackers.log(data={"score": 0.5}, step=step)
    trackers.log(data={"score": 0.5}, step=3, backend=["unreachable"])
    trackers.finish()
    written = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [1, 2]
    (said,) = caplog.messages
    assert "unreachable" in said and "no route to the service" in said
