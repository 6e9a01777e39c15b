# SPDX-License-Identifier: Apache-2.0
"""What the log-prob servers did since they were last asked, as metrics.

A server that does not answer within a moment is left out and counted; nothing here waits for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

ANSWER_S = 2.0
PREFIX = "model_engine_server/"
SUMMED = ("batches", "sequences", "tokens", "answered_tokens", "late", "queued_s", "busy_s", "fill")


class ServerMeter:
    """Asks the servers after each step; what those that are gone by then have answered stays counted."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, Any]] = {}

    def read(self, servers: Mapping[str, Any], version: int) -> dict[str, float]:
        """Metrics of the servers' work since the last call, by actor handles; ``version``: the newest published one.

        Means over what was scored: seconds in the queue, share of a full batch, tokens a second of computing. The
        largest version lag, the difference of computed tokens between the busiest server and the idlest as a share of
        their mean, and counts of the servers' lives so far.
        """
        asked = {name: server.account.remote() for name, server in servers.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
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
