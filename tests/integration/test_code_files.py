# SPDX-License-Identifier: Apache-2.0
"""Code that a configuration names and that is not there is refused before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_config_files import configured, message, paths

from recipe.async_engine.inspection.check import check
from recipe.async_engine.inspection.code_files import AGENT_LOOPS, DATASET, MODULES, TOOLS
from recipe.async_engine.inspection.node_probe import is_there

__all__ = ["paths"]
EXTERNAL, _, BACKEND = MODULES
ADAPTER, TOKENIZER = (f"actor_rollout_ref.model.{name}_path" for name in ("lora_adapter", "tokenizer"))
TOOL_LIST = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        (AGENT_LOOPS, "/no/loops.yaml", "It does not exist; correct the path."),
        (AGENT_LOOPS, "no/loops.yaml", "It does not exist; correct the path."),
        (TOOL_LIST, "/no/tools.yaml", "It does not exist; correct the path."),
        (TOOLS, "/no/tools.py", "an existing Python file"),
        (DATASET, "/no/dataset.py", "an existing Python file"),
        (TOKENIZER, "/no/tokenizer", "an existing folder, or a name on the hub"),
        (ADAPTER, "./no_adapter", "an existing folder, or a name on the hub"),
        (EXTERNAL, "no_such_module", "correct the name, install it, or put its folder on PYTHONPATH"),
        (EXTERNAL, "[json,no_such_module]", "no_such_module"),
        (BACKEND, "recipe.async_engine.weights.no_such_engine", "a module that can be imported here"),
        *((BACKEND, value, "allowed is a path or name, or null") for value in ("true", "3", "[]", "{}")),
    ],
)
def test_what_is_not_there_is_refused_by_its_setting(
    paths: dict[str, Path], setting: str, value: str, said: str
) -> None:
    text = message(configured(paths, more=[f"++{setting}={value}"]))
    assert setting in text and said in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- name: [", "cannot be read"),
        ("- {name: mine, _target_: no_such_module.Loop}", "names no_such_module.Loop, whose module cannot be found"),
        ("- {name: mine, _target_: json.no_such_part.Loop}", "names json.no_such_part.Loop"),
    ],
)
def test_list_of_agent_loops_that_cannot_be_used_is_refused(
    paths: dict[str, Path], tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "loops.yaml").write_text(content)
    assert said in message(configured(paths, more=[f"{AGENT_LOOPS}={tmp_path}/loops.yaml"]))


def test_what_is_there_is_taken_and_what_is_elsewhere_is_not_looked_at(paths: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "loops.yaml").write_text("- {name: mine, _target_: json.decoder.Loop}")
    (tmp_path / "tools.py").write_text("")
    more = [
        f"{AGENT_LOOPS}={tmp_path}/loops.yaml",
        f"++{TOOLS}={tmp_path}/tools.py",
        f"++{TOOL_LIST}=hdfs://there/tools.yaml",
        f"++{DATASET}=pkg://there.dataset",
        f"{TOKENIZER}=organization/tokenizer",
        f"{EXTERNAL}=json",
    ]
    assert check(configured(paths, more=more))


def test_modules_that_workers_may_have_from_elsewhere_are_not_looked_for(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, environment = f"{EXTERNAL}=no_such_module", "+ray_kwargs.ray_init.runtime_env"
    for given in (f"{environment}.working_dir=/there", f"{environment}.env_vars.PYTHONPATH=/there"):
        assert check(configured(paths, more=[missing, given]))
    (tmp_path / "no_such_module.py").write_text("")
    with monkeypatch.context() as changed:
        changed.setenv("PYTHONPATH", f"/nowhere:{tmp_path}")
        assert check(configured(paths, more=[missing]))
    assert "no_such_module" in message(configured(paths, more=[missing]))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert check(configured(paths, more=[missing]))


def test_a_module_is_found_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "never_run"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was run')")
    (package / "inside.py").write_text("raise AssertionError('it was run')")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_there("never_run") and is_there("never_run.inside")
    assert not is_there("never_run.other") and not is_there("never_run.inside.deeper") and not is_there("")
