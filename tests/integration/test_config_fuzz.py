# SPDX-License-Identifier: Apache-2.0
"""Random values of random settings: every combination is accepted, or refused with messages that name the settings."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from recipe.async_engine.config.problems import ConfigError
from recipe.async_engine.config.rules.context import RuleContext
from recipe.async_engine.config.rules.learning import LIMITS
from recipe.async_engine.config.sections import SECTIONS, read_settings
from recipe.async_engine.config.validation import RULES
from recipe.async_engine.config.verl_types import ACTOR, ROLLOUT, expected
from recipe.async_engine.inspection.check import check, file_facts, look, plain
from recipe.async_engine.inspection.verl_check import verl_problems
from recipe.async_engine.outside import MODES
from recipe.laptop.task.tokenizer import build_tokenizer
from recipe.mains import run
from recipe.mains.plan_only import JUDGES

NAMED = re.compile(r"[A-Za-z_0-9]+(\.[^.=]+)*")
DEEP_SECTION: dict[str, Any] = {}
DEEP_LIST: list[Any] = []
for _ in range(150):
    DEEP_SECTION, DEEP_LIST = {"a": DEEP_SECTION}, [DEEP_LIST]
ODD = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 10**9, 10**30, -(10**30), 0.0, -0.0, 0.5, -0.5, 1.5, 1e-300, 1e300),
    *(float("inf"), float("-inf"), float("nan"), "", " ", "x", "1", "-1", "1e-6", "null", "true", "${x}", "é\0\n"),
    *("vllm", "fsdp2", "megatron", "grpo", "gae", "cpu", "cuda", "recipe_gloo", "/no/such", "~", "x" * 100_000),
    *([], [1], [None], [{}], [[]], ["a.parquet"], [1] * 10_000, {}, {"a": 1}, {"": None}, {"a.b": {}}),
    *(DEEP_SECTION, DEEP_LIST),
)
ADDED = ("a", "_target_", "n", "recipe", "enable", "name")
EACH = 500


@pytest.fixture(scope="module", params=MODES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a whole configuration that runs."""
    folder = tmp_path_factory.mktemp("fuzz")
    build_tokenizer().save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text("{}")
    row = {"data_source": "s", "prompt": [{"role": "user", "content": "sort 1"}], "reward_model": {"ground_truth": "1"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 64), folder / "data.parquet")
    (folder / "reward.py").write_text("def compute_score(**kwargs):\n    return 0.0\n")
    overrides = [
        "preset=tiny_cpu",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'data.parquet'}",
        f"data.val_files={folder / 'data.parquet'}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
    ]
    GlobalHydra.instance().clear()
    with initialize_config_module(f"recipe.{request.param}.config", version_base=None):
        config = plain(compose(f"{request.param}_ppo_trainer", overrides=overrides))
    check(config, judges=JUDGES)
    return config


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def settings_of(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every setting and every section of a configuration."""
    for name, value in section.items():
        yield (*above, name)
        if isinstance(value, Mapping):
            yield from settings_of(value, (*above, name))


def an_odd_one(base: Mapping[str, Any], chance: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a configuration with some settings changed, left out or added, and these changes."""
    changes: dict[str, Any] = {}
    config = dict(base)
    everything = BY_BASE.setdefault(id(base), list(settings_of(base)))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        path = chance.choice(everything) + ((chance.choice(ADDED),) if chance.random() < 0.15 else ())
        *parents, last = path
        node: Any = config
        for parent in parents:
            child = node.get(parent)
            if not isinstance(child, dict):
                break
            node[parent] = dict(child)
            node = node[parent]
        else:
            if chance.random() < 0.1:
                node.pop(last, None)
                changes[".".join(path)] = "left out"
            else:
                node[last] = changes[".".join(path)] = chance.choice(ODD)
    return config, changes


BY_BASE: dict[int, list[tuple[str, ...]]] = {}


def judge_odd_ones(base: Mapping[str, Any], count: int, seed: int, with_types: int) -> tuple[int, int]:
    """Return how many are accepted and how many refused; verl's types are built for the first ``with_types``."""
    chance = random.Random(seed)
    accepted = refused = 0
    for number in range(count):
        config, changes = an_odd_one(base, chance)
        said = {setting: repr(value)[:80] for setting, value in changes.items()}
        try:
            found = look(config, with_verl=False, judges=JUDGES)
            if not found.problems and accepted < with_types:
                found.problems.extend(verl_problems(found.context, []))
            plan = None if found.problems else found.plan
        except ConfigError as error:  # Nothing limits the number of steps.
            found.problems.extend(error.problems)
            plan = None
        except Exception as error:
            raise AssertionError(f"number {number} of seed {seed}, {said}") from error
        for problem in found.problems:
            assert NAMED.fullmatch(problem.setting), (said, str(problem)[:500])
            assert problem.allowed and problem.advice and str(problem), (said, problem)
        if plan is not None:
            assert plan.total_steps >= 1 and plan.rollout_replicas >= 1, said
            assert plan.pipeline_depth <= plan.max_staleness, said
        accepted, refused = accepted + (plan is not None), refused + (plan is None)
    return accepted, refused


def test_every_odd_configuration_is_accepted_or_refused_by_name(base: dict[str, Any]) -> None:
    accepted, refused = judge_odd_ones(base, EACH // len(MODES) + 1, seed=0, with_types=3)
    assert min(accepted, refused) >= EACH // 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 41))
def test_many_odd_configurations_are_accepted_or_refused_by_name(base: dict[str, Any], seed: int) -> None:
    """All seeds and modes together judge 20,000 configurations."""
    accepted, refused = judge_odd_ones(base, EACH // len(MODES) + 1, seed, with_types=EACH)
    assert min(accepted, refused) >= EACH // 20


# Settings that are read although verl's configuration gives them no type: thresholds and other numbers with limits of
# their own, settings that only matter if they are set, and the engine's name, for which a rule accepts one value.
WITHOUT_TYPE = re.compile(
    r"ray_kwargs\.ray_init\.runtime_env\..*|.*_threshold|.*\.kv_cache_dtype|.*\.(ppo_mini_batch_size|policy_loss\.dro_beta)"
    r"|critic\.ulysses_sequence_parallel_size|actor_rollout_ref\.rollout\.name"
    r"|.*\.engine_kwargs\.vllm\..*"  # refused whatever the type, with but a few values
)


class Read(Mapping[str, Any]):
    """A section that remembers which settings were asked for."""

    def __init__(self, section: Mapping[str, Any], seen: set[str], above: str = "") -> None:
        self._section, self._seen, self._above = section, seen, above

    def __getitem__(self, name: str) -> Any:
        self._seen.add(f"{self._above}{name}")
        value = self._section[name]
        return Read(value, self._seen, f"{self._above}{name}.") if isinstance(value, Mapping) else value

    def __contains__(self, name: object) -> bool:
        self._seen.add(f"{self._above}{name}")
        return name in self._section

    def __iter__(self) -> Iterator[str]:
        return iter(self._section)

    def __len__(self) -> int:
        return len(self._section)


def test_every_setting_of_verls_that_is_read_has_a_type(base: dict[str, Any]) -> None:
    read: set[str] = set()
    settings, _ = read_settings(base)
    files = file_facts(Read(base, read))
    context = RuleContext(Read(base, read), settings, 64, None, files)
    assert [str(problem) for rule in RULES for problem in rule(context)] == []
    limited = LIMITS.keys() | {f"{section}.ppo_epochs" for section in ("critic", ACTOR)}
    limited |= {f"{section}.optim.clip_grad" for section in ("critic", ACTOR)} | {f"{ROLLOUT}.top_k"}
    own = (*SECTIONS, "plan_only", "rehearse_only")
    untyped = {setting for setting in read - expected().keys() - limited if not setting.startswith(own)}
    assert {setting for setting in untyped if not WITHOUT_TYPE.fullmatch(setting)} == set()


def changed(section: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**section, first: changed(section[first], tuple(rest), value) if rest else value}


def test_paths_that_no_system_takes_are_refused_by_name_or_not_looked_at(base: dict[str, Any]) -> None:
    of_paths = [path for path in settings_of(base) if re.search(r"path|files|_dir|start_from", path[-1])]
    refused = set()
    for path in of_paths:
        for odd in ("x" * 300, "/" + "x" * 300, "x/" * 3000, "a\0b", "/dev/null/x"):
            name, problems = ".".join(path), look(changed(base, path, odd), with_verl=False).problems
            assert all(problem.allowed and problem.advice for problem in problems)
            refused |= {problem.setting for problem in problems} & {name}
    assert len(refused) >= 10


def test_fuzz_reaches_both_outcomes(base: dict[str, Any]) -> None:
    assert look({**base, "trainer": {**base["trainer"], "save_freq": 3}}).problems == []
    (problem,) = look({**base, "trainer": {**base["trainer"], "save_freq": "x"}}).problems
    assert problem.setting == "trainer.save_freq"


@pytest.mark.parametrize(
    ("value", "words"),
    [("${oc.env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"), ("${nowhere.else}", "nowhere.else"), ("???", "Missing")],
)
def test_a_main_names_a_setting_that_refers_to_nothing(
    value: str, words: str, base: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = OmegaConf.create({**base, "trainer": {**base["trainer"], "default_local_dir": value}})
    with pytest.raises(SystemExit) as ended:
        run.main(config, "fully_async")
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "ConfigError" in said and "trainer.default_local_dir" in said and words in said
