# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md from the config types: `python tools/config_docs.py PATH`.

Contract: the document is a pure function of `recipe.async_engine.config.sections`, so a setting cannot exist without
its documentation; a test compares the committed file with `render_document()`.
"""

import argparse
import inspect
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_origin

from pydantic.fields import FieldInfo

from recipe.async_engine.config.fields import accepted_types, allowed_values, settings_of
from recipe.async_engine.config.problems import render
from recipe.async_engine.config.rules.algorithm import ADVANTAGE_ESTIMATORS
from recipe.async_engine.config.sections import SECTIONS

INTRODUCTION = """\
# Configuration

<!-- Generated from the config types: change those and run `make docs`. -->

The configuration is Hydra's, on top of stock verl's. `recipe.fully_async.main` reads
`fully_async_ppo_trainer.yaml` (FSDP, FSDP2) or, with `--config-name=fully_async_ppo_megatron_trainer.yaml`, the Megatron
one. Both compose from any directory. What wins, from weakest to strongest:

1. verl's `ppo_trainer`;
2. the group `async_engine` (`separate`: the settings below, and the verl settings that the mode fixes);
3. the group `preset`, if one is chosen (`preset=tiny_cpu`);
4. the command line.

`preset=tiny_cpu` has everything for a run on a machine without an accelerator; `preset=tiny_cpu_long_tail` is the same
with long-tailed answers. With a stock verl main it is
`+preset=tiny_cpu`. Where a preset adds a key that verl's own files lack (`actor_rollout_ref.rollout.enable_sleep_mode`),
change it with `++`, which adds or overrides.

A configuration that cannot run is refused before any process starts, with all its problems in one message, each with
the setting, its value, what is allowed, and what to change. Unknown keys are refused: by Hydra on the command line, and
in the sections below also where they were added with `+`. So is what verl's own types would refuse in a worker, and what
certainly does not fit into the accelerators' memory ([memory.md](memory.md)).

