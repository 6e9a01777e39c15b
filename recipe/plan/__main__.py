# SPDX-License-Identifier: Apache-2.0
"""``python -m recipe.plan RUN --accelerators N`` prints the best splits between trainer and rollout (docs/plan.md)."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from recipe.async_engine.config.sections import ELASTIC
from recipe.async_engine.record.event_file import files
from recipe.async_engine.record.schema import BadFile
from recipe.plan.advise import PER_NODE, Advice, advise, most_staleness
from recipe.plan.device import PROFILES, DeviceTimes
from recipe.plan.memory.shape import shape_of
from recipe.plan.simulation import Scenario
from recipe.plan.times import CannotPlan, Times, estimated, fitted, group_size, scorers, steps_trained
from recipe.report.run import Run, about, lacking

NOT_LENT = (
    "candidates that lend the trainer's accelerators are left out, because the run has not measured a switch; "
    "record one with async_training.placement=elastic to compare them"
)
SHOWN = 8
WIDEST = 10.0


def of_run(run: Run, steps: int) -> Scenario:
    """Return a scenario, to be simulated for ``steps`` steps, with the settings of a recorded run."""
    said = run.settings
    replicas = max(1, said["rollout_replicas"])
    return Scenario(
        batch_groups=max(1, round(len(about(run.groups, "trained")) / steps_trained(run))),
        answers=group_size(run),
        replicas=replicas,
        slots=said["max_concurrent_trajectories"] // replicas,
        places=said["engine_places"] // replicas,
        max_staleness=said["max_staleness"],
        pipeline_depth=said["pipeline_depth"],
        batches_per_version=said["trigger_parameter_sync_step"],
        whole_batches=said["whole_batches"],
        shared=run.devices.shared,
        lends=run.devices.hybrid > 0,
        at_swap=said["at_swap"],
        reward_processes=scorers(run),
        beside=said["publish"] == "beside",
        steps=steps,
        trainer_ranks=said["trainer_ranks"],
        replica_size=run.devices.size("rollout 0"),
    )


def of_model(folder: Path, options: argparse.Namespace) -> tuple[Scenario, Times]:
    """Return a scenario and its times, from the folder of a model's config.json and the command-line options."""
    if options.lengths is None:
        raise CannotPlan(f"{folder} has a model's config.json and no events of a run: give --lengths MEDIAN,SIGMA,MOST")
    try:
        config = from_json((folder / "config.json").read_bytes())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise CannotPlan(f"{folder}/config.json is not a JSON object")
    shape = shape_of(config)
    if shape is None:
        raise CannotPlan(f"{folder}/config.json has an unknown model family or invalid sizes; give a recorded run")
    if options.device not in PROFILES:
        raise CannotPlan(f"--device {options.device!r} is not known: give one of {sorted(PROFILES)}")
    median, sigma, most = _lengths(options.lengths)
    draw = random.Random(0)
    tokens = [
        [max(1, min(int(most), round(median * draw.lognormvariate(0, sigma)))) for _ in range(8)] for _ in range(500)
    ]
    profile = PROFILES[options.device]
    times = estimated(
        DeviceTimes(profile, shape, options.replica_size), lambda ranks: DeviceTimes(profile, shape, ranks), tokens, 512
    )
    scenario = Scenario(options.batch, 8, 1, 320, 256, replica_size=options.replica_size, steps=options.steps)
    return scenario, times


def assumed(scenario: Scenario) -> str:
    """Return, as Hydra overrides, the settings that ``scenario`` merely assumes, because there is no recorded run."""
    rollout = "actor_rollout_ref.rollout"
    return (
        f" actor_rollout_ref.actor.ppo_mini_batch_size={scenario.batch_groups} {rollout}.n={scenario.answers} "
        f"{rollout}.max_num_seqs={scenario.places} {rollout}.tensor_model_parallel_size={scenario.replica_size} "
        "async_training.concurrent_samples_per_replica=null"
    )


def _lengths(text: str) -> tuple[float, float, float]:
    try:
        median, sigma, most = (float(part) for part in text.split(","))
    except ValueError:
        raise CannotPlan(f"--lengths {text!r}: give three numbers, MEDIAN,SIGMA,MOST") from None
    if not (1 <= median <= most < math.inf and 0 <= sigma <= WIDEST):
        raise CannotPlan(f"--lengths {text!r}: give 1 <= MEDIAN <= MOST and 0 <= SIGMA <= {WIDEST:g}")
    return median, sigma, most


