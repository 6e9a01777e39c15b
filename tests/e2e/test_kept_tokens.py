# SPDX-License-Identifier: Apache-2.0
"""A kill in the middle of long answers: the resumed run samples no token again that its checkpoint has."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from main_runs import FinishedRun, long_answers, run_main, small, trained_answers

from recipe.async_engine.rollout.kept_answers import KeptAnswer, digest
from recipe.laptop.task import TaskPaths

GROUPS, ANSWERS = 4, 4
STEPS, CRASH = 4, 2

FULLY_ASYNC = "fully_async:recording_trainer.MidwayApart"
ONE_STEP_OFF = "one_step_off:recording_trainer.MidwayApart"


def unfinished(state: dict[str, Any]) -> list[tuple[str, list[KeptAnswer]]]:
    """What the checkpoint has of each unfinished trajectory: uid of its group, and its answers in order."""
    uid_of = {row[0]: row[3] for row in state["ledger"]["live"]}
    return [
        (uid_of[group_id], pickle.loads(record.answers))
        for group_id, group in state["groups"].items()
        for record in group["kept"]
        if record is not None
    ]


def answered_trajectories(state: dict[str, Any]) -> Counter[bytes]:
    """By the digest of a request: trajectories that the checkpoint has an answer of, whole or cut."""
    answered: Counter[bytes] = Counter()
    for group in state["groups"].values():
        records = [pickle.loads(record.answers) for record in group["kept"] if record is not None]
        for answers in records:
            answered.update({answer.asked for answer in answers})
        # A finished one has been answered what its siblings ask first.
        for first in {answers[0].asked for answers in records}:
            answered[first] += sum(payload is not None for payload in group["payloads"])
    return answered


def requests(path: Path) -> list[tuple[int, ...]]:
    """The tokens of each request that reached the engine, in order."""
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def account(run: FinishedRun) -> dict[str, int]:
    tokens = run.rollout_state()["interrupted_tokens"]
    assert tokens["cut"] == tokens["trained"] + tokens["lost"] + tokens["cached"]
    return tokens


@pytest.mark.e2e
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("main", "loop", "complete_answers"),
    [
        (FULLY_ASYNC, "tool_agent_loop.TwoTurnLoop", 1),
        pytest.param(ONE_STEP_OFF, "losing.LongAnswers", 0, marks=pytest.mark.slow),
    ],
)
def test_kill_in_the_middle_of_long_answers_costs_no_token_of_the_checkpoint(
    main: str,
    loop: str,
    complete_answers: int,
    task: TaskPaths,
    tmp_path: Path,
    ray_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, record = tmp_path / "run", tmp_path / "answers"
    monkeypatch.setenv("RECORD_FOLDER", str(record))
    monkeypatch.setenv("MIDWAY_ANSWERS", str(complete_answers))
    monkeypatch.setenv("CRASH_AFTER_STEP", str(CRASH))
    monkeypatch.setenv("ENGINE_RECORD", str(tmp_path / "first.jsonl"))
    overrides = [
        *small(task, folder, ray_dir),
        *long_answers(tmp_path, monkeypatch, loop, "recorded_requests.RecordedRequests"),
        "trainer.save_freq=1",
        f"trainer.total_training_steps={STEPS}",
    ]
    first = run_main(main, overrides, folder)
    assert first.returncode == 1, first.output[-8000:]
    state = first.rollout_state()
    assert (state["ledger"]["version"], state["ledger"]["trained"]) == (CRASH, CRASH * GROUPS)
    kept = unfinished(state)
    assert max(len(answers) for _, answers in kept) > complete_answers
    cached = account(first)["cached"]
    assert cached >= sum(answer.cut_tokens for _, answers in kept for answer in answers) > 0

    monkeypatch.setenv("CRASH_AFTER_STEP", "0")
    monkeypatch.setenv("ENGINE_RECORD", str(tmp_path / "second.jsonl"))
    second = run_main(main, overrides, folder)
    assert second.returncode == 0, second.output[-8000:]
    total = STEPS * GROUPS
    assert second.summary["ledger"] == {"issued": total, "trained": total, "filtered": 0, "failed": 0, "live": 0}
    tokens = account(second)
    assert tokens == {"cut": tokens["trained"], "trained": tokens["trained"], "lost": 0, "cached": 0}
    assert tokens["trained"] >= cached

    # The engine: no request that the checkpoint has an answer to, and each cut answer goes on after its last token.
    asked = {digest(prompt): prompt for prompt in requests(tmp_path / "first.jsonl")}
    again = Counter(requests(tmp_path / "second.jsonl"))
    answered = answered_trajectories(state)
    for prompt, times in again.items():
        # Answers to one prompt ask the same: only those that have no answer to it ask, once each.
        assert times + answered[digest(prompt)] <= ANSWERS
    gone_on = Counter(
        (*asked[answers[-1].asked], *answers[-1].answer.token_ids) for _, answers in kept if answers[-1].cut_tokens
    )
    assert gone_on
    assert not gone_on - again

    # What was trained: it begins with what was kept, under the versions that had sampled it.
    trained = trained_answers(record)
    assert len(trained) == total * ANSWERS
    for uid, answers in kept:
        tokens_kept = [token for answer in answers for token in answer.answer.token_ids]
        versions = [
            answer.answer.extra_fields["submitted_version"] for answer in answers for _ in answer.answer.token_ids
        ]
        sampled = [
            [(token, version) for token, version in zip(of["tokens"], of["versions"], strict=True) if version >= 0]
            for of in trained
            if of["uid"] == uid
        ]
        beginning = list(zip(tokens_kept, versions, strict=True))
        assert beginning in [pairs[: len(beginning)] for pairs in sampled]
    restored = sum(len(answer.answer.token_ids) for _, answers in kept for answer in answers)
    assert second.column("fully_async/partial/restored_tokens")[-1] == restored
