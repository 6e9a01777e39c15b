# SPDX-License-Identifier: Apache-2.0
"""A run's record, and ways in which its files can be damaged, foreign or truncated."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from recipe.async_engine.core.prompt_manager import Why
from recipe.async_engine.record.event_file import COLUMNS, FORMAT, HEADER, EventFile
from recipe.async_engine.record.events import (
    EMPTY,
    GROUPS,
    RUN,
    SCHEDULER,
    TOKENS,
    TRAINER,
    TRAJECTORIES,
    WEIGHTS,
    Class,
    Event,
)

STEPS, ANSWERS = 6, 2
SETTINGS = {
    "max_staleness": 2,
    "pipeline_depth": 1.5,
    "concurrent_samples_per_replica": None,
    "trigger_parameter_sync_step": 1,
    "max_concurrent_trajectories": 4,
    "engine_places": 2,
    "max_num_seqs": 8,
    "trainer_ranks": 1,
    "rollout_replicas": 1,
    "publish": "beside",
    "at_swap": "interrupt",
    "staging": "none",
    "reward_processes": 2,
    "reward_workers": 3,
    "whole_batches": False,
}
HEADER_OF_RUN = {"accelerators": {TRAINER: 1, "rollout": 1}, "shared": False, "began": 1.7e9, "settings": SETTINGS}
SUMMARY = {
    "format": 1,
    "began": 1.7e9,
    "steps": STEPS,
    "versions": STEPS,
    "wall_seconds": 30.0,
    "error": None,
    "resumed": {"step": 0, "groups_kept": 0, "changed": []},
    "validation": {"first": 0.1, "last": 0.9},
    "staleness": {"bound": 2, "max": 1, "mean": 0.5},
    "rehearsal": {"fallbacks": ["async_training.weights.publish=inline"], "checks": []},
    "account": {"duration": 24.0, "closes": True, "tokens": {"sampled": 240, "not_known": 0}, "seconds": {}},
}
"""The summary that a run leaves, with those keys of docs/run-record.md that are read back."""


def events() -> list[Event]:
    """Return the events of six steps of four seconds, with one engine that has two places."""
    found = [Event(RUN, "lost", 5.0, 5.0, text="rollout 0"), Event(RUN, "joined", 6.0, 6.0, text="rollout 0")]
    for step in range(STEPS):
        at = 4.0 * step
        found += [
            Event(TRAINER, "wait", at, at + 2),
            Event(TRAINER, "train", at + 2, at + 2.5),
            Event(TRAINER, "update", at + 2.5, at + 3.9),
            Event(TRAINER, "sync", at + 3.9, at + 4),
            Event(SCHEDULER, Why.GENERATING, at, at + 3),
            Event(SCHEDULER, Why.GATE, at + 3, at + 4),
            Event("rollout 0", Class.PREFILL, at, at + 1, 1.0, tokens=2),
            Event("rollout 0", Class.DECODING, at + 1, at + 2, 1.0, tokens=2 * (10 + step)),
            Event("rollout 0", EMPTY, at + 2, at + 4),
            Event("agents 0", "reward", at + 2, at + 3),
            Event(RUN, "sampled", at + 4, at + 4, text="rollout 0", tokens=24 * (step + 1)),
            *(
                Event(TRAJECTORIES, "generating", at, at + 2, 1.0, step, step, n, 11, "attempt 1")
                for n in range(ANSWERS)
            ),
            *(Event(TRAJECTORIES, "reward", at + 2, at + 3, 1.0, step, step, n) for n in range(ANSWERS)),
            Event(GROUPS, "ready", at + 3, at + 4, 1.0, step, step),
            Event(GROUPS, "trained", at, at + 4, 1.0, step, step, None, 22),
            Event(TOKENS, "1", at + 2, at + 2, version=step, tokens=22),
            *(Event(WEIGHTS, what, at + 3.5, at + 4, version=step + 1) for what in ("stage", "swap", "resume")),
        ]
    return found


def write_run(folder: Path) -> None:
    """Write the record of a run that ended well."""
    folder.mkdir(parents=True, exist_ok=True)
    file, rows = EventFile(folder, HEADER_OF_RUN), events()
    for at in range(0, len(rows), 40):
        file.write(rows[at : at + 40])
    file.close()
    lines = [
        {
            "training/global_step": step + 1,
            "wall_seconds": 4.0 * step,
            "critic/rewards/mean": 0.5,
            "critic/score/mean": None,
            "prompt_length/mean": 12.0,
            "fully_async/sampled_tokens": 22,
            "fully_async/staleness/token_mean": 1.0,
            "fully_async/trainer/share/wait": 0.5,
            "val-core/task/mean@1": 0.25,
            "timing_s/step": 4.0,
        }
        for step in range(STEPS)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    # The lock is free, and this machine was the last to hold it, so the run is over.
    (folder / "run.lock").write_text(f"process 1 on {socket.gethostname()}, since then\n")


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    0.0,
    -0.5,
    10**19,
    10**400,
    2**63 - 1,
    1e308,
    -1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    "text",
    "²",
    "0",
    "\ud800",
    [],
    {},
    [1, [2]],
    {"step": 3},
    "deep",
    "long",
]


def odd(draw: random.Random) -> Any:
    """Return a value of another type than the one that belongs there."""
    value = draw.choice(ODD)
    if value == "deep":
        return Raw("[" * 3000 + "]" * 3000)
    return "x" * 100_000 if value == "long" else value


class Raw:
    """A piece of JSON that is written unchanged."""

    def __init__(self, text: str) -> None:
        self.text = text


def as_json(content: Any) -> str:
    """Return the content as JSON, however deeply nested."""
    pieces: dict[str, str] = {}

    def place(value: Raw) -> str:
        pieces[name := f"@{len(pieces)}@"] = value.text
        return name

    text = json.dumps(content, default=place)
    for name, piece in pieces.items():
        text = text.replace(f'"{name}"', piece)
    return text


def changed(content: Any, draw: random.Random) -> Any:
    """Return the content with a part removed, replaced or added."""
    if isinstance(content, dict) and content and draw.random() < 0.9:
        key = draw.choice(list(content))
        what = draw.random()
        if what < 0.25:
            return {name: value for name, value in content.items() if name != key}
        if what < 0.3:
            return {**content, str(odd(draw))[:50]: odd(draw)}
        return {**content, key: changed(content[key], draw)}
    return odd(draw)


def bytes_of(file: Path, draw: random.Random) -> None:
    """Change, add or remove bytes."""
    content = bytearray(file.read_bytes())
    how, at = draw.randrange(5), draw.randrange(len(content))
    if how == 0:
        del content[at:]
    elif how == 1:
        for _ in range(draw.choice([1, 4, 40])):
            content[draw.randrange(len(content))] = draw.randrange(256)
    elif how == 2:
        content[at : at + 200] = bytes(200)
    elif how == 3:
        content[at:at] = draw.randbytes(draw.choice([1, 30]))
    else:
        del content[at : at + draw.choice([1, 30])]
    file.write_bytes(content)


def write_rows(file: Path, rows: list[list[Any]], header: Any, schema: pa.Schema = COLUMNS, version: str = "1") -> None:
    """Write a record of these rows."""
    metadata = {FORMAT: version.encode(), HEADER: as_json(header).encode(errors="surrogatepass")}
    arrays = [pa.array(column, type=field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
    with pa.ipc.new_stream(str(file), schema.with_metadata(metadata)) as stream:
        stream.write_batch(pa.record_batch(arrays, schema=schema.with_metadata(metadata)))


FLOATS = [float("nan"), float("inf"), -1e300, 1e300, -5.0, 0.0, 1e8, 1e-300, None]
WHOLE = {"version": 2**31 - 1, "trajectory": 2**31 - 1, "group": 2**63 - 1, "tokens": 2**63 - 1}
TEXTS = ["", "²", "rollout ²", "rollout 1", "trainer", "log-probs 7", "begins", "generating", "deep" * 9999, None]


def events_of_run(file: Path, draw: random.Random) -> None:
    """Write rows with other values, missing rows, another schema, or another version."""
    rows: list[list[Any]] = [list(event) for event in events()]
    how = draw.randrange(8)
    if how == 0:
        lane = draw.choice(rows)[0]
        rows = [row for row in rows if row[0] != lane] if draw.random() < 0.7 else rows[: draw.randrange(1, len(rows))]
    elif how == 1:
        names = draw.sample(COLUMNS.names, 9)
        schema = pa.schema([COLUMNS.field(name) for name in names])
        places = [COLUMNS.names.index(name) for name in names]
        write_rows(file, [[row[at] for at in places] for row in rows], HEADER_OF_RUN, schema)
        return
    elif how == 2:
        write_rows(file, rows, HEADER_OF_RUN, version=draw.choice(["2", "", "x", "1.0"]))
        return
    else:
        column = draw.randrange(len(COLUMNS))
        name = COLUMNS.names[column]
        for row in draw.sample(rows, draw.choice([1, 3, len(rows)])):
            if name in ("start", "end", "share"):
                row[column] = draw.choice(FLOATS)
            elif name in WHOLE:
                row[column] = draw.choice([-1, 0, 1, WHOLE[name], None])
            else:
                row[column] = draw.choice(TEXTS)
    write_rows(file, rows, HEADER_OF_RUN)


def header_of_run(file: Path, draw: random.Random) -> None:
    """Write a header with damaged content."""
    write_rows(file, [list(event) for event in events()], changed(HEADER_OF_RUN, draw))


def json_of(file: Path, draw: random.Random) -> None:
    """Damage the JSON of a file, in one line or, for metrics, in several."""
    lines = file.read_text().splitlines()
    for at in draw.sample(range(len(lines)), draw.randrange(1, len(lines) + 1)):
        lines[at] = as_json(changed(json.loads(lines[at]), draw))
    file.write_text("\n".join(lines) + "\n")


def gone(file: Path, draw: random.Random) -> None:
    """Remove the file, empty it, or put a folder in its place."""
    file.unlink()
    how = draw.randrange(3)
    if how == 1:
        file.touch()
    elif how == 2:
        file.mkdir()


Damage = Callable[[Path, random.Random], None]
OF_RECORD: list[tuple[str, Damage]] = [
    ("events/0000.arrow", bytes_of),
    ("events/0000.arrow", events_of_run),
    ("events/0000.arrow", events_of_run),
    ("events/0000.arrow", header_of_run),
    ("events/0000.arrow", header_of_run),
    ("events/0000.arrow", gone),
    ("metrics.jsonl", bytes_of),
    ("metrics.jsonl", json_of),
    ("metrics.jsonl", gone),
    ("summary.json", bytes_of),
    ("summary.json", json_of),
    ("summary.json", json_of),
    ("summary.json", gone),
]


def damage_record(folder: Path, draw: random.Random) -> list[str]:
    """Damage one to three files of a run's folder; return what was done."""
    chosen = dict(draw.sample(OF_RECORD, draw.choice([1, 1, 2, 3])))
    for name, damage in chosen.items():
        damage(folder / name, draw)
    return [f"{damage.__name__} {name}" for name, damage in chosen.items()]


