# SPDX-License-Identifier: Apache-2.0
"""Rules for data files, checkpoints and other paths."""

import re
from collections.abc import Iterator

from recipe.async_engine.config.facts import TRAIN_FILES, FileFact, RowFault
from recipe.async_engine.config.plan import teacher_keys
from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.verl_types import ROLLOUT
from recipe.async_engine.core.columns import ARGUMENTS
from recipe.async_engine.core.snapshots import RESUMED_PARTS, not_carried

REWARD_COLUMNS, TEACHER_KEY = ("reward_model",), "distillation.teacher_key"
WANTED = {
    "model": "a local directory with a config.json, or the name of a model on the hub",
    "data": "existing files",
    "code": "an existing Python file",
    "checkpoint": "a folder global_step_N of verl's, with the weights that this run trains",
    "description": "a YAML file that lists agent loops or tools",
    "folder": "an existing folder, or a name on the hub",
    "module": "a module that can be imported here",
    "written": "a folder that can be written to, or created",
}


def files(context: RuleContext) -> Iterator[Problem]:
    """Report unusable paths, missing columns, and unusable rows."""
    needed = [str(context.get("data.prompt_key", "prompt"))]
    if context.get("reward.reward_manager.source", "register") == "register":
        needed += [str(context.get("data.reward_fn_key", "data_source")), *REWARD_COLUMNS]
    for fact in context.files:
        if fact.kind not in WANTED:
            continue
        if fact.fault is not None:
            correct = "name, install it, or put its folder on PYTHONPATH" if fact.kind == "module" else "path"
            yield Problem(fact.setting, fact.path, WANTED[fact.kind], f"It {fact.fault}; correct the {correct}.")
        elif fact.kind == "data" and context.get("data.custom_cls.path") is None:
            routed = fact.setting == TRAIN_FILES and teacher_keys(context.config)
            yield from _data(context, fact, [*needed, str(context.get(TEACHER_KEY))] if routed else needed)


def _data(context: RuleContext, fact: FileFact, needed: list[str]) -> Iterator[Problem]:
    """Report problems with the columns and rows of a data file."""
    columns = fact.columns or ()
    missing = [name for name in needed if fact.columns is not None and name not in columns]
    if missing:
        advice = f"It has no {' and no '.join(missing)}; its columns are {', '.join(columns)}."
        yield Problem(fact.setting, fact.path, f"data with the columns {', '.join(needed)}", advice)
    for name in sorted(ARGUMENTS & set(columns)):
        advice = f"Rename its column {name}: agent loops get a row's columns by name, and an argument {name} from verl."
        yield Problem(fact.setting, fact.path, f"data without the columns {', '.join(sorted(ARGUMENTS))}", advice)
    if fact.rows == 0:
        yield Problem(fact.setting, fact.path, "data with rows", "The file has none.")
    for fault in fact.row_faults:
        yield _row(context, fact, fault)


def _row(context: RuleContext, fact: FileFact, fault: RowFault) -> Problem:
    """Return the `Problem` that describes all rows with the same fault."""
    limit = context.get("data.max_prompt_length")
    allowed, said = {
        "empty": ("data whose prompts have text", "no text. Remove the rows, or fill them."),
        "too long": (
            f"prompts of at most data.max_prompt_length={limit} tokens",
            f"up to {fault.most} tokens without the chat template. Raise data.max_prompt_length, shorten or remove the "
            "rows, or set data.filter_overlong_prompts=True to leave them out.",
        ),
        "text": (
            "prompts that are lists of messages",
            'plain text. Verl\'s agent loops take [{"role": "user", "content": "..."}].',
        ),
        "missing": ("data with this column in each row", "no value. Remove the rows, or fill them."),
        "no mapping": (
            "data in which this column is a mapping",
            "text or another value. verl reads its keys.",
        ),
        "no teacher": (
            f"rows with the key of a teacher, {', '.join(map(str, teacher_keys(context.config)))}",
            f"{fault.value}. Correct the rows or the keys (distillation.teacher_models), or set {TEACHER_KEY}.",
        ),
    }[fault.what]
    others = "" if fault.count == 1 else f" and {fault.count - 1} more"
    place = f"Row {fault.first}{others} (counted from 0), column {fault.column}:"
    return Problem(fact.setting, fact.path, allowed, f"{place} {said}")


def lengths(context: RuleContext) -> Iterator[Problem]:
    """Check that the rollout's prompt and response lengths equal those in `data`. Other rules read only the latter."""
    for engines, datas in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        length = context.get(f"data.{datas}")
        if context.get(f"{ROLLOUT}.{engines}") not in (None, length):
            yield context.problem(f"{ROLLOUT}.{engines}", f"as data.{datas}={length}", f"Set data.{datas} alone.")


CONTENTS = ("model", "optimizer", "extra", "hf_model")
"""The names that verl knows in `save_contents` and `load_contents`; it ignores all others."""


def saving(context: RuleContext) -> Iterator[Problem]:
    """Check that a run can resume from the checkpoints that it writes."""
    yield from _contents(context)
    mode = context.get("trainer.resume_mode", "auto")
    start = context.settings.async_training.start_from
    if start is not None and mode == "resume_path":
        advice = "A run either resumes from a checkpoint or starts with the weights of one; set one of the two to null."
        yield context.problem("async_training.start_from", "null with trainer.resume_mode=resume_path", advice)
    path = context.get("trainer.resume_from_path")
    if mode == "resume_path" and not re.search(r"global_step_\d+$", str(path)):
        allowed, advice = "a folder of a checkpoint with resume_mode=resume_path", "Name global_step_N itself."
        yield context.problem("trainer.resume_from_path", allowed, advice)
    if mode != "disable" and context.get("trainer.default_hdfs_dir") is not None:
        advice = "verl cannot load from there. Set it to null, or trainer.resume_mode=disable."
        yield context.problem("trainer.default_hdfs_dir", "null where a run may resume", advice)


def _contents(context: RuleContext) -> Iterator[Problem]:
    """Check that checkpoints contain all that resuming needs, unless `trainer.resume_mode` is disable."""
    saves, resumes = (context.get("trainer.save_freq") or -1) > 0, context.get("trainer.resume_mode") != "disable"
    for section in context.trained:
        before: object = None
        for name in ("save_contents", "load_contents"):
            setting = f"{section}.checkpoint.{name}"
            contents = context.get(setting)
            if contents is None or contents == before:
                continue
            before = contents
            if not isinstance(contents, (list, tuple)) or not {*map(str, contents)} <= {*CONTENTS}:
                yield context.problem(setting, f"a list of some of {', '.join(CONTENTS)}", "Correct it.")
            elif saves and resumes and (left_out := not_carried(contents, str(context.get(f"{section}.strategy")))):
                advice = (
                    f"A run that resumes would go on without {' and '.join(left_out)}. Add what is missing; or, where "
                    "checkpoints are for other uses and no run is to resume, set trainer.resume_mode=disable."
                )
                yield context.problem(setting, f"a list with {', '.join(RESUMED_PARTS)} where a run may resume", advice)
