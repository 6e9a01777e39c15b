# SPDX-License-Identifier: Apache-2.0
"""A configuration that is written down has no secrets, and is otherwise unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.config.secrets import HIDDEN, without_secrets

MARK = "hunter2-marker"


@pytest.mark.parametrize(
    "settings",
    [
        {"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"ANY_NAME": MARK}}}}},
        {"reward": {"reward_kwargs": {"api_key": MARK, "openai_apikey": MARK}}},
        {"tracker": {"WANDB_API_KEY": MARK, "auth-token": MARK, "Password": MARK}},
        {"storage": {"access_key": MARK, "secret_key": MARK, "client_secret": MARK, "credentials": MARK}},
        {"sandbox_fusion": {"url": f"https://user:{MARK}@host:8080/run"}},
        {"urls": [f"http://{MARK}@host/", {"token": MARK}]},
        {"tokens": {"token": [MARK, MARK]}},
    ],
)
def test_secrets_are_hidden_wherever_they_stand(settings: dict[str, Any]) -> None:
    assert MARK not in repr(without_secrets(settings))


def test_everything_else_stays() -> None:
    settings = {
        "max_tokens": 5,
        "token": None,
        "prompt_key": "prompt",
        "tokenizer": "path",
        "pad_token_id": 3,
        "url": "http://host:80/a@b",
        "list": [1, 2.5, True],
    }
    assert without_secrets(settings) == settings


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(MARK),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=10,
)


@given(PLAIN)
def test_no_value_of_an_environment_variable_is_left_however_deep(value: Any) -> None:
    hidden = without_secrets({"x": [{"env_vars": {"NAME": value}}]})
    assert hidden == {"x": [{"env_vars": {"NAME": HIDDEN}}]}
