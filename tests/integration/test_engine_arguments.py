# SPDX-License-Identifier: Apache-2.0
"""The lists of refused arguments fit the installed engines, and verl's servers of them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import verl.workers.config  # noqa: F401  # It prepares a CPU for SGLang.
from verl.workers.rollout.sglang_rollout.async_sglang_server import ServerArgs, SGLangHttpServer
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.engine.arg_utils import AsyncEngineArgs

from recipe.async_engine.config.engine_arguments import SGLANG, SGLANG_SETTINGS, VLLM, VLLM_SETTINGS, Refused
from recipe.async_engine.config.verdicts import INSTEAD


def defaults(arguments: Any) -> dict[str, Any]:
    fields = dataclasses.fields(arguments)
    return {
        field.name: field.default_factory() if callable(field.default_factory) else field.default for field in fields
    }


@pytest.mark.parametrize(
    ("refusals", "settings", "arguments"),
    [(SGLANG, [*SGLANG_SETTINGS, "skip_server_warmup"], ServerArgs), (VLLM, VLLM_SETTINGS, AsyncEngineArgs)],
    ids=["sglang", "vllm"],
)
def test_refused_arguments_are_the_engines_and_its_own_values_are_accepted(
    refusals: tuple[Refused, ...], settings: dict[str, str], arguments: Any
) -> None:
    own = defaults(arguments)
    refused = {name: refusal for refusal in refusals for name in refusal.names.split()}
    assert set(refused) <= set(own)
    # verl passes values of its own for `settings`.
    assert [name for name in refused.keys() - set(settings) if refused[name].refuses(own[name])] == []


@pytest.mark.parametrize(
    ("launch", "settings"),
    [
        (SGLangHttpServer.launch_server, [*SGLANG_SETTINGS, "skip_server_warmup"]),
        (vLLMHttpServer.launch_server, VLLM_SETTINGS.keys() - {"limit_mm_per_prompt"}),
    ],
    ids=["sglang", "vllm"],
)
def test_verls_server_takes_these_arguments_from_its_settings(launch: Any, settings: list[str]) -> None:
    source = inspect.getsource(launch)
    assert [name for name in settings if f'"{name}": ' not in source] == []


def test_verls_server_reads_no_setting_that_is_said_to_have_no_effect() -> None:
    source = inspect.getsource(SGLangHttpServer)
    assert [name for name in INSTEAD if f"config.{name}" in source or f'"{name}"' in source] == []
    assert "config.max_model_len" in source
