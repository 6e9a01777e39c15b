# SPDX-License-Identifier: Apache-2.0
"""Types of the files in a run's folder. Every file is validated against its type when it is read.

Contract: an invalid file is refused with `BadFile`, whose message names the file. If only an optional part is invalid,
that part is left out, and a note says so. Numbers are finite and bounded, so code that computes with them needs no
checks. A file with another format version is refused with a message that says so. Shown by
tests/integration/test_damaged_files.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict

FORMAT = 1
"""Format version of summaries and checkpoint markers. Older files that do not name a version have this one."""
LIMIT = 1e9
"""Largest allowed number of seconds in a run's files, and largest absolute value of a score."""
MOST = 1_000_000
TOO_LARGE = 1e100
"""A number whose absolute value is at least this is left out of the metrics."""
SHOWN = 3

Finite = Annotated[float, Field(allow_inf_nan=False, ge=-LIMIT, le=LIMIT)]
Seconds = Annotated[float, Field(allow_inf_nan=False, ge=0, le=LIMIT)]
Moment = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e11)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Some = Annotated[int, Field(ge=1, le=MOST)]
Long = Annotated[int, Field(ge=-(2**53), le=2**53)]
Format = Annotated[int, Field(ge=FORMAT, le=FORMAT)]


class BadFile(ValueError):
    """A file in a run's folder cannot be used. The message names the file and what is wrong with it."""


class OtherFormat(BadFile):
    """A file has a format version that this package does not read."""


class Settings(TypedDict, total=False):
    """The settings that an event record contains; advice and plans for later runs use them."""

    max_staleness: Count
    pipeline_depth: Annotated[float, Field(allow_inf_nan=False, ge=0, le=MOST)]
    concurrent_samples_per_replica: Some | None
    trigger_parameter_sync_step: Some
    max_concurrent_trajectories: Some
    engine_places: Some
    max_num_seqs: Some | None
    trainer_ranks: Some
    rollout_replicas: Count
    publish: Literal["beside", "inline"]
    at_swap: Literal["drain", "interrupt", "keep"]
    staging: str
    reward_processes: Annotated[int, Field(ge=0, le=4096)]
    reward_workers: Annotated[int, Field(ge=1, le=4096)] | None
    whole_batches: bool


class Header(BaseModel):
    """The header of an event record: the fields of `events.Devices`, the start in seconds since 1970, and settings."""

    accelerators: dict[str, Count]
    shared: bool
    hybrid: Count = 0
    began: Moment
    settings: Settings = {}


class Failure(TypedDict, total=False):
    name: str
    message: str


class AccountSummary(TypedDict, total=False):
    duration: Seconds
    closes: bool
    tokens: dict[str, Long] | None


class Resumed(TypedDict, total=False):
    step: Long


class Validated(TypedDict, total=False):
    first: Finite | None
    last: Finite | None


class Staleness(TypedDict, total=False):
    max: Long
    mean: Annotated[float, Field(allow_inf_nan=False, ge=0, le=MOST)]


class Rehearsal(TypedDict, total=False):
    fallbacks: list[str]


class Alarm(TypedDict):
    count: Long
    unit: str
    said: str


class Summary(TypedDict, total=False):
    """The keys of ``summary.json`` that this package reads. docs/run-record.md gives the meaning of each key."""

    format: Long
    began: Moment
    ended: str | None
    alarms: dict[str, Alarm]
    steps: Long
    versions: Long
    wall_seconds: Seconds | None
    error: Failure | None
    account: AccountSummary | None
    resumed: Resumed | None
    validation: Validated | None
    staleness: Staleness | None
    rehearsal: Rehearsal | None


