# SPDX-License-Identifier: Apache-2.0
"""Runs on clusters of two and four Ray nodes, of which some are lost and others join.

The nodes are raylets with addresses of their own on loopback; test_partition.py has nodes in namespaces.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from drilled_run import DrilledRun, drilled
from main_runs import FULLY_ASYNC, RAY_FOLDER, FinishedRun, small, trainer_log
from ray_nodes import Loopback, Nodes, closing
from surroundings import shared_forks, usual_environment

from recipe.async_engine.config.placement import REPLICA_CPUS
from recipe.laptop.task import TaskPaths

END_S = 60.0
ENDLESS = 100_000
LONG_S = 900.0
RESTARTED, SERVERS = "fully_async/count/agent_loop_worker_restarts", "model_engine_server/servers"
LIVE, AGENTS = "fully_async/count/live_replicas", "fully_async/count/live_agent_loop_workers"
SEALED, ANNOUNCED = "fully_async/count/current_param_version", "fully_async/count/announced_version"
SWITCHES = "fully_async/lending/switches"
UP = "is up, and joins next"


def on(nodes: Nodes, overrides: list[str]) -> list[str]:
    """Of a run on this cluster, whose processes are forks: its Ray has a folder already."""
    forks = shared_forks(usual_environment())
    own = [item for item in overrides if "_temp_dir" not in item]
    return [*own, f"ray_kwargs.ray_init.runtime_env.py_executable={forks}"]


def joining(nodes: Nodes) -> list[str]:
    return ["env", f"RAY_ADDRESS={nodes.ray_address}"]


def newest(run: DrilledRun, column: str) -> float:
    steps = run.steps()
    return steps[-1][column] if steps else -1.0


def wait_until_used(run: DrilledRun, nodes: Nodes, live: int, timeout_s: float = LONG_S) -> None:
    """Until a new node's replica serves, with which there are ``live``.

    It gets the first version that is begun after it is up.
    """
    run.wait_for(lambda: UP in trainer_log([f"{RAY_FOLDER}={nodes.folder}"]), "a replica that is up", timeout_s)
    # One version may be on its way to the others, which the newest line may not know yet.
    known = newest(run, SEALED) + 2
    run.wait_for(lambda: newest(run, LIVE) == live, "a replica on the new node", timeout_s)
    lost = max(number for number, step in enumerate(run.steps()) if step[LIVE] < live)
    assert run.steps()[lost + 1][ANNOUNCED] <= known


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.chaos
def test_run_goes_on_without_a_node_that_is_lost_and_uses_one_that_joins(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    """With a preset, whose sizes of a Ray of its own Ray would refuse here, by RAY_ADDRESS."""
    folder = tmp_path / "run"
    with closing(Loopback(ray_dir)) as nodes:
        nodes.add(accelerators=2)
        lost = nodes.add(accelerators=1)
        overrides = on(
            nodes,
            [
                *small(task, folder, ray_dir),
                "rollout.n_gpus_per_node=2",
                "actor_rollout_ref.rollout.agent.num_workers=2",
                "reward.num_workers=2",
                "async_training.max_replica_restarts=1",
                f"trainer.total_training_steps={ENDLESS}",
            ],
        )
        with drilled(FULLY_ASYNC, overrides, folder, before=joining(nodes)) as run:
            run.wait_for_steps(2)
            assert (newest(run, LIVE), newest(run, AGENTS)) == (2, 2)
            log = [f"{RAY_FOLDER}={nodes.folder}"]
            nodes.kill(lost)
            run.wait_for(lambda: newest(run, LIVE) == 1, "the loss of a replica")
            run.wait_for(lambda: "tried again at each weight sync" in trainer_log(log), "an attempt in vain")
            nodes.add(accelerators=1)
            wait_until_used(run, nodes, live=2)
            assert newest(run, AGENTS) == 2
            run.signal("main", signal.SIGTERM)
            ended = run.end_within(END_S)
    check_stopped(ended)
    assert ended.summary["ledger"]["trained"] == 4 * ended.summary["steps"]
    assert ended.metrics[-1]["fully_async/count/restarts"] == 1
    assert "num_cpus, num_gpus, object_store_memory" in ended.output


def check_stopped(ended: FinishedRun) -> None:
    """By a signal, with nothing lost."""
    assert ended.returncode == 128 + signal.SIGTERM, ended.output[-3000:]
    assert ended.summary["error"] is None
    ledger = ended.summary["ledger"]
    assert ledger["issued"] == sum(ledger[key] for key in ("trained", "filtered", "failed", "live"))
    assert ledger["failed"] == 0


def learning(folder: Path) -> list[str]:
    """Overrides of the preset's own run on the built-in task, 100 steps, on four nodes."""
    return [
        "preset=tiny_cpu",
        f"trainer.default_local_dir={folder}",
        f"hydra.run.dir={folder}/hydra",
        "actor_rollout_ref.rollout.agent.num_workers=4",
        "reward.num_workers=4",
        "async_training.max_replica_restarts=1",
    ]


