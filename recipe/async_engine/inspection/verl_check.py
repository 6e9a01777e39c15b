# SPDX-License-Identifier: Apache-2.0
"""Builds verl's own config types from a configuration, as verl's workers do, and reports values that verl refuses.

Contract: `verl_problems` builds each type that a run would build in its workers (actor, rollout, checkpoint engine,
reference policy, critic, teachers, the log-prob servers' engine, algorithm) and calls verl's `validate_config`. Each
exception becomes a `Problem` of the section that caused it. The model's type is not built, since that would read the
model's files; only the names of its settings are checked. These checks import verl. For a run on a CPU, whose main
process should not import verl, the trainer's process makes the checks. Shown by
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
from recipe.async_engine.config.rules.names import BACKEND, MODULE, OWN_ENGINES, unknown, unusual

EXTERNAL = "actor_rollout_ref.model.external_lib"
ROLES = "actor_rollout_ref"
ALLOWED = "what verl's own types accept"
# Settings that verl renames when it builds the reference policy, with their new names (engine_workers.py:556-566).
RENAMED = {
    "log_prob_micro_batch_size": "ppo_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu": "ppo_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
}


def verl_problems(context: RuleContext, known: Sequence[Problem]) -> list[Problem]:
    """Return the problems that verl finds, except in sections that already have a problem in ``known``."""
    found = list(late_names(context))
    return found + _of_types(context, [*known, *found])


def late_names(context: RuleContext, loaded: bool = False) -> Iterator[Problem]:
    """Yield a problem for each setting whose value, such as the name of a loss, is missing from its registry in verl.

    ``loaded`` is whether the user's modules, which may add names to the registries, are imported. If not, names that
    these modules may add are not checked here: the trainer's process will import the modules and check the names.
    """
    for name in unusual(context):
        may_be_added = context.get(EXTERNAL) or (
            name.setting == BACKEND and context.get(MODULE) not in (None, *OWN_ENGINES)
        )
        if name.external and not loaded and may_be_added:
            continue
        module, _, path = name.registry.partition(":")
        registry: Any = importlib.import_module(module)
        for part in path.split("."):
            registry = getattr(registry, part)
        if context.get(name.setting) not in registry:
            added = [str(key) for key in registry if key not in name.own] if name.registry.startswith("verl") else []
            yield unknown(context, name.setting, (*name.own, *added))


def external_names(context: RuleContext) -> list[Problem]:
    """Import the user's modules that may add names to verl's registries, and return a problem for each unknown name.

    verl's trainer process imports the modules in the same way.
    """
    from verl.utils.import_utils import import_external_libs

    if not unusual(context):
        return []
    for setting in (EXTERNAL, MODULE):
        if setting == MODULE and context.get(MODULE) in OWN_ENGINES:
            continue
        try:
            import_external_libs(context.get(setting))
        except Exception as error:  # A user's module may raise anything.
            message = f"{type(error).__name__}: {error}"
            return [context.problem(setting, "modules that can be imported", f"It cannot be imported: {message}")]
    return list(late_names(context, loaded=True))


def _of_types(context: RuleContext, known: Sequence[Problem]) -> list[Problem]:
    """Return the problems that verl's types find.

    If they find none, and ``known`` is empty, return the problems that verl's `validate_config` finds.
    """
    config = OmegaConf.create(dict(context.config))
    with open_dict(config):
        # verl's types expect the number of prompts per step here, which this package may derive from other settings.
        config.data.train_batch_size = context.batch_groups or 1
    found: list[Problem] = []
    for section, build in _types(config, context).items():
        if not any(problem.setting.startswith(section) for problem in known):
            found += _attempt(section, build)
    if not found and not known:
        found += _attempt("trainer", lambda: _validate(config, context))
    return found


def _types(config: DictConfig, context: RuleContext) -> dict[str, Callable[[], Any]]:
    """Return, for each section of the configuration, a function that builds verl's type for it."""
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
    if context.get("distillation.enabled"):
        sections["distillation"] = of("distillation")
    if context.settings.servers.enabled:
        sections["model_engine_server.engine"] = of("model_engine_server.engine")
    return sections


def _reference(config: DictConfig) -> DictConfig:
    """Return the reference policy's section in the form that verl's worker gives it (see `RENAMED`)."""
    section = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref.ref))
    with open_dict(section):
        section.ppo_mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
        for name, new in RENAMED.items():
            section[new] = section.pop(name, None)
    return section


def _without_model(critic: DictConfig) -> DictConfig:
    """Return the critic's section with `model` null, since building the model's type would read files."""
    section = OmegaConf.create(OmegaConf.to_container(critic))
    with open_dict(section):
        section.model = None
    return section


def _known_keys(section: DictConfig, cls: type[Any]) -> None:
    """Raise `TypeError` if the section has settings that its type in verl lacks."""
    unknown = set(section) - {field.name for field in dataclasses.fields(cls)} - {"_target_"}
    if unknown:
        raise TypeError(f"{cls.__name__} has no setting {', '.join(sorted(map(str, unknown)))}")


def _validate(config: DictConfig, context: RuleContext) -> None:
    from verl.utils.config import validate_config

    with open_dict(config):
        if context.has_critic:
            config.critic = _without_model(config.critic)
    validate_config(config, use_reference_policy=context.uses_reference, use_critic=context.has_critic)


def _attempt(section: str, build: Callable[[], Any]) -> Iterator[Problem]:
    """Call ``build``, and yield its exception as a problem of the section."""
    try:
        # Output and warnings of verl's types would only distract from the problems.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            build()
    except Exception as error:  # A worker would fail with the same exception.
        cause = error.__cause__ or error
        message = " ".join(str(cause).split()) or "an assertion without a message"
        yield Problem(section, "as configured", ALLOWED, f"verl refuses it: {type(cause).__name__}: {message}")
