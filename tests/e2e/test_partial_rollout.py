# SPDX-License-Identifier: Apache-2.0
"""Training and generation in turns on the same accelerators: nothing unfinished is lost, cut, late or made twice."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from accounts import check_account
from main_runs import FinishedRun, decode_steps, run_main, small, trained_answers
from transformers import AutoTokenizer

from recipe.laptop.task import TaskPaths
from recipe.report.run import load

MAIN = "partial_rollout:recording_trainer.RecordingTrainer"
GROUPS, ANSWERS = 4, 4
BOUND = 4
LONG_PROMPT = 10
RESPONSE = 160
DECODE_STEP_S = 0.02


@pytest.fixture(autouse=True)
def slow_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_steps(monkeypatch, DECODE_STEP_S)


def turns(task: TaskPaths, folder: Path, ray_dir: Path, steps: int) -> list[str]:
    """Overrides for ``steps`` turns of 4 groups of 4 answers, on an engine whose decode steps take time."""
    return [
        *small(task, folder, ray_dir)[1:],
        "preset=tiny_cpu_long_tail",
        "data.shuffle=false",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=benchmarks.emulation.engine.EmulatedExtension",
        f"async_training.max_staleness={BOUND}",
        f"trainer.total_training_steps={steps}",
    ]


def kept_answers(state: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Tokens of the unfinished answers in a checkpoint, by the uid of their group."""
    uid_of = {row[0]: row[3] for row in state["ledger"]["live"]}
    kept: dict[str, list[list[int]]] = {}
    for group_id, group in state["groups"].items():
        for record in group["kept"]:
            if record is not None:
                tokens = [token for part in pickle.loads(record.answers) for token in part.answer.token_ids]
                kept.setdefault(uid_of[group_id], []).append(tokens)
    return kept


def accounted_tokens(run: FinishedRun) -> dict[str, int]:
    """What became of the tokens of interrupted answers, up to the newest checkpoint."""
    tokens = run.rollout_state()["interrupted_tokens"]
    assert tokens["cut"] == tokens["trained"] + tokens["lost"] + tokens["cached"]
    return tokens


