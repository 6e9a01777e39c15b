# SPDX-License-Identifier: Apache-2.0
"""What a main hands Ray for profiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.async_engine.run import ray_start
from recipe.async_engine.run.ray_start import under_nsight, write_timeline

OPTIONS = {"trace": "cuda,nvtx", "cuda-graph-trace": "graph"}


def config(device: str = "cuda", tool: str | None = "nsys", steps: Any = (1,)) -> Any:
    return OmegaConf.create(
        {
            "trainer": {"device": device},
            "global_profiler": {
                "tool": tool,
                "steps": list(steps) if steps else steps,
                "global_tool_config": {"nsys": {"controller_nsight_options": OPTIONS}},
            },
        }
    )


def test_trainers_process_runs_under_nsight_where_stocks_would() -> None:
    assert under_nsight(config()) == {"runtime_env": {"nsight": OPTIONS}}
    for other in (config(device="cpu"), config(tool="torch"), config(tool=None), config(steps=None), config(steps=())):
        assert under_nsight(other) == {}


def test_timeline_is_written_where_it_is_asked_for_and_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[str] = []

    class Ray:
        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def timeline(filename: str) -> None:
            written.append(filename)
            raise OSError("no space left on device")

    monkeypatch.setattr(ray_start, "ray", Ray)
    write_timeline(OmegaConf.create({"ray_kwargs": {"timeline_json_file": None}}))
    assert written == []
    write_timeline(OmegaConf.create({"ray_kwargs": {"timeline_json_file": str(tmp_path / "timeline.json")}}))
    assert written == [str(tmp_path / "timeline.json")] and "no space left" in caplog.text
