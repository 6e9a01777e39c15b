# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told of a run's figures; that it comes out of Ray's exporter, an end-to-end run shows."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from recipe.async_engine.record.figures import SHARE, STEP
from recipe.async_engine.trainer import figures_stage
from recipe.async_engine.trainer.figures_stage import PrometheusExporter

FIGURES = {STEP: 3, f"{SHARE}wait": 0.25, f"{SHARE}update": 0.75, "critic/score/mean": None, "actor/lr": 1.0}
ODD = {**FIGURES, "critic/score/mean": "high"}


class Gauge:
    """In place of Ray's: it keeps what it was told."""

    told: list[tuple[str, float, dict[str, str]]]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._name, self._labels = name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self._labels
        self.told.append((self._name, value, tags))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, dict[str, str]]]:
    Gauge.told = []
    monkeypatch.setattr(figures_stage, "Gauge", Gauge)
    return Gauge.told


@pytest.mark.parametrize("figures", [FIGURES, ODD])
def test_each_figure_is_told_with_its_run_and_a_share_with_its_phase(figures: dict[str, Any], told: list[Any]) -> None:
    PrometheusExporter("7").tell(figures)
    assert told == [
        ("recipe_step", 3.0, {"run": "7"}),
        ("recipe_trainer_share", 0.25, {"run": "7", "phase": "wait"}),
        ("recipe_trainer_share", 0.75, {"run": "7", "phase": "update"}),
    ]


def test_an_exporter_that_fails_is_named_once_and_ends_nothing(
    told: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: Gauge, value: float, tags: dict[str, str]) -> None:
        raise ConnectionError("no exporter")

    monkeypatch.setattr(Gauge, "set", fails)
    exporter = PrometheusExporter("mine")
    with caplog.at_level(logging.ERROR):
        exporter.tell(FIGURES)
        exporter.tell(FIGURES)
    assert len(caplog.messages) == 1