def table(found: Sequence[Advice]) -> str:
    rows = [("trainer", "rollout", "lent", "bound", "k", "tokens/s", "over seeds", "staleness", "why not")]
    for advice in found[:SHOWN]:
        row = advice.row(found[0])
        low, high = row["range"]
        parts = row["trainer_accelerators"], row["rollout_accelerators"], "yes" if row["placement"] == ELASTIC else "no"
        rest = row["max_staleness"], row["batches_per_version"], row["tokens_per_s"], f"{low}..{high}", row["staleness"]
        rows.append((*map(str, (*parts, *rest)), row["why_worse"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def picture(found: Sequence[Advice], file: Path) -> None:
    """Write an HTML page that plots throughput against trainer accelerators, with one line per staleness bound."""
    from bokeh.embed import file_html
    from bokeh.palettes import Category10
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    plot = figure(width=800, height=420, x_axis_label="trainer's accelerators", y_axis_label="trained tokens/s")
    bounds = sorted({advice.scenario.max_staleness for advice in found})
    for bound, colour in zip(bounds, Category10[10], strict=False):
        best: dict[int, float] = {}
        for advice in found:
            if advice.scenario.max_staleness == bound:
                ranks = advice.scenario.trainer_ranks
                best[ranks] = max(best.get(ranks, 0.0), advice.tokens_per_s)
        points = sorted(best.items())
        plot.line(*zip(*points, strict=True), color=colour, legend_label=f"max_staleness {bound}", line_width=2)
    file.write_text(file_html(plot, INLINE, "throughput over split and bound"))


def main(arguments: list[str] | None = None) -> int:
    """Print the best candidates and return exit status 0. If there is no plan, print the reason and return 2."""
    parser = argparse.ArgumentParser(prog="python -m recipe.plan", description="Finds the best split of accelerators.")
    parser.add_argument("run", type=Path, help="the folder of a recorded run, or of a model's config.json")
    parser.add_argument("--accelerators", type=int, required=True)
    parser.add_argument("--goal", default="throughput", help="throughput, cost, or staleness<=N")
    parser.add_argument("--per-node", type=int, default=PER_NODE, help="accelerators per node")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="steps to simulate")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path, help="HTML file to write a plot to")
    parser.add_argument("--device", default="h100", help="device profile, without a run")
    parser.add_argument("--lengths", help="lognormal answer tokens, without a run: MEDIAN,SIGMA,MOST")
    parser.add_argument("--batch", type=int, default=64, help="prompts per step, without a run")
    parser.add_argument("--replica-size", type=int, default=1, help="accelerators of a replica, without a run")
    options = parser.parse_args(arguments)
    if options.picture is not None and (said := lacking("--picture", "plan", ["bokeh"])) is not None:
        sys.stderr.write(f"{said}\n")
        return 2
    try:
        found, estimate = _found(options)
    except (BadFile, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.picture is not None:
        picture(found, options.picture)
    if options.json:
        answer: dict[str, Any] = {"estimate": estimate, "best": [advice.row(found[0]) for advice in found]}
        sys.stdout.write(json.dumps(answer) + "\n")
        return 0
    said = "An estimate by a device profile; nothing was measured.\n" if estimate else ""
    sys.stdout.write(f"{said}{table(found)}\n\n{found[0].overrides}\n")
    return 0


def _found(options: argparse.Namespace) -> tuple[list[Advice], bool]:
    """Return the candidates, best first, and whether they are estimates.

    Estimates are simulated with times from a device profile, other candidates with times from a recorded run.
    """
    most_staleness(options.goal)
    for name, least in (("seeds", 1), ("steps", 6), ("batch", 1), ("replica_size", 1), ("per_node", 1)):
        if getattr(options, name) < least:
            raise CannotPlan(f"--{name.replace('_', '-')} {getattr(options, name)}: it must be at least {least}")
    if options.picture is not None and not options.picture.parent.is_dir():
        raise CannotPlan(f"--picture {options.picture}: there is no folder {options.picture.parent}")
    if not options.run.is_dir():
        raise CannotPlan(f"{options.run} is not a folder")
    estimate = not files(options.run) and (options.run / "config.json").is_file()
    if estimate:
        scenario, times = of_model(options.run, options)
    else:
        times, run = fitted(options.run)
        sys.stderr.write("".join(f"{note}\n" for note in run.notes))
        if times.switch is None:
            sys.stderr.write(f"{NOT_LENT}\n")
        if run.devices.shared or run.settings["whole_batches"]:
            raise CannotPlan(f"the run in {options.run} is not fully asynchronous, so it has no split to plan")
        scenario = of_run(run, options.steps)
    found = advise(scenario, times, options.accelerators, options.goal, range(options.seeds), options.per_node)
    if not found:
        raise CannotPlan(f"--goal {options.goal}: no candidate meets this goal; allow a larger staleness")
    return [replace(advice, also=assumed(scenario)) for advice in found] if estimate else found, estimate


if __name__ == "__main__":
    sys.exit(main())
