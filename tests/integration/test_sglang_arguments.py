# SPDX-License-Identifier: Apache-2.0
"""The list of refused arguments of SGLang fits the installed SGLang, and verl's server of it."""

from __future__ import annotations

import dataclasses
import inspect

import verl.workers.config  # noqa: F401  # It prepares a CPU for SGLang.
from verl.workers.rollout.sglang_rollout.async_sglang_server import ServerArgs, SGLangHttpServer

from recipe.async_engine.config.sglang_arguments import OF_SETTINGS, REFUSED
from recipe.async_engine.config.verdicts import INSTEAD


def test_refused_arguments_are_sglangs_and_its_own_values_are_accepted() -> None:
    own = {field.name: field.default for field in dataclasses.fields(ServerArgs)}
    refused = {name: refusal for refusal in REFUSED for name in refusal.names.split()}
    assert set(refused) <= set(own)
    # verl passes values of its own for these.
    for name in refused.keys() - OF_SETTINGS.keys() - {"skip_server_warmup"}:
        assert not refused[name].refuses(own[name]), (name, own[name])


def test_verls_server_takes_these_arguments_from_its_settings() -> None:
    source = inspect.getsource(SGLangHttpServer.launch_server)
    assert [name for name in (*OF_SETTINGS, "skip_server_warmup") if f'"{name}": ' not in source] == []


def test_verls_server_reads_no_setting_that_is_said_to_have_no_effect() -> None:
    source = inspect.getsource(SGLangHttpServer)
    assert [name for name in INSTEAD if f"config.{name}" in source or f'"{name}"' in source] == []
    assert "config.max_model_len" in source
