# SPDX-License-Identifier: Apache-2.0
"""The figures of a run in words, as metrics, and on Grafana's board."""

from __future__ import annotations

import json
import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.alarms import Alarms
from recipe.async_engine.record.figures import (
    EXPORTED,
    ROLLOUT_DOES,
    SHARE,
    TRAINER_DOES,
    TRAINER_SHARE,
    percent,
    sides,
)
from recipe.async_engine.record.timeline import Timeline

REPOSITORY = Path(__file__).parents[2]
FIGURES = {
    TRAINER_DOES: "update",
    f"{SHARE}update": 0.5,
    f"{SHARE}wait": 0.3,
    f"{SHARE}sync": 0.2,
    "training/global_step": 12,
    "fully_async/count/current_param_version": 6,
    ROLLOUT_DOES: "gate",
    "fully_async/rollouter/generating_trajectories": 14,
    "fully_async/rollouter/slots": 16,
    "fully_async/rollouter/occupancy": 0.83,
    "fully_async/rollouter/idle_share": 0.05,
    "fully_async/rollouter/groups_running": 3,
    "fully_async/rollouter/groups_ready": 2,
    "fully_async/rewards/scoring": 4,
    "fully_async/count/announced_version": 5,
    "fully_async/count/live_replicas": 2,
    "model_engine_server/servers": 1,
    "model_engine_server/waiting": 7,
    "fully_async/staleness/token_mean": 0.75,
    "fully_async/staleness/oldest_token_max": 1.0,
    "fully_async/staleness/bound": 1,
}


def test_each_side_has_a_line_with_what_it_does_its_shares_queue_slots_version_and_staleness() -> None:
    assert sides(FIGURES) == [
        ("trainer", "update; update 50%, wait 30%, sync 20%; step 12; version 6"),
        ("rollout", "gate; 14 of 16 slots; busy 83%, idle 5%; 3 groups run, 2 ready, 4 rewards; version 5; 2 replicas"),
        ("log-probs", "1 servers; 7 answers wait"),
        ("staleness", "mean 0.75; oldest 1; bound 1"),
    ]
    assert sides({TRAINER_DOES: "start_up"}) == [("trainer", "start_up")]
    assert sides({}) == []


def test_the_four_largest_shares_are_said_and_none_that_rounds_to_nothing() -> None:
    def said(**shares: float) -> str:
        return dict(sides({f"{SHARE}{phase}": share for phase, share in shares.items()}))["trainer"]

    assert said(a=0.4, b=0.25, c=0.2, d=0.1, e=0.05) == "a 40%, b 25%, c 20%, d 10%"
    assert said(a=0.995, b=0.005) == "a 100%, b 1%"
    assert said(a=0.994, b=0.006) == "a 99%, b 1%"
    assert said(a=0.996, b=0.004) == "a 100%"


@given(share=st.integers(0, 10_000).map(lambda parts: parts / 10_000) | st.floats(0, 1))
def test_a_share_is_the_nearest_whole_percent_a_half_is_the_larger_one_and_what_is_said_is_not_0(share: float) -> None:
    exact = Decimal(repr(share)) * 100
    said = percent(share)
    # Beyond what a double can say of a hundredth of a percent.
    if abs(exact % 1 - Decimal("0.5")) > Decimal("1e-8") or exact % 1 == Decimal("0.5"):
        assert said == f"{exact.quantize(Decimal(1), ROUND_HALF_UP)}%"
    trainer = dict(sides({f"{SHARE}a": share})).get("trainer", "")
    rollout = dict(sides({"fully_async/rollouter/occupancy": share}))["rollout"]
    assert (trainer, rollout) == (f"a {said}" if said != "0%" else "", f"busy {said}")


def test_alarms_that_rang_are_said_and_no_others() -> None:
    alarms = Alarms({})
    assert "alarms" not in dict(sides(alarms.metrics()))
    alarms.note("skipped_updates", True)
    alarms.note("unchanged_weights", True)
    alarms.note("uniform_rewards", True)
    assert dict(sides(alarms.metrics()))["alarms"] == "skipped_updates 1, unchanged_weights 1"


def test_every_metric_has_its_row_in_the_documentation_and_its_place_on_the_board() -> None:
    documented = (REPOSITORY / "docs/metrics.md").read_text() + (REPOSITORY / "docs/model-engine-server.md").read_text()
    for key in EXPORTED:
        assert key.rpartition("/")[2] in documented, key
    board = json.loads((REPOSITORY / "docs/grafana.json").read_text())
    exported = {f"ray_{metric.name}" for metric in [*EXPORTED.values(), TRAINER_SHARE]}
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) > 10
    for query in asked:
        named = re.findall(r"ray_recipe_\w+", query)
        assert named and set(named) <= exported, query
    assert {name for query in asked for name in re.findall(r"ray_recipe_\w+", query)} == exported
    assert len({metric.name for metric in EXPORTED.values()}) == len(EXPORTED)


def test_shares_at_a_glance_are_the_shares_and_change_nothing() -> None:
    now = [0.0]
    timeline = Timeline(lambda: now[0])
    assert timeline.doing == "start_up"
    now[0] = 5.0
    timeline.restart()
    with timeline.phase("wait"):
        now[0] = 8.0
        assert (timeline.doing, timeline.shares()) == ("wait", {"wait": 1.0})
        now[0] = 9.0
    with timeline.phase("update"):
        now[0] = 10.0
        assert timeline.shares() == timeline.shares() == {"wait": 0.8, "update": 0.2}
        assert timeline.shares() == {"wait": 0.8, "update": 0.2}
