# SPDX-License-Identifier: Apache-2.0
"""What a main does of verl's profiling, as stock verl's (main_ppo.py:76, 95).

The trainer's process runs under Nsight Systems, and Ray's timeline is written to a file. Shown by
tests/integration/test_profiled.py.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf

logger = logging.getLogger(__name__)


def under_nsight(config: DictConfig) -> dict[str, Any]:
    """Options of the trainer's actor, by which Ray starts it under Nsight Systems; empty unless that is asked for."""
    profiler = config.global_profiler
    if config.trainer.device != "cuda" or profiler.tool != "nsys" or not profiler.steps:
        return {}
    options = OmegaConf.to_container(profiler.global_tool_config.nsys.controller_nsight_options, resolve=True)
    return {"runtime_env": {"nsight": options}}


def write_timeline(config: DictConfig) -> None:
    """Write the timeline of Ray's tasks to ``ray_kwargs.timeline_json_file``, if there is one."""
    file = config.ray_kwargs.get("timeline_json_file")
    if file and ray.is_initialized():
        try:
            ray.timeline(filename=str(file))
        except Exception as error:  # whatever Ray or the disk has: the run is over, and costs nothing more
            logger.warning("ray_kwargs.timeline_json_file=%s could not be written: %r", file, error)
