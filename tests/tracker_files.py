# SPDX-License-Identifier: Apache-2.0
"""Trackers that write to files below one folder, and readers for their files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

NAMES = ["file", "tensorboard", "mlflow", "wandb"]
BLOCK, HEADER = 32 * 1024, 7
PROJECT = "tracked"


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which all four write below ``folder`` and use no network."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"file://{folder}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "VERL_FILE_LOGGER_PATH": str(folder / "rows.jsonl"),
    }


@dataclass
class Told:
    """What one run of one tracker received: its rows by step, how it ended, and its status."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    status: Any = None

    def column(self, key: str) -> dict[int, float]:
        """Return a metric's values by step."""
        return {step: row[key] for step, row in self.rows.items() if key in row}


def all_of_one_run(folder: Path, key: str | None) -> dict[str, Told]:
    """Return what each tracker received for the only run; ``key``: a metric with a row for each step, if any."""
    (of_wandb_run,), (of_mlflow_run,) = of_wandb(folder), of_mlflow(folder, key)
    found = {"file": of_file(folder), "tensorboard": of_tensorboard(folder, key)}
    return found | {"mlflow": of_mlflow_run, "wandb": of_wandb_run}


def of_file(folder: Path) -> Told:
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    told = Told()
    for line in lines:
        if "run/ended" in line["data"]:
            told.ended = line["data"]
        else:
            assert line["step"] not in told.rows, "a row is there once"
            told.rows[line["step"]] = line["data"]
    return told


def of_tensorboard(folder: Path, key: str | None) -> Told:
    """``key``: the metric whose rows are wanted."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = events.Scalars(key) if key is not None else []
    told = Told({event.step: {str(key): event.value} for event in scalars})
    assert len(told.rows) == len(scalars), "a row is there once"
    for text in events.Tensors("run/text_summary") if "run/text_summary" in events.Tags()["tensors"] else ():
        lines = text.tensor_proto.string_val[0].decode().splitlines()
        told.ended = dict(line.removeprefix("- ").split(": ", 1) for line in lines)
    return told


def of_mlflow(folder: Path, key: str | None) -> list[Told]:
    """Return its runs, oldest first."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(f"file://{folder}/mlruns")
    experiments = [found.experiment_id for found in client.search_experiments()]
    found = []
    for run in client.search_runs(experiments, order_by=["attributes.start_time ASC"]):
        history = client.get_metric_history(run.info.run_id, key) if key is not None else []
        rows = {metric.step: {str(key): metric.value} for metric in history}
        assert len(rows) == len(history), "a row is there once"
        ended = {name: value for name, value in run.data.tags.items() if name.startswith("run/")}
        found.append(Told(rows, ended, run.info.status))
    return found


def of_wandb(folder: Path) -> list[Told]:
    """Return its runs, oldest first; the status is the exit code, or None if it was not reported."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns):
        told = Told()
        for record in _records(file):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                assert row["_step"] not in told.rows, "a row is there once"
                told.rows[row["_step"]] = row
            elif kind == "summary":
                told.ended |= {
                    item.key: json.loads(item.value_json)
                    for item in record.summary.update
                    if item.key.startswith("run/")
                }
            elif kind == "exit":
                told.status = record.exit.exit_code
        found.append(told)
    return found


def _records(file: Path) -> list[Any]:
    """Return the records of W&B's file, which has LevelDB's log format after a header of its own."""
    data, at, parts, found = file.read_bytes(), HEADER, b"", []
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found