`plan_only=true` prints what a run would be and starts nothing ([cluster.md](cluster.md#print-the-plan-first)).

## Terms

| term | settings | meaning |
|---|---|---|
| `b` | `actor_rollout_ref.actor.ppo_mini_batch_size * async_training.require_batches` | prompt groups of a batch; training on one is a step |
| `n` | `actor_rollout_ref.rollout.n` | answers for each prompt |
| `k` | `async_training.trigger_parameter_sync_step` | steps of a version; a version is one publication of weights |
| `S` | `async_training.max_staleness` | the hard bound in versions |
| depth | `async_training.staleness_threshold` | how far generation runs ahead, in versions; at most `S` |

`trainer.total_training_steps` counts steps; `trainer.save_freq` and `trainer.test_freq` count versions, as in stock
verl; `rollout.total_rollout_steps` counts prompt groups issued; `trainer.total_epochs` passes over the training data.
Whichever limit comes first ends the run.
"""

CONCLUSION = f"""\
## verl settings with a fixed or narrower meaning in this mode

| setting | here |
|---|---|
| `actor_rollout_ref.hybrid_engine` | `false` is the default and the only value: trainer and rollout have resources of their own |
| `data.train_batch_size` | `0`, as stock fully-async demands; the batch is `b` |
| `data.gen_batch_size` | `1`: prompts are issued one by one |
| `algorithm.adv_estimator` | default `grpo` (stock's is `gae`); one of {", ".join(f"`{name}`" for name in ADVANTAGE_ESTIMATORS)}, or one registered with verl |
| `algorithm.filter_groups` | as in verl's v1 trainers: a complete group of several answers that all have the same `metric` is left out, and a new prompt takes its place; the run ends where one batch takes `max_num_gen_batches` batches of such groups (0: any number) |
| `critic.enable` | as in stock verl: `null` means a critic with `adv_estimator=gae`; its model is at `critic.model.path`, its ranks are the trainer's |
| `trainer.max_critic_ckpt_to_keep` | no effect: a checkpoint is kept or removed as a whole, by `trainer.max_actor_ckpt_to_keep` |
| `actor_rollout_ref.rollout.name` | `vllm` |
| `actor_rollout_ref.rollout.calculate_log_probs` | `true` |
| `actor_rollout_ref.rollout.scheduling_policy` | default `priority`: a full engine takes the answers of the oldest groups first, also those that a weight sync has interrupted, which otherwise wait behind all younger ones; `fcfs`, as stock has it: first come, first served. An agent loop that gives a `priority` of its own other than 0 keeps it |
| `actor_rollout_ref.rollout.full_determinism` | `true` is refused: verl would give all answers to a prompt the same seed |
| `actor_rollout_ref.rollout.checkpoint_engine.backend` | default `nccl`, without relays (`engine_kwargs.nccl.multi_sender`) where weights are published beside training; `recipe_gloo` on a CPU, with `custom_backend_module: recipe.laptop.transfer.gloo_engine`; `naive` is refused |
| `actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module` | default `recipe.async_engine.weights.nccl_engine`, which puts deadlines around verl's `nccl` and lets its members change, within `timeouts.weight_sync` unless `engine_kwargs.<backend>.timeout_s` is set ([reliability.md](reliability.md#a-weight-sync)); `null` leaves verl's as it is |
| `actor_rollout_ref.actor.strategy` | on a CPU `fsdp2`; `fsdp` is refused there |
| `actor_rollout_ref.model.lora_rank` | with FSDP; `lora.rank` with Megatron. `lora.merge=true`: the rollout gets merged weights. `false`, with FSDP: it gets the adapters alone, and reads the base from the model's files (`actor_rollout_ref.rollout.load_format=auto`) |
| `actor_rollout_ref.rollout.max_num_batched_tokens` | on a CPU at least `max_num_seqs * max_model_len` |
| `algorithm.rollout_correction.bypass_mode` | default `true`, as in stock fully-async |
"""


def _row(path: str, name: str, info: FieldInfo) -> str:
    accepted = accepted_types(info)
    types = dict.fromkeys(_type_name(item) for item in accepted)
    choices = any(get_origin(item) is Literal for item in accepted)
    allowed = allowed_values(info) if choices or info.metadata else ""
    extra: Any = info.json_schema_extra
    default = "below" if is_dataclass(info.default) else f"`{render(info.default)}`"
    cells = [f"`{path}.{name}`", " or ".join(types), default, extra["unit"], allowed, info.description or ""]
    return f"| {' | '.join(cells)} |"


def _type_name(item: Any) -> str:
    if get_origin(item) is Literal:
        return "str"
    return "null" if item is NoneType else "table" if is_dataclass(item) else item.__name__


def _section(path: str, cls: type[Any]) -> str:
    rows = [_row(path, name, info) for name, info in settings_of(cls).items() if info.description]
    if not rows:  # the section's table row in its parent says everything
        return ""
    head = ["| setting | type | default | unit | allowed | meaning |", "|---|---|---|---|---|---|"]
    return "\n".join([f"## `{path}`", "", inspect.cleandoc(cls.__doc__ or ""), "", *head, *rows, "", ""])


def render_document() -> str:
    """Return the text of docs/configuration.md."""
    return "".join([f"{INTRODUCTION}\n", *(_section(path, cls) for path, cls in SECTIONS.items()), CONCLUSION])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the document, or compare a file with it; return 1 if it differs."""
    parser = argparse.ArgumentParser(description="Document the settings of this package.")
    parser.add_argument("path", type=Path, nargs="?", help="file to write; standard output if absent")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(arguments)
    if options.path is None:
        sys.stdout.write(render_document())
    elif not options.check:
        options.path.write_text(render_document(), encoding="utf-8")
    elif options.path.read_text(encoding="utf-8") != render_document():
        sys.stderr.write(f"{options.path} is not current: run `make docs`.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
