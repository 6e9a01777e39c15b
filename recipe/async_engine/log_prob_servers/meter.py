# SPDX-License-Identifier: Apache-2.0
"""Metrics of the work of the log-prob servers in each training step.

A server that does not answer within `TOLD_S` seconds is left out, so the trainer never waits longer than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from recipe.async_engine.core.deadlines import TOLD_S

PREFIX = "model_engine_server/"
SUMMED = ("batches", "sequences", "tokens", "answered_tokens", "late", "queued_s", "busy_s", "fill")


class ServerMeter:
    """Reads the servers' counts after each step. Totals include the last known counts of servers that have died."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, Any]] = {}

    def read(self, servers: Mapping[str, Any], version: int) -> dict[str, float]:
        """Return metrics of ``servers``, which maps the servers' names to their actor handles.

        ``queue_seconds_mean`` (per request), ``batch_fill`` (share of the largest allowed batch) and
        ``tokens_per_second`` (of computing time) are means since the last call. ``version_lag`` is the largest number
        of versions by which a server lags behind ``version``, the newest published one. ``load_imbalance`` is the
        difference in computed tokens between the most and the least loaded server, divided by the mean of all servers.
        ``answered_tokens`` and ``late_sequences`` are totals since the servers started. ``servers`` and ``waiting``
        (requests) are the present numbers.
        """
        asked = {name: server.account.remote() for name, server in servers.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=TOLD_S)
        now = {}
        for name, answer in asked.items():
            try:
                now[name] = ray.get(answer, timeout=0)
            except RayError:
                continue
        before = {name: self._before.get(name, {}) for name in now}
        work = {key: sum(account[key] - before[name].get(key, 0) for name, account in now.items()) for key in SUMMED}
        self._before |= now
        lags = [version - account["version"] for account in now.values() if account["version"] is not None]
        metrics: dict[str, float] = {
            "servers": len(now),
            "answered_tokens": sum(account["answered_tokens"] for account in self._before.values()),
            "late_sequences": sum(account["late"] for account in self._before.values()),
            "waiting": sum(account["waiting"] for account in now.values()),
        }
        computed = [account["tokens"] for account in now.values()]
        if sum(computed):
            metrics["load_imbalance"] = (max(computed) - min(computed)) * len(computed) / sum(computed)
        if lags:
            metrics["version_lag"] = max(lags)
        if work["batches"]:
            metrics["queue_seconds_mean"] = work["queued_s"] / work["sequences"]
            metrics["batch_fill"] = work["fill"] / work["batches"]
            metrics["tokens_per_second"] = work["tokens"] / work["busy_s"]
        return {PREFIX + name: value for name, value in metrics.items()}
