# SPDX-License-Identifier: Apache-2.0
"""What a rule looks at: a configuration, and what is known about files and nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.facts import FileFact, Resources
from recipe.async_engine.config.fields import is_count
from recipe.async_engine.config.log_prob_servers import Proximal
from recipe.async_engine.config.plan import batch_size, has_critic, has_reference, proximal_source
from recipe.async_engine.config.problems import Problem, lookup, render
from recipe.async_engine.config.sections import Settings
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT

REWARD_MODEL = "reward.reward_model"


@dataclass(frozen=True, slots=True)
class RuleContext:
    """All that a rule may look at."""

    config: Mapping[str, Any]
    settings: Settings
    dataset_rows: int | None
    available: Resources | None
    files: Sequence[FileFact]

    def get(self, setting: str, default: Any = None) -> Any:
        """Return the value of a setting."""
        return lookup(self.config, setting, default)

    def problem(self, setting: str, allowed: str, advice: str) -> Problem:
        """Return a problem with the value that a setting has."""
        return Problem(setting, render(self.get(setting)), allowed, advice)

    def count(self, setting: str) -> int | None:
        """Return a setting's value if it is an integer of at least 1, else None; `verl_types` reports other values."""
        value = self.get(setting)
        return value if is_count(value) else None

    @property
    def batch_groups(self) -> int | None:
        """b, the prompt groups of a step; None if its mini-batch is not given."""
        mini = self.count(f"{ACTOR}.ppo_mini_batch_size")
        return None if mini is None else batch_size(self.config, self.settings.async_training)

    @property
    def has_critic(self) -> bool:
        return has_critic(self.config)

    @property
    def trained(self) -> tuple[str, ...]:
        """The sections of the models that are trained."""
        return (ACTOR, "critic") if self.has_critic else (ACTOR,)

    @property
    def engines(self) -> tuple[str, ...]:
        """The sections of the rollout engines: the policy's, and the reward model's if there is one."""
        return (ROLLOUT, f"{REWARD_MODEL}.rollout") if self.get(f"{REWARD_MODEL}.enable") else (ROLLOUT,)

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence that the data may give."""
        return (self.count("data.max_prompt_length") or 0) + (self.count("data.max_response_length") or 0)

    @property
    def uses_reference(self) -> bool:
        """Whether the trainer's workers keep the weights of a reference policy; with LoRA it is the actor's base."""
        return has_reference(self.config)

    @property
    def trainer_scores(self) -> bool:
        """Whether the trainer computes log-probs, be it only those that no log-prob server answers."""
        return proximal_source(self.config, self.settings) in (Proximal.RECOMPUTE, Proximal.SERVER)

    @property
    def positions(self) -> int | None:
        """How many tokens the policy has positions for; None if that is not known.

        It is what its config.json says, unless the configuration overrides it (verl/workers/config/model.py:216). verl
        makes it the length of an engine's longest sequence.
        """
        model = "actor_rollout_ref.model"
        for part in ("model_config.", ""):
            own = self.count(f"{model}.override_config.{part}max_position_embeddings")
            if own is not None:
                return own
        said = self.policy.get("max_position_embeddings") or lookup(self.policy, "text_config.max_position_embeddings")
        return said if is_count(said) else None

    @property
    def policy(self) -> Mapping[str, Any]:
        """The policy's config.json; empty if it could not be read."""
        setting = "actor_rollout_ref.model.path"
        return next((fact.model_config for fact in self.files if fact.setting == setting and fact.model_config), {})

    @property
    def on_cpu(self) -> bool:
        """Whether the run asks for the CPU platform."""
        return bool(self.get("trainer.device") == "cpu")
