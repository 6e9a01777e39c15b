# SPDX-License-Identifier: Apache-2.0
"""A weight sync from trainer to replicas through a checkpoint engine and the real publisher, on any device."""

from __future__ import annotations

import time

from engine_fleet import Engine, Fleet, Trainer, bits, make_weights

NCCL = "recipe.async_engine.weights.nccl_engine"
GLOO = "recipe.laptop.transfer.gloo_engine"


def engine_for(device: str, accelerators: int) -> Engine:
    """Return this package's `nccl` on a CPU or if each member has an accelerator, else `recipe_gloo`."""
    settings = {"timeout_s": 120.0, "connect_timeout_s": 60.0}
    if device == "cpu":
        return Engine("nccl", NCCL, settings, is_nccl=True)
    if accelerators >= 2:
        return Engine("nccl", NCCL, settings, device=device, accelerators=1)
    return Engine("recipe_gloo", GLOO, settings, device=device, accelerators=0.3)


def broadcast(engine: Engine, versions: int, receivers: int = 1) -> dict[str, float | str]:
    """Publish ``versions`` versions and check that all arrive bit for bit; return seconds and GB/s of the last one."""
    trainer = Trainer(engine, ranks=1)
    fleet = Fleet(engine, trainer, receivers, timeout_s=180.0)
    seconds = 0.0
    try:
        for version in range(1, versions + 1):
            began = time.monotonic()
            fleet.publisher.publish(version)
            seconds = time.monotonic() - began
            assert fleet.routed == [replica.replica_rank for replica in fleet.replicas]
            for replica in fleet.replicas:
                assert replica.ask("wrong_tensors") == []
                assert replica.ask("loaded") == bits(make_weights(version))
    finally:
        fleet.stop()
        trainer.stop()
    nbytes = engine.bytes_sent(versions)
    return {
        "engine": engine.backend,
        "seconds": round(seconds, 4),
        "gigabytes_per_second": round(nbytes / seconds / 1e9, 3),
    }