def tracker_of(file: Path, draw: random.Random) -> None:
    """Write something else into verl's tracker."""
    file.write_text(draw.choice(["", "x", "-4", "4.0", "\u00b2", "9" * 5000, "99", "2", "0", "4\n4", "null"]))


def part_of(content: Any, draw: random.Random) -> Any:
    """Return a Python object with a part removed, replaced or added."""
    if isinstance(content, dict) and content and draw.random() < 0.9:
        return changed_dict(content, draw)
    if isinstance(content, list) and content and draw.random() < 0.8:
        at = draw.randrange(len(content))
        whats = [content[:at], content[at:], [*content, content[at]], [*content, odd_object(draw)]]
        whats += [[*content[:at], part_of(content[at], draw), *content[at + 1 :]]] * 4
        return draw.choice(whats)
    return odd_object(draw)


def changed_dict(content: dict[Any, Any], draw: random.Random) -> dict[Any, Any]:
    key, what = draw.choice(list(content)), draw.random()
    if what < 0.2:
        return {name: value for name, value in content.items() if name != key}
    if what < 0.3:
        return {**content, draw.choice(["more", 7, None, 10**30]): odd_object(draw)}
    return {**content, key: part_of(content[key], draw)}


def odd_object(draw: random.Random) -> Any:
    """Return a value of another type, as a pickle can contain it."""
    more: list[Any] = [b"", b"bytes", object, (1, 2), {1: 2}, {"a"}, 1 + 2j, torch.zeros(2), np.zeros(2)]
    return draw.choice([*more, *(value for value in ODD if value not in ("deep", "long")), *[-1, 1, 2, 3]])
