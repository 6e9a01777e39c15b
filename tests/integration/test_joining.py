# SPDX-License-Identifier: Apache-2.0
"""What a main makes of the settings for Ray: a cluster to join, variables for its processes, secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from verl.utils.tracking import RLInsightLogger

from recipe.async_engine.run import driver, ray_start
from recipe.async_engine.run.detect import Machine, cluster_to_join


@pytest.mark.parametrize(
    ("environ", "address", "joins"),
    [
        ({}, None, False),
        ({}, "auto", True),
        ({}, "local", False),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, None, True),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, "local", False),
        ({"RAY_ADDRESS": "local"}, None, False),
        ({"RAY_ADDRESS": " "}, None, False),
    ],
)
def test_a_cluster_is_joined_where_the_setting_or_rays_variable_names_one(
    environ: dict[str, str], address: str | None, joins: bool
) -> None:
    assert (cluster_to_join(environ, Machine(), address) is not None) == joins


def test_what_describes_a_ray_of_its_own_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(ray_start.logger, "warning", lambda text, *arguments: warned.append(text % arguments))
    ray_init = OmegaConf.create({"num_cpus": 40, "num_gpus": 4, "object_store_memory": 10**9, "log_to_driver": False})
    ray_init["address"] = "auto"
    ray_start.leave_out_resources(ray_init, "RAY_ADDRESS=10.0.0.1:6379")
    assert OmegaConf.to_container(ray_init) == {"log_to_driver": False, "address": "auto"}
    assert len(warned) == 1 and "num_cpus, num_gpus, object_store_memory" in warned[0]


def test_variables_that_the_submitted_job_has_are_not_set_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "2"}}}
    monkeypatch.setenv(RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps(job))
    assert ray_start._not_the_jobs({"OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu"}) == {"VERL_PLATFORM": "cpu"}


def test_variables_are_taken_out_of_the_configuration_and_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_OUTSIDE", "hunter2")
    variables: dict[str, Any] = {"KEY": "${oc.env:FROM_OUTSIDE}", "COUNT": 3, "UNSET": None}
    config = OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(tmp_path)},
            "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": variables}}},
        }
    )
    OmegaConf.set_struct(config, True)
    driver._write_settings(config)
    written = (tmp_path / driver.SETTINGS_FILE).read_text()
    assert "KEY: (hidden)" in written and "hunter2" not in written
    assert ray_start.take_environment(config) == {"KEY": "hunter2", "COUNT": "3"}


@pytest.mark.parametrize("loggers", ["rl_insight", ["console", "rl_insight"]])
def test_rl_insight_is_enabled_in_every_process_as_by_verls_main(loggers: Any) -> None:
    config = OmegaConf.create({"trainer": {"logger": loggers}, "ray_kwargs": {"ray_init": {"runtime_env": None}}})
    assert ray_start.take_environment(config) == {RLInsightLogger.ENABLE_ENV: "1"}
    assert "hunter2" not in repr(OmegaConf.to_container(config, resolve=True))
