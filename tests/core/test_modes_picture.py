# SPDX-License-Identifier: Apache-2.0
"""The README's picture of the modes: what tools/modes_picture.py draws of a record's spans."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from mode_runs import MODES, SYNC, TRAIN, Mode, Span, answers, training
from modes_picture import COLOURS, draw, lanes

CHECKOUT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
STEPS = [
    {"began": 0.0, "ended": 1.0, "version": 0, "answers": ["a", "b"]},
    {"began": 1.0, "ended": 2.0, "version": 0, "answers": ["a"]},
    {"began": 3.0, "ended": 4.0, "version": 1, "answers": ["a", "c"]},
]
PARTS = [Span("a", 0, 0.0, 2.0), Span("b", 0, 0.0, 1.0), Span("a", 1, 3.0, 4.0), Span("c", 1, 3.0, 4.0)]


def coloured(picture: str) -> Counter[str]:
    """How many rectangles of each version's colour."""
    fills = [rect.get("fill", "") for rect in ElementTree.fromstring(picture).iter(SVG + "rect")]
    return Counter(fill for fill in fills if fill in COLOURS)


def bars(mode: Mode, spans: list[Span]) -> Counter[str]:
    """The same, without the legend."""
    return coloured(draw([(mode, spans)])) - coloured(draw([(mode, [])]))


def test_an_answer_has_a_part_for_each_version_that_sampled_it() -> None:
    assert answers(STEPS) == PARTS


def test_an_answer_keeps_its_lane_and_a_lane_has_one_answer_at_a_time() -> None:
    assert lanes(PARTS) == {"b": 0, "a": 1, "c": 0}


def test_the_trainer_works_between_its_wait_for_a_batch_and_its_weight_sync() -> None:
    step = {
        "wall_seconds": 10.0,
        "timing_s/step": 8.0,
        "timing_s/gen": 3.0,
        "timing_s/update_weights": 2.0,
        "fully_async/weight_sync/seconds": 0.5,
        "fully_async/count/current_param_version": 4,
    }
    assert training([step], origin=100.0) == [Span(TRAIN, 4, 105.0, 108.0), Span(SYNC, 4, 109.5, 110.0)]


def test_each_part_is_a_bar_in_the_colour_of_its_version() -> None:
    separate, shared = MODES[0], MODES[-1]
    assert shared.shared
    trainer = [Span(TRAIN, 1, 2.0, 3.0), Span(SYNC, 1, 3.0, 3.1)]
    assert bars(separate, PARTS + trainer) == {COLOURS[0]: 2, COLOURS[1]: 3}
    # Where the devices are shared, the trainer's turn covers the slots too.
    assert bars(shared, PARTS + trainer) == {COLOURS[0]: 2, COLOURS[1]: 4}


def test_what_comes_after_the_end_of_the_time_axis_is_left_out() -> None:
    assert not bars(MODES[0], [Span("a", 0, 1000.0, 1001.0), Span(TRAIN, 1, 1001.0, 1002.0)])


def test_the_picture_in_the_documents_is_small_and_says_what_it_shows() -> None:
    file = CHECKOUT / "docs" / "modes.svg"
    root = ElementTree.fromstring(file.read_text())
    assert file.stat().st_size < 60_000
    assert root.findtext(SVG + "title") and root.findtext(SVG + "desc")
    assert len(coloured(file.read_text())) == len(COLOURS)