def check_learned(ended: FinishedRun) -> None:
    assert ended.returncode == 0, ended.output[-3000:]
    summary = ended.summary
    assert (summary["error"], summary["steps"], summary["ledger"]["failed"]) == (None, 100, 0)
    assert summary["ledger"]["trained"] == 1600
    assert summary["validation"]["first"] <= 0.5 and summary["validation"]["last"] >= 0.9


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
def test_on_four_nodes_a_mode_learns_while_one_is_lost_and_another_joins(
    mode: str, tmp_path: Path, ray_dir: Path
) -> None:
    """The trainer and a replica on the first node, a replica on each of the others, agent loops and rewards on all."""
    folder = tmp_path / "run"
    with closing(Loopback(ray_dir)) as nodes:
        nodes.add(accelerators=2)
        _, lost, _ = (nodes.add(accelerators=1) for _ in range(3))
        overrides = on(nodes, [*learning(folder), "rollout.n_gpus_per_node=4"])
        with drilled(f"recipe.{mode}.main", overrides, folder, before=joining(nodes)) as run:
            run.wait_for_steps(20, LONG_S)
            assert (newest(run, LIVE), newest(run, AGENTS)) == (4, 4)
            nodes.kill(lost)
            run.wait_for(lambda: newest(run, LIVE) == 3, "the loss of a replica", LONG_S)
            nodes.add(accelerators=1)
            wait_until_used(run, nodes, live=4)
            assert newest(run, AGENTS) == 4
            ended = run.end_within(LONG_S)
    check_learned(ended)
    assert ended.metrics[-1]["fully_async/count/restarts"] == 1


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_on_four_nodes_accelerators_of_two_are_lent_while_a_standalone_replica_is_lost_and_joins_again(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    """Training ranks with hybrid replicas on two nodes, and a standalone replica on each of the others."""
    folder = tmp_path / "run"
    with closing(Loopback(ray_dir)) as nodes:
        nodes.add(accelerators=1)
        nodes.add(accelerators=1)
        # Too few CPUs for a training rank.
        _, lost = (nodes.add(accelerators=1, cpus=REPLICA_CPUS) for _ in range(2))
        lends = ["async_training.placement=elastic", "trainer.nnodes=2", "rollout.n_gpus_per_node=2"]
        # Too few places for all answers, so that some wait for those of the hybrid replicas.
        lends += ["actor_rollout_ref.rollout.max_num_seqs=4", "async_training.concurrent_samples_per_replica=null"]
        more = ["async_training.max_replica_restarts=1", f"trainer.total_training_steps={ENDLESS}"]
        overrides = on(nodes, [*small(task, folder, ray_dir), *lends, *more])
        with drilled(FULLY_ASYNC, overrides, folder, before=joining(nodes)) as run:
            run.wait_for(lambda: newest(run, SWITCHES) > 0, "a loan", LONG_S)
            nodes.kill(lost)
            run.wait_for(lambda: newest(run, LIVE) == 1, "the loss of a replica", LONG_S)
            nodes.add(accelerators=1)
            wait_until_used(run, nodes, live=2)
            run.signal("main", signal.SIGTERM)
            ended = run.end_within(END_S)
    check_stopped(ended)
    assert ended.metrics[-1]["fully_async/count/restarts"] == 1


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_on_four_nodes_partial_rollout_learns_without_one_that_had_agent_loops_and_ends_by_name_without_a_rank(
    tmp_path: Path, ray_dir: Path
) -> None:
    """Ranks with their engines on the first two nodes, agent loops and rewards on all four."""
    folder = tmp_path / "run"
    with closing(Loopback(ray_dir)) as nodes:
        nodes.add(accelerators=1)
        with_rank = nodes.add(accelerators=1)
        _, lost = nodes.add(accelerators=0), nodes.add(accelerators=0)
        overrides = on(nodes, [*learning(folder), "trainer.nnodes=2", "trainer.save_freq=100"])
        with drilled("recipe.partial_rollout.main", overrides, folder, before=joining(nodes)) as run:
            run.wait_for_steps(20, LONG_S)
            assert (newest(run, LIVE), newest(run, AGENTS)) == (2, 4)
            nodes.kill(lost)
            run.wait_for(lambda: newest(run, RESTARTED) == 1, "an agent-loop worker that is started again", LONG_S)
            nodes.add(accelerators=0)
            ended = run.end_within(LONG_S)
        check_learned(ended)
        # The same command goes on from the checkpoint; Ray's job is the cluster's second, so nothing is a fork.
        plain = f"ray_kwargs.ray_init.runtime_env.py_executable={sys.executable}"
        longer = [*overrides[:-1], plain, f"trainer.total_training_steps={ENDLESS}"]
        with drilled("recipe.partial_rollout.main", longer, folder, before=joining(nodes)) as run:
            run.wait_for_steps(2, LONG_S)
            nodes.kill(with_rank)
            ended = run.end_within(LONG_S)
    assert ended.returncode == 1
    assert ended.summary["error"]["name"] == "CannotGoOn", ended.summary["error"]
    assert "training worker 1 (" in ended.summary["error"]["message"]


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.slow
def test_node_with_a_log_prob_server_and_workers_is_replaced_and_the_last_replicas_ends_the_run_by_name(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    """The server has two ranks and only one node has room for it; replica and trainer have a node each."""
    folder = tmp_path / "run"
    with closing(Loopback(ray_dir)) as nodes:
        # Ray takes the node that has most left: the trainer's process and rank are here.
        nodes.add(accelerators=1, cpus=40)
        with_replica = nodes.add(accelerators=1, cpus=6)
        with_server = nodes.add(accelerators=2)
        overrides = on(
            nodes,
            [
                *small(task, folder, ray_dir),
                "model_engine_server=fsdp2",
                "model_engine_server.n_gpus_per_node=2",
                "actor_rollout_ref.rollout.agent.num_workers=3",
                "reward.num_workers=3",
                f"trainer.total_training_steps={ENDLESS}",
            ],
        )
        with drilled(FULLY_ASYNC, overrides, folder, before=joining(nodes)) as run:
            run.wait_for_steps(2)
            assert (newest(run, SERVERS), newest(run, AGENTS)) == (1, 3)
            nodes.kill(with_server)
            run.wait_for(lambda: newest(run, SERVERS) == 0, "the loss of the log-prob server")
            run.wait_for(lambda: newest(run, RESTARTED) == 1, "an agent-loop worker that is started again")
            run.wait_for_steps(2)
            # The trainer does the server's work.
            assert newest(run, "model_engine_server/fallback_rows") > 0
            nodes.add(accelerators=2)
            run.wait_for(lambda: newest(run, SERVERS) == 1, "another log-prob server", LONG_S)
            run.wait_for(lambda: newest(run, "model_engine_server/fallback_rows") == 0, "that it answers")
            nodes.kill(with_replica)
            ended = run.end_within(LONG_S)
    assert ended.returncode == 1
    assert ended.summary["error"]["name"] == "NoReplicaLeft", ended.summary["error"]


@pytest.mark.e2e
@pytest.mark.vllm("a replica of SGLang over several nodes is refused")
@pytest.mark.slow
def test_a_replica_over_two_nodes_generates_with_the_weights_that_reach_both(
    task: TaskPaths, tmp_path: Path, ray_dir: Path
) -> None:
    """Tensor parallel over an engine's worker on each of them; no node has room for another part of the run."""
    with closing(Loopback(ray_dir)) as nodes:
        for _ in range(3):
            nodes.add(accelerators=1)
        rollout = "actor_rollout_ref.rollout"
        overrides = on(
            nodes,
            [
                *small(task, tmp_path / "run", ray_dir),
                "rollout.nnodes=2",
                f"{rollout}.tensor_model_parallel_size=2",
                f"{rollout}.engine_kwargs.vllm.distributed_executor_backend=mp",
                "async_training.staleness_threshold=0",
                "trainer.total_training_steps=4",
            ],
        )
        with drilled(FULLY_ASYNC, overrides, tmp_path / "run", before=joining(nodes)) as run:
            ended = run.end_within(LONG_S)
    assert ended.returncode == 0, ended.output[-3000:]
    assert ended.summary["error"] is None
    # Each batch is on policy: the engine's log-probs are the trainer's, so both parts have its weights of each version.
    assert all(difference < 1e-5 for difference in ended.column("rollout_corr/log_ppl_abs_diff"))