@pytest.mark.e2e
def test_cached_work_survives_a_kill_and_no_kept_token_is_generated_again(
    long_tail_task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, crash = 10, 4
    folder, record = tmp_path / "run", tmp_path / "answers"
    monkeypatch.setenv("RECORD_FOLDER", str(record))
    monkeypatch.setenv("CRASH_AFTER_STEP", str(crash))
    overrides = [*turns(long_tail_task, folder, ray_dir, steps), "trainer.save_freq=1"]
    first = run_main(MAIN, overrides, folder)
    assert first.returncode == 1
    assert load(folder).account.closes, "as far as it had been written"
    state = first.rollout_state()
    assert (state["ledger"]["version"], state["ledger"]["trained"]) == (crash, crash * GROUPS)
    tokens = accounted_tokens(first)
    assert (tokens["cached"] > 0, tokens["lost"]) == (True, 0)
    kept = kept_answers(state)
    long_answers = kept[f"0-{LONG_PROMPT}"]
    assert max(len(answer) for answer in long_answers) > 10

    monkeypatch.setenv("CRASH_AFTER_STEP", "0")
    second = run_main(MAIN, overrides, folder)
    assert second.returncode == 0, second.output[-8000:]
    summary, trained = second.summary, trained_answers(record)
    assert (summary["steps"], summary["versions"]) == (steps, steps)
    total = steps * GROUPS
    assert summary["ledger"] == {"issued": total, "trained": total, "filtered": 0, "failed": 0, "live": 0}
    assert len(trained) == total * ANSWERS
    assert len({answer["uid"] for answer in trained}) == total

    # What was kept is the beginning of what was trained, and its tokens were given back, not sampled again.
    for uid, beginnings in kept.items():
        of_group = [answer["tokens"] for answer in trained if answer["uid"] == uid]
        for beginning in beginnings:
            of_group.remove(next(tokens for tokens in of_group if tokens[: len(beginning)] == beginning))
    given_back = sum(len(beginning) for beginnings in kept.values() for beginning in beginnings)
    assert second.column("fully_async/partial/restored_tokens")[-1] == given_back

    tokens = accounted_tokens(second)
    assert tokens == {"cut": tokens["trained"], "trained": tokens["trained"], "lost": 0, "cached": 0}
    assert tokens["trained"] > 0
    check_answers(trained, long_tail_task)
    assert check_account(second)["tokens"]["restored"] >= given_back


def check_answers(trained: list[dict[str, Any]], task: TaskPaths) -> None:
    """No token is past the bound, no answer was trained as it was when it was cut, and some have several versions."""
    end = AutoTokenizer.from_pretrained(task.model).eos_token_id
    for answer in trained:
        assert answer["tokens"][-1] == end or len(answer["tokens"]) == RESPONSE
        version = answer["step"] - 1
        assert all(version - BOUND <= sampled_by <= version for sampled_by in answer["versions"])
        assert answer["versions"] == sorted(answer["versions"])
    assert max(len(set(answer["versions"])) for answer in trained) > 1


@pytest.mark.e2e
@pytest.mark.slow
def test_a_loop_with_a_tool_gives_the_same_transcripts_interrupted_or_not(
    task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = tmp_path / "agent_loops.yaml"
    loops.write_text("- name: two_turns\n  _target_: tool_agent_loop.TwoTurnLoop\n")

    def transcripts(name: str, *settings: str) -> tuple[FinishedRun, dict[str, list[int]]]:
        folder = tmp_path / name
        monkeypatch.setenv("RECORD_FOLDER", str(folder / "answers"))
        overrides = [
            *turns(task, folder, ray_dir, steps=6),
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=two_turns",
            # Weights that stay the same, so that every version gives the same greedy answers.
            "actor_rollout_ref.actor.optim.lr=0",
            # Fewer slots than groups in flight: trajectories are at different places when a turn ends.
            "async_training.concurrent_samples_per_replica=5",
            *settings,
        ]
        run = run_main(MAIN, overrides, folder)
        assert run.returncode == 0, run.output[-8000:]
        found: dict[str, list[int]] = {}
        for answer in trained_answers(folder / "answers"):
            assert found.setdefault(answer["uid"], answer["tokens"]) == answer["tokens"], "greedy answers are equal"
        return run, found

    whole, uninterrupted = transcripts(
        "synchronous", "async_training.staleness_threshold=0", "async_training.max_staleness=0"
    )
    cut, interrupted = transcripts("interrupted")
    assert whole.column("partial_rollout/interruptions")[-1] == 0
    assert cut.column("partial_rollout/interrupted_in_tools")[-1] > 0
    assert cut.column("partial_rollout/cut_tokens")[-1] > 0
    both = uninterrupted.keys() & interrupted.keys()
    assert len(both) >= 12
    assert {uid: interrupted[uid] for uid in both} == {uid: uninterrupted[uid] for uid in both}
    # Both turns' tokens and the tool's between them.
    assert {len(tokens) for tokens in interrupted.values()} == {12 + 4 + 12}


@pytest.mark.e2e
def test_two_ranks_share_with_two_replicas_and_validation_disturbs_nothing(
    long_tail_task: TaskPaths, tmp_path: Path, ray_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 5
    folder, record = tmp_path / "run", tmp_path / "answers"
    monkeypatch.setenv("RECORD_FOLDER", str(record))
    overrides = [
        *turns(long_tail_task, folder, ray_dir, steps),
        "trainer.n_gpus_per_node=2",
        "trainer.val_before_train=true",
        "trainer.test_freq=1",
        "data.val_max_samples=8",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.rollout_correction.rollout_is=sequence",
        "async_training.off_policy_mask=1",
        "trainer.balance_batch=true",
    ]
    run = run_main(MAIN, overrides, folder)
    assert run.returncode == 0, run.output[-8000:]
    assert run.summary["ledger"]["trained"] == steps * GROUPS
    assert run.summary["validation"]["last"] is not None
    assert set(run.column("fully_async/count/live_replicas")) == {2}
    # Validation comes between two turns: it interrupts nothing, and what waits at its end is what waited before.
    assert run.column("partial_rollout/lost_tokens")[-1] == 0
    check_answers(trained_answers(record), long_tail_task)
    # Weights of whole answers, and no gradient of tokens that are more than one version old.
    assert all(step["rollout_corr/rollout_is_mean"] > 0 for step in run.metrics)
    assert sum(run.column("fully_async/off_policy/masked_tokens")) > 0
    on_policy = [step for step in run.metrics if step["fully_async/staleness/oldest_token_max"] == 0]
    assert on_policy
    assert max(step["training/rollout_probs_diff_max"] for step in on_policy) < 1e-5
    # One account of each accelerator, whichever side had it.
    account = check_account(run)
    assert account["seconds"].keys() == {"rollout 0", "rollout 1"}
    assert all(device["training"] > 0 and device["validating"] > 0 for device in account["seconds"].values())
