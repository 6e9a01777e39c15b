# SPDX-License-Identifier: Apache-2.0
"""The input of a rule: a configuration, and what is known about files and nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.facts import FileFact, Resources
from recipe.async_engine.config.fields import is_count
from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.plan import batch_size, has_critic, has_reference, proximal_source, teachers
from recipe.async_engine.config.problems import Problem, lookup, render
from recipe.async_engine.config.sections import Settings
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT

REWARD_MODEL = "reward.reward_model"


@dataclass(frozen=True, slots=True)
class RuleContext:
    """A configuration, and the facts about files, data and resources that rules check it against."""

    config: Mapping[str, Any]
    settings: Settings
    dataset_rows: int | None
    available: Resources | None
    files: Sequence[FileFact]

    def get(self, setting: str, default: Any = None) -> Any:
        return lookup(self.config, setting, default)

    def problem(self, setting: str, allowed: str, advice: str) -> Problem:
        return Problem(setting, render(self.get(setting)), allowed, advice)

    def count(self, setting: str) -> int | None:
        """Return a setting's value if it is an integer of at least 1, else None; `verl_types` reports other values."""
        value = self.get(setting)
        return value if is_count(value) else None

    @property
    def batch_groups(self) -> int | None:
        """Number of prompt groups of a step (b), or None if `ppo_mini_batch_size` is not valid."""
        mini = self.count(f"{ACTOR}.ppo_mini_batch_size")
        return None if mini is None else batch_size(self.config, self.settings.async_training)

    @property
    def has_critic(self) -> bool:
        return has_critic(self.config)

    @property
    def trained(self) -> tuple[str, ...]:
        """The configuration sections of the trained models."""
        return (ACTOR, "critic") if self.has_critic else (ACTOR,)

    @property
    def engines(self) -> tuple[str, ...]:
        """The configuration sections of the inference engines: the policy's, the reward model's, and the teachers'."""
        judge = (f"{REWARD_MODEL}.rollout",) if self.get(f"{REWARD_MODEL}.enable") else ()
        return (ROLLOUT, *judge, *(f"{teacher}.inference" for teacher in teachers(self.config)))

    @property
    def vllm_engines(self) -> tuple[str, ...]:
        """The sections in `engines` for which vLLM runs: all of them, without the policy's if SGLang generates."""
        return self.engines[1:] if self.on_sglang else self.engines

    @property
    def on_sglang(self) -> bool:
        """Whether SGLang generates the policy's answers; otherwise vLLM does."""
        return bool(self.get(f"{ROLLOUT}.name") == "sglang")

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt and response together."""
        return (self.count("data.max_prompt_length") or 0) + (self.count("data.max_response_length") or 0)

    @property
    def room(self) -> int:
        """The smallest `max_model_len` that suffices for `longest`. verl's SGLang server needs one position more."""
        return self.longest + self.on_sglang

    @property
    def uses_reference(self) -> bool:
        """Whether the trainer's workers keep separate weights of a reference policy.

        With LoRA this is False, because the base model without the adapter is the reference policy.
        """
        return has_reference(self.config)

    @property
    def trainer_scores(self) -> bool:
        """Whether the trainer computes proximal log-probs, either always or when log-prob servers fail to answer."""
        return proximal_source(self.config, self.settings) in (Proximal.RECOMPUTE, Proximal.SERVER)

    @property
    def positions(self) -> int | None:
        """Number of token positions of the policy model, or None if it is not known.

        The number is in the model's config.json, unless the configuration overrides it
        (verl/workers/config/model.py:216). verl makes this number the default `max_model_len` of an engine.
        """
        model = "actor_rollout_ref.model"
        for part in ("model_config.", ""):
            own = self.count(f"{model}.override_config.{part}max_position_embeddings")
            if own is not None:
                return own
        return self.positions_of(f"{model}.path")

    def positions_of(self, setting: str) -> int | None:
        """Number of token positions in the config.json of the model that ``setting`` names; None if not known."""
        model = self.model_config(setting)
        said = model.get("max_position_embeddings") or lookup(model, "text_config.max_position_embeddings")
        return said if is_count(said) else None

    @property
    def policy(self) -> Mapping[str, Any]:
        """The contents of the policy model's config.json; empty if it cannot be read."""
        return self.model_config("actor_rollout_ref.model.path")

    def model_config(self, setting: str) -> Mapping[str, Any]:
        """The contents of the config.json of the model that ``setting`` names; empty if it cannot be read."""
        return next((fact.model_config for fact in self.files if fact.setting == setting and fact.model_config), {})

    @property
    def on_cpu(self) -> bool:
        return bool(self.get("trainer.device") == "cpu")
