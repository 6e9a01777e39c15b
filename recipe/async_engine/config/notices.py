# SPDX-License-Identifier: Apache-2.0
"""Warns about settings that have no effect, and names what to use instead.

Contract: a setting causes a warning if it has no effect and its value differs from verl's default, if neither verl nor
this package knows it, or if it is in verl's old section `reward_model` and verl drops it. Shown by
tests/config/test_verdicts.py.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from recipe.async_engine.config.fields import settings_of
from recipe.async_engine.config.legacy import OF_LOOPS, OLDER, UNREAD_OF_STOCK
from recipe.async_engine.config.problems import render
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.sections import SECTIONS
from recipe.async_engine.config.verdicts import BY_SETTING, TABLE, Kind, verdict_of
from recipe.async_engine.config.verl_types import ROLLOUT, verls_own

UNTYPED = ("data", "global_profiler", "reward", "trainer")
"""The sections of verl's configuration that have no type, so that verl accepts any setting in them."""
TYPED = frozenset({"reward.reward_model.rollout"})
READ = frozenset(
    {
        *(f"data.{name}" for name in ("cache_dir", "chat_template_func", "filter_prompts", "need_tools_kwargs")),
        *(f"reward.{name}" for name in ("reward_kwargs", "timeout", "max_concurrent", "max_rpm", "max_tpm")),
        *("reward.estimated_tokens_per_request", "reward.custom_reward_function.reward_kwargs"),
        *(f"trainer.{name}" for name in ("remove_previous_ckpt_in_save", "rl_insight", "wandb_proxy")),
    }
)
"""Settings that verl reads although its default configuration lacks them; they are in the sections `UNTYPED`."""

# Sections of verl 0.7 and earlier that old scripts may still use, with their current names.
NOW = {
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
}


def notices(context: RuleContext, defaults: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield warnings about unknown settings, and about settings without effect whose values differ from ``defaults``.

    If ``defaults`` is None, the values are compared with verl's defaults.
    """
    found: dict[str, list[str]] = {}
    defaults = verls_own(str(context.get("model_engine", "dp"))) if defaults is None else defaults
    for verdict in TABLE:
        if verdict.kind is not Kind.NO_EFFECT or not verdict.here(context):
            continue
        for setting, value in leaves({verdict.setting: context.get(verdict.setting)}):
            usual = _usual(setting, defaults, context)
            is_usual = value is None or usual is None or value in (*verdict.quiet, *usual)
            if not is_usual and verdict_of(setting, context) is verdict:
                found.setdefault(verdict.advice, []).append(f"{setting}={render(value)}")
    if unknown := [f"{setting}={render(value)}" for setting, value in _unknown(context, defaults)]:
        found["neither verl nor this package reads such a setting; only code of yours may"] = unknown
    for advice, settings in found.items():
        yield f"{', '.join(settings)} {'have' if len(settings) > 1 else 'has'} no effect: {advice}"


def _unknown(context: RuleContext, defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each setting that neither verl nor this package has."""
    yield from ((name, value) for name, value in context.config.items() if name not in BY_SETTING)
    for section in UNTYPED if defaults else ():
        given, known = context.get(section), defaults.get(section)
        if isinstance(given, Mapping) and isinstance(known, Mapping):
            yield from _added(given, known, f"{section}.")
    for section in ("actor_rollout_ref", "ray_kwargs") if defaults else ():
        given, known = context.get(section), defaults.get(section)
        if isinstance(given, Mapping) and isinstance(known, Mapping):
            yield from ((f"{section}.{name}", value) for name, value in given.items() if name not in known)


def _added(given: Mapping[str, Any], known: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the section ``given`` that are not in ``known``; ``above`` is their names' prefix."""
    for name, value in given.items():
        setting, usual = f"{above}{name}", known.get(name)
        if name not in known and value is not None and setting not in READ and setting not in BY_SETTING:
            yield setting, value
        elif isinstance(value, Mapping) and isinstance(usual, Mapping) and usual and setting not in TYPED:
            yield from _added(value, usual, f"{setting}.")


def _usual(setting: str, defaults: Mapping[str, Any], context: RuleContext) -> tuple[Any, ...] | None:
    """Return a setting's default value in a tuple of length 1, or None if the default is not known.

    The default is not known where verl computes it from several other settings.
    """
    section, _, name = setting.rpartition(".")
    if section in SECTIONS and (own := settings_of(SECTIONS[section]).get(name)) is not None:
        return (own.default,)
    if setting in UNREAD_OF_STOCK:
        return (UNREAD_OF_STOCK[setting],)
    node: Any = defaults
    for part in setting.split("."):
        if isinstance(node, str) and node.startswith("${"):
            return None
        node = node.get(part) if isinstance(node, Mapping) else None
    if not (isinstance(node, str) and node.startswith("${")):
        return (node,)
    if (other := OTHER.fullmatch(node)) is None:
        return None
    value = context.get(f"{section}.{other[2]}" if other[1] else other[2])
    return None if value is None else (value,)


OTHER = re.compile(r"\$\{(?:oc\.select:)?(\.?)([\w.]+)(?:,[^{}]*)?\}")
"""Matches an interpolation in verl's configuration by which a setting defaults to the value of another setting."""


def leaves(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full dotted name and the value of each setting in a section."""
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def left_behind(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning, with any replacement, for each setting of the old section `reward_model` that verl drops."""
    for setting, value in leaves({"reward_model": config.get("reward_model")}):
        moved = (*OLDER, *OF_LOOPS, "reward_model.rollout")
        if value not in (None, {}) and not any(f"{setting}.".startswith(f"{old}.") for old in moved):
            now = next((now for old, now in NOW.items() if setting.startswith(f"{old}.")), None)
            advice = f"set {now}" if now else "neither verl nor this package has such a setting"
            yield f"{setting}={render(value)} has no effect: {advice}"


def beside_others(context: RuleContext) -> Iterator[str]:
    """Yield warnings about settings that have no effect because of the values of other settings."""
    estimator = context.get("algorithm.adv_estimator")
    if context.get("algorithm.use_pf_ppo") and estimator != "gae":
        yield f"algorithm.use_pf_ppo=true has no effect: verl resamples with adv_estimator=gae alone, not {estimator}"
    path, mode = context.get("trainer.resume_from_path"), context.get("trainer.resume_mode")
    if path and mode != "resume_path":
        yield f"trainer.resume_from_path={path} has no effect with trainer.resume_mode={mode}: set resume_path"
    profiler = f"{ROLLOUT}.profiler"
    tool = context.get(f"{profiler}.tool")
    if context.get("global_profiler.steps") and context.get(f"{profiler}.enable"):
        if tool not in ("torch", "npu"):
            yield f"{profiler}.enable=true has no effect: verl profiles rollout engines with torch or npu, not {tool}"
        elif not context.get(f"{profiler}.tool_config.{tool}.discrete"):
            needed = f"{profiler}.tool_config.{tool}.discrete=true"
            yield f"{profiler}.enable=true has no effect: verl profiles rollout engines with {needed} alone"
