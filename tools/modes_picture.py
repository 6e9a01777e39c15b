# SPDX-License-Identifier: Apache-2.0
"""Draws the modes as lanes over time, coloured by policy version, from records of real runs (`mode_runs`).

    python tools/modes_picture.py runs/modes docs/modes.svg

A mode without a record in the first path is run first, which takes a minute or two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from mode_runs import BATCH, DECODE_S, MODES, SLOTS, SYNC, TRAIN, UPDATE_S, Mode, Span, read, run

SECONDS = 30.0


def lanes(parts: list[Span]) -> dict[str, int]:
    """Return a lane for each answer, reserved from its first token to its last."""
    whole: dict[str, tuple[float, float]] = {}
    for part in parts:
        began, ended = whole.get(part.what, (part.began, part.ended))
        whole[part.what] = min(began, part.began), max(ended, part.ended)
    free: list[float] = []
    lane_of = {}
    for name, (began, ended) in sorted(whole.items(), key=lambda item: item[1]):
        lane = next((lane for lane, since in enumerate(free) if since <= began), len(free))
        free[lane : lane + 1] = [ended]
        lane_of[name] = lane
    return lane_of


# Sizes in points. A band has a line of text, the trainer's lane and the slots' lanes.
WIDTH, LEFT, RIGHT, TOP, TEXT, TRAINER, LANE, GAP = 900, 62, 20, 6, 20, 16, 7, 14
SLOTS_TOP, SLOTS_HEIGHT = TEXT + TRAINER + 4, SLOTS * LANE
BAND = SLOTS_TOP + SLOTS_HEIGHT + GAP
COLOURS = ("#005a9c", "#cf7a00", "#008f66", "#b3508a", "#3595d1", "#bf4500")
SEAM = 1.0
INK, GREY, FAINT = "#24292f", "#8c959f", "#d8dee4"
SIZE, BOLD, MIDDLE, END = ' font-size="13"', ' font-weight="bold"', ' text-anchor="middle"', ' text-anchor="end"'
WHITE, FADED, TURN = ' fill="#fff"', ' opacity="0.6"', ' opacity="0.15"'


def x(seconds: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(seconds, 0.0), SECONDS) / SECONDS


def rectangle(left: float, right: float, top: float, height: float, fill: str, rest: str = "") -> str:
    return f'<rect x="{left:.1f}" y="{top:g}" width="{right - left:.1f}" height="{height:g}" fill="{fill}"{rest}/>'


def text(left: float, base: float, words: str, rest: str = "") -> str:
    return f'<text x="{left:.1f}" y="{base:g}"{rest}>{words}</text>'


def colour(version: int) -> str:
    return COLOURS[version % len(COLOURS)]


def trainer_bars(mode: Mode, spans: list[Span], top: float) -> Iterator[str]:
    """Yield updates and weight syncs; on shared devices an update covers the slots too."""
    for span in spans:
        left, right = x(span.began), x(span.ended)
        if span.what == SYNC:
            yield rectangle(left, max(right, left + 1.5), top + TEXT, BAND - TEXT - GAP - 1, GREY, FADED)
            continue
        if mode.shared:
            yield rectangle(left, right, top + SLOTS_TOP, SLOTS_HEIGHT - 1, colour(span.version), TURN)
        yield rectangle(left, right, top + TEXT, TRAINER, colour(span.version))
        if right - left > 20:
            yield text((left + right) / 2, top + TEXT + 12, f"v{span.version}", MIDDLE + BOLD + WHITE)


def answer_bars(parts: list[Span], top: float) -> Iterator[str]:
    """Yield answers in their lanes, with a line between the parts of each."""
    lane_of, last = lanes(parts), {}
    for part in sorted(parts, key=lambda part: part.began):
        above = top + SLOTS_TOP + lane_of[part.what] * LANE
        left, right = x(part.began), x(part.ended)
        if last.get(part.what, left) < left:
            yield rectangle(last[part.what], left, above + 2, 2, GREY)
        if part.began < SECONDS:
            yield rectangle(left, max(left + 1, right - SEAM), above, LANE - 1, colour(part.version))
        last[part.what] = right


def band(mode: Mode, spans: list[Span], top: float) -> Iterator[str]:
    """Yield one mode: the trainer's lane, and below it the slots."""
    trainer = [span for span in spans if span.what in (TRAIN, SYNC)]
    yield text(LEFT, top + 14, f"<tspan{BOLD}>{mode.name}</tspan>: {mode.says}", SIZE)
    yield text(LEFT - 6, top + TEXT + 12, "trainer", END)
    yield text(LEFT - 6, top + SLOTS_TOP + SLOTS_HEIGHT / 2 + 4, "rollout", END)
    yield from trainer_bars(mode, [span for span in trainer if span.began < SECONDS], top)
    yield from answer_bars([span for span in spans if span not in trainer], top)


def axis(bottom: float) -> Iterator[str]:
    for second in range(0, int(SECONDS) + 1, 5):
        yield f'<path d="M{x(second):.1f} {TOP + TEXT}V{bottom - 6}" stroke="{FAINT}"/>'
        yield text(x(second), bottom + 8, f"{second} s", MIDDLE)


def legend(top: float) -> Iterator[str]:
    width, second, third = 24, top + 18, top + 36
    for version in range(len(COLOURS)):
        left = LEFT + version * width
        yield rectangle(left, left + width - 2, top, 12, colour(version))
        yield text(left + width / 2 - 1, top + 10, f"v{version}", MIDDLE + BOLD + WHITE + ' font-size="10"')
    words = "policy version (colours repeat): the trainer's bar makes it, an answer's bar is sampled by it"
    yield text(LEFT + len(COLOURS) * width + 4, top + 10, words)
    yield rectangle(LEFT, LEFT + 4, second, 12, GREY, FADED)
    yield text(LEFT + 10, second + 10, "weight sync")
    yield rectangle(LEFT + 100, LEFT + 122, second + 5, 2, GREY)
    yield text(LEFT + 128, second + 10, "an unfinished answer waits")
    yield rectangle(LEFT + 310, LEFT + 332, second, 12, COLOURS[1], TURN)
    yield text(LEFT + 338, second + 10, "the trainer's turn on the shared devices")
    yield text(LEFT + 590, second + 10, "white: idle")
    words = (
        f"Real runs on two CPU cores: a decode step takes {DECODE_S:g} s and an update {UPDATE_S:g} s, mostly waiting; "
        f"batches of {BATCH} answers"
    )
    yield text(LEFT, third + 10, words)


def draw(bands: list[tuple[Mode, list[Span]]]) -> str:
    """Return the picture as SVG with a background of its own."""
    bottom = TOP + len(bands) * BAND
    says = "; ".join(f"{mode.name}: {mode.says}" for mode, _ in bands)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 76}" width="{WIDTH}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}" role="img">',
        "<title>Trainer and rollout over time, by mode</title>",
        f"<desc>Lanes over time, coloured by policy version. {says}.</desc>",
        '<rect width="100%" height="100%" rx="6" fill="#fff"/>',
        *axis(bottom),
        *(line for number, (mode, spans) in enumerate(bands) for line in band(mode, spans, TOP + number * BAND)),
        *legend(bottom + 18),
        "</svg>",
    ]
    return "\n".join(drawn) + "\n"


def main(folder: Path, target: Path) -> None:
    for mode in MODES:
        if not (mode.folder(folder) / "began").exists():
            run(mode, mode.folder(folder))
    target.write_text(draw([(mode, read(mode.folder(folder))) for mode in MODES]))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
