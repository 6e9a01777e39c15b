# SPDX-License-Identifier: Apache-2.0
"""Makes the run's data sets with verl's own function, and checks them before any worker starts.

Contract: a `ConfigError` names the setting and quotes the cause if a data set cannot be created, if it has too few rows
after filtering, or if its first rows cannot be read or cannot be turned into prompts by verl's own agent loops. The
checks need verl, the run's tokenizer and the user's class, so they run in the trainer's process and not in the main
process. Shown by tests/integration/test_data_sets.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from torch.utils.data import IterableDataset
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer import build_multimodal_processor_inputs
from verl.utils.tokenizer.chat_template import apply_chat_template

from recipe.async_engine.config.facts import TRAIN_FILES, VAL_FILES, VERLS_LOOPS
from recipe.async_engine.config.plan import MODEL
from recipe.async_engine.config.problems import ConfigError, Problem, lookup, render
from recipe.async_engine.core.columns import FAILURE
from recipe.async_engine.core.plain import told
from recipe.async_engine.rollout.prompts import IndexedDataset

logger = logging.getLogger(__name__)

FIRST = 8
"""Number of rows that are checked at the beginning of each data set."""


def tokenizer_and_processor(config: Any) -> tuple[Any, Any]:
    """Return the tokenizer and processor, loaded as in verl's workers (`tokenizer_path`, `custom_chat_template`).

    Remote code is trusted if `data.trust_remote_code` (used by verl's data sets) or the model's own setting (used by
    verl's workers) says so.

    Raises:
        ConfigError: the tokenizer is missing or cannot be loaded.
    """
    model = copy.deepcopy(config.actor_rollout_ref.model)
    OmegaConf.set_struct(model, False)
    model.trust_remote_code = bool(model.get("trust_remote_code") or config.data.get("trust_remote_code"))
    try:
        made = omega_conf_to_dataclass(model)
    except Exception as error:  # a model's own code may raise anything
        path = model.get("tokenizer_path") or model.path
        advice = f"Loading it as verl's workers do fails with {told(error)}"
        raise ConfigError([Problem(MODEL, str(path), "a model whose tokenizer can be loaded", advice)]) from error
    return made.tokenizer, made.processor


def defaults(config: Any) -> dict[str, Any]:
    """Return, by name, verl's default values for fields that a row may lack."""
    agent = config.actor_rollout_ref.rollout.agent.default_agent_loop
    return {
        "agent_name": agent,
        "priority": 0,
        "index": 0,
        "extra_info": {},
        "tools_kwargs": {},
        "interaction_kwargs": {},
    }


def data_sets(config: Any, tokenizer: Any, processor: Any, batch: int) -> tuple[IndexedDataset, IndexedDataset]:
    """Return the training data set, which must have at least ``batch`` prompts, and the validation data set.

    ``batch`` is the number of prompts that a step trains.

    Raises:
        ConfigError: the run cannot use one of the data sets. The error lists all problems.
    """
    made: list[IndexedDataset] = []
    problems: list[Problem] = []
    for setting, needed in ((TRAIN_FILES, batch), (VAL_FILES, 1)):
        maker = _Maker(config, setting, tokenizer, processor)
        try:
            made.append(maker.checked(needed))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return made[0], made[1]


class _Maker:
    def __init__(self, config: Any, setting: str, tokenizer: Any, processor: Any) -> None:
        self._config, self._setting = config, setting
        self._tokenizer, self._processor = tokenizer, processor
        self._is_train = setting == TRAIN_FILES

    def checked(self, needed: int) -> IndexedDataset:
        """Return the data set; raise ConfigError if it has fewer than ``needed`` rows or unusable first rows."""
        rows = self._made(self._config.data)
        try:
            size = len(rows)
        except Exception as error:  # a user's class may raise anything
            raise self._refused("a data set with a length", f"Its len() raises {told(error)}.") from error
        if size < needed:
            raise self._too_few(size, needed)
        first = [rows[index] for index in range(min(FIRST, size))]
        if all(FAILURE in row for row in first):
            advice = f"None of the first {len(first)} can be read: {first[0][FAILURE]}."
            raise self._refused("data whose rows can be read", advice)
        messages = [row["raw_prompt"] for row in first if FAILURE not in row and self._is_verls(row)]
        if messages and (fault := self._cannot_prompt(messages)) is not None:
            raise fault
        return rows

    def _made(self, data: Any) -> IndexedDataset:
        limit = data.get(f"{'train' if self._is_train else 'val'}_max_samples", -1)
        files = lookup({"data": data}, self._setting)
        try:
            dataset = create_rl_dataset(
                files, data, self._tokenizer, self._processor, is_train=self._is_train, max_samples=limit
            )
        except (Exception, SystemExit) as error:  # a user's class may raise anything
            raise self._refused(
                "data from which verl's data set can be made", f"Creating the data set raises {told(error)}."
            ) from error
        if isinstance(dataset, IterableDataset):
            allowed, advice = "a data set with __getitem__ and __len__", "An IterableDataset has no rows to go back to."
            raise self._refused(allowed, advice, "data.custom_cls.name")
        return IndexedDataset(dataset, defaults(self._config), is_indexed=self._is_train)

    def _is_verls(self, row: dict[str, Any]) -> bool:
        """Return whether one of verl's own agent loops will process the row, not a user's loop of the same name."""
        agent = self._config.actor_rollout_ref.rollout.agent
        name = row.get("agent_name", agent.default_agent_loop)
        return name in VERLS_LOOPS and not agent.get("agent_loop_config_path")

    def _too_few(self, size: int, needed: int) -> ConfigError:
        what = f"The data set that is used has {size} prompts."
        if self._config.data.get("filter_overlong_prompts", False):
            what = f"{size} prompts are left after data.filter_overlong_prompts. {self._why_left_out()}".rstrip()
        advice = f"{what} Use more data, or lower actor_rollout_ref.actor.ppo_mini_batch_size."
        if not self._is_train:
            return self._refused("data with at least one prompt", what)
        return self._refused(f"data with at least {needed} prompts, which a step trains", advice)

    def _why_left_out(self) -> str:
        """Explain why verl's filter dropped rows: say what is wrong with the first rows of the unfiltered data.

        Return "" if nothing is wrong with them, or if this cannot be determined. The filter itself does not say why: it
        reports every row that it drops as too long.
        """
        data = copy.deepcopy(self._config.data)
        OmegaConf.set_struct(data, False)
        data.filter_overlong_prompts = False
        try:
            rows = self._made(data)
            first = [rows[index] for index in range(min(FIRST, len(rows)))]
            fault = self._cannot_prompt([row["raw_prompt"] for row in first if FAILURE not in row])
        except Exception:  # this explanation is optional
            return ""
        return "" if fault is None else f"Before the filter there were {len(rows)}: {fault.problems[0].advice}"

    def _cannot_prompt(self, prompts: Sequence[Any]) -> ConfigError | None:
        """Return an error that says why none of the prompts can be used, or None if any of them can be used."""
        fault = None
        for prompt in prompts:
            fault = self._fault_of(prompt)
            if fault is None:
                return None
        return fault

    def _fault_of(self, prompt: Any) -> ConfigError | None:
        if not isinstance(prompt, list | tuple):
            allowed = 'prompts that are lists of messages ({"role": ..., "content": ...})'
            return self._refused(allowed, f"One of the first is {type(prompt).__name__}, {str(prompt)[:80]!r}.")
        template = dict(
            OmegaConf.to_container(self._config.data.get("apply_chat_template_kwargs") or OmegaConf.create())
        )
        for name in ("tokenize", "return_dict", "return_tensors"):
            template.pop(name, None)
        maker = self._tokenizer if self._processor is None else self._processor
        if not getattr(maker, "chat_template", None):
            advice = f"The tokenizer has no chat template. Set {MODEL}.custom_chat_template, or use a chat model."
            return self._refused("a model with a chat template", advice, f"{MODEL}.path")
        try:
            text = apply_chat_template(maker, list(prompt), tokenize=False, **template)
            length = self._length(list(prompt), text)
        except Exception as error:  # a template may raise anything
            return self._refused("prompts that the chat template accepts", f"It raises {told(error)}.")
        limit = self._config.data.max_prompt_length
        if length <= limit:
            return None
        advice = f"One of the first prompts has {length} tokens. Raise data.max_prompt_length, or shorten the prompts."
        return self._refused(
            f"prompts of at most data.max_prompt_length={limit} tokens, chat template included", advice
        )

    def _length(self, messages: list[dict[str, Any]], text: str) -> int:
        """Return the number of tokens that verl's agent loops make from a prompt, including those of images."""
        if self._processor is None:
            return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        patch = getattr(getattr(self._processor, "image_processor", None), "patch_size", 14)
        images, videos, audio = RLHFDataset._process_multi_modal_info(messages, patch, self._config.data)
        inputs = build_multimodal_processor_inputs(
            self._processor, text=[text], images=images, videos=videos, audio=audio
        )
        return len(inputs["input_ids"][0])

    def _refused(self, allowed: str, advice: str, setting: str | None = None) -> ConfigError:
        setting = setting or self._setting
        value = OmegaConf.select(self._config, setting)
        return ConfigError(
            [
                Problem(
                    setting,
                    render(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value),
                    allowed,
                    advice,
                )
            ]
        )
