# SPDX-License-Identifier: Apache-2.0
"""Builds verl's own types from a configuration, as verl does in its workers, and names what they refuse.

Contract: `verl_problems` builds each type that a run would build after its processes are placed (actor, rollout,
checkpoint engine, reference policy, critic, log-prob servers' engine, algorithm) and calls verl's `validate_config`;
what they raise becomes a `Problem` of the section. The model's type is not built, since it reads the model's files; its
keys are compared. verl is imported, so a main on a CPU leaves it to the trainer's process. Shown by
tests/integration/test_documented_commands.py.
"""

import contextlib
import dataclasses
import importlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.async_engine.config.problems import Problem
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.rules.names import BACKEND, MODULE, OWN_ENGINES, Name, unknown, unusual

EXTERNAL = "actor_rollout_ref.model.external_lib"
ROLES = "actor_rollout_ref"
ALLOWED = "what verl's own types accept"
# verl renames these when it builds the reference policy (engine_workers.py:556-566).
RENAMED = {
    "log_prob_micro_batch_size": "ppo_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu": "ppo_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
}


def verl_problems(context: RuleContext, known: Sequence[Problem]) -> list[Problem]:
    """What verl refuses, but for sections in which ``known`` has named the cause already."""
    found = list(late_names(context))
    return found + _of_types(context, [*known, *found])


def late_names(context: RuleContext, loaded: bool = False) -> Iterator[Problem]:
    """Names that stand in none of verl's registries; ``loaded``: the model's ``external_lib`` is imported.

    Where it is not, what it may add is left to the trainer's process, which imports it.
    """
    for name in unusual(context):
        if name.external and not loaded and (context.get(EXTERNAL) or _adds_engines(context, name)):
            continue
        module, _, path = name.registry.partition(":")
        registry: Any = importlib.import_module(module)
        for part in path.split("."):
            registry = getattr(registry, part)
        if context.get(name.setting) not in registry:
            added = [str(key) for key in registry if key not in name.own] if name.registry.startswith("verl") else []
            yield unknown(context, name.setting, (*name.own, *added))


def external_names(context: RuleContext) -> list[Problem]:
    """`late_names` in the trainer's process, which imports the modules that add some, as verl's own does."""
    from verl.utils.import_utils import import_external_libs

    if not unusual(context):
        return []
    for setting in (EXTERNAL, MODULE):
        if setting == MODULE and context.get(MODULE) in OWN_ENGINES:
            continue
        try:
            import_external_libs(context.get(setting))
        except Exception as error:  # whatever a user's module does
            message = f"{type(error).__name__}: {error}"
            return [context.problem(setting, "modules that can be imported", f"It cannot be imported: {message}")]
    return list(late_names(context, loaded=True))


def _adds_engines(context: RuleContext, name: Name) -> bool:
    return name.setting == BACKEND and context.get(MODULE) not in (None, *OWN_ENGINES)


def _of_types(context: RuleContext, known: Sequence[Problem]) -> list[Problem]:
    config = OmegaConf.create(dict(context.config))
    with open_dict(config):
        # As verl reads it: prompts of a step.
        config.data.train_batch_size = context.batch_groups or 1
    found: list[Problem] = []
    for section, build in _types(config, context).items():
        if not any(problem.setting.startswith(section) for problem in known):
            found += _attempt(section, build)
    if not found and not known:
        found += _attempt("trainer", lambda: _validate(config, context))
    return found


def _types(config: DictConfig, context: RuleContext) -> dict[str, Callable[[], Any]]:
    """What builds each section's type."""
    from verl.utils.config import omega_conf_to_dataclass as build
    from verl.workers.config import HFModelConfig

    def of(section: str) -> Callable[[], Any]:
        return lambda: build(OmegaConf.select(config, section))

    sections = {
        f"{ROLES}.model": lambda: _known_keys(config.actor_rollout_ref.model, HFModelConfig),
        f"{ROLES}.actor": of(f"{ROLES}.actor"),
        f"{ROLES}.rollout.checkpoint_engine": of(f"{ROLES}.rollout.checkpoint_engine"),
        f"{ROLES}.rollout": of(f"{ROLES}.rollout"),
        "algorithm": of("algorithm"),
    }
    if context.uses_reference:
        sections[f"{ROLES}.ref"] = lambda: build(_reference(config))
    if context.has_critic:
        sections["critic"] = lambda: build(_without_model(config.critic))
    if context.settings.servers.enabled:
        sections["model_engine_server.engine"] = of("model_engine_server.engine")
    return sections


def _reference(config: DictConfig) -> DictConfig:
    """The reference policy's section as verl's worker makes it an actor's."""
    section = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref.ref))
    with open_dict(section):
        section.ppo_mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
        for name, new in RENAMED.items():
            section[new] = section.pop(name, None)
    return section


def _without_model(critic: DictConfig) -> DictConfig:
    section = OmegaConf.create(OmegaConf.to_container(critic))
    with open_dict(section):
        section.model = None
    return section


def _known_keys(section: DictConfig, cls: type[Any]) -> None:
    unknown = set(section) - {field.name for field in dataclasses.fields(cls)} - {"_target_"}
    if unknown:
        raise TypeError(f"{cls.__name__} has no {', '.join(sorted(map(str, unknown)))}")


def _validate(config: DictConfig, context: RuleContext) -> None:
    from verl.utils.config import validate_config

    with open_dict(config):
        if context.has_critic:
            config.critic = _without_model(config.critic)
    validate_config(config, use_reference_policy=context.uses_reference, use_critic=context.has_critic)


def _attempt(section: str, build: Callable[[], Any]) -> Iterator[Problem]:
    try:
        # verl's types print and warn of what is theirs.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            build()
    except Exception as error:  # whatever verl raises, it would raise in a worker
        cause = error.__cause__ or error
        message = " ".join(str(cause).split()) or "an assertion without a message"
        yield Problem(section, "as configured", ALLOWED, f"verl refuses it: {type(cause).__name__}: {message}")