def _inside(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError("the path leads out of the checkpoint's folder")
    return name


FileSize = tuple[Annotated[int, Field(ge=0)], str | None]


class Marker(BaseModel):
    """The marker of a complete checkpoint: it lists every file with its size, and small files with their digests."""

    format: Format = FORMAT
    step: Annotated[int, Field(ge=0)]
    files: dict[Annotated[str, AfterValidator(_inside)], FileSize]


T = TypeVar("T")
HEADERS, SUMMARIES = TypeAdapter(Header), TypeAdapter(Summary)
Metrics = dict[str, Any]


def said(error: ValidationError) -> str:
    """Return one line with the first `SHOWN` validation errors, each with its location in the file."""
    found = [f"{'.'.join(map(str, each['loc'])) or 'it'}: {each['msg']}" for each in error.errors()]
    return "; ".join([*found[:SHOWN], *([f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else [])])


def sound_part(adapter: TypeAdapter[T], content: Any, what: str) -> tuple[T, list[str]]:
    """Return the content without its invalid optional parts, and a note on each part that was left out.

    Invalid parts are removed from ``content`` in place. ``what`` names the file in messages.

    Raises:
        BadFile: a required part is missing or invalid.
    """
    notes: list[str] = []
    while True:
        try:
            return adapter.validate_python(content, strict=True), [f"{what}: left out, {note}" for note in notes]
        except ValidationError as error:
            notes.append(said(error))
            for each in error.errors():
                if not _left_out(content, each["loc"]):
                    raise BadFile(f"{what} cannot be read: {'; '.join(notes)}") from None


def _left_out(content: Any, place: tuple[Any, ...]) -> bool:
    """Remove from ``content`` the entry at ``place``, the location of a validation error.

    If ``place`` goes on below the entries of ``content``, the last entry on the way is removed. Return False if
    ``content`` has no entry on the way to ``place``.
    """
    parent: dict[Any, Any] = {}
    last = None
    for key in place:
        if not (isinstance(content, dict) and key in content):
            break
        parent, last, content = content, key, content[key]
    return parent.pop(last, parent) is not parent


def header_of(content: Mapping[str, Any], what: str) -> tuple[Header, list[str]]:
    """Return an event record's header without its invalid settings, and notes on those that were left out.

    ``what`` names the file in notes and errors.

    Raises:
        BadFile: a required field of the header is missing or invalid.
    """
    return sound_part(HEADERS, content, what)


def summary_in(folder: Path) -> tuple[Summary | None, list[str]]:
    """Return a run's summary (None if the file is missing or cannot be read), and notes on what is wrong with it."""
    file = folder / "summary.json"
    try:
        found, notes = sound_part(SUMMARIES, from_json(file.read_bytes()), str(file))
    except FileNotFoundError:
        return None, []
    except BadFile as error:
        return None, [f"{error}; it is left out"]
    except (OSError, ValueError) as error:
        return None, [f"{file} cannot be read, and is left out: {error}"]
    if found.get("format", FORMAT) != FORMAT:
        return None, [f"{file} is of format {found['format']}, this package reads {FORMAT}: it is left out"]
    return found, notes


def metrics_in(folder: Path) -> tuple[list[Metrics], list[str]]:
    """Return the metrics of each step in ``metrics.jsonl``, and notes on lines and values that were left out."""
    file = folder / "metrics.jsonl"
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{file} cannot be read, and is left out: {error}"]
    return steps_of(lines, str(file))


def steps_of(lines: Iterable[bytes], what: str) -> tuple[list[Metrics], list[str]]:
    """Return the metrics of each step in the lines of ``metrics.jsonl``, and notes on what was left out.

    ``what`` names the file in notes. An incomplete last line gets no note: the run is still writing it, or was killed.
    """
    found, bad, values = [], 0, 0
    for line in lines:
        try:
            content = from_json(line)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            bad += line.endswith(b"\n") and bool(line.strip())
            continue
        step = {key: value for key, value in content.items() if _is_metric(value)}
        values += len(content) - len(step)
        found.append(step)
    notes = [f"{what}: {bad} lines are no steps, and are left out"] if bad else []
    return found, notes + ([f"{what}: {values} values are no numbers, and are left out"] if values else [])


def _is_metric(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        return False
    return value is None or (abs(value) < TOO_LARGE and math.isfinite(value))


def marker_in(folder: Path, name: str) -> Marker:
    """Read ``name``, the file that marks the checkpoint in ``folder`` as complete, and return its content.

    Raises:
        FileNotFoundError: the checkpoint has no marker.
        BadFile: the marker is invalid. The message does not name the checkpoint's folder.
    """
    try:
        return Marker.model_validate_json((folder / name).read_bytes(), strict=True)
    except FileNotFoundError:
        raise
    except ValidationError as error:
        raise BadFile(f"the checkpoint's {name} cannot be read ({said(error)})") from None
    except OSError as error:
        raise BadFile(f"the checkpoint's {name} cannot be read ({error})") from None


def unsaid(settings: Mapping[str, Any], but: Iterable[str] = ()) -> list[str]:
    """Return the names in `Settings` that ``settings``, read from an event record, lacks, except those in ``but``."""
    return [name for name in Settings.__annotations__ if name not in settings and name not in but]
