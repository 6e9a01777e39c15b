# SPDX-License-Identifier: Apache-2.0
"""Checks on the account of every run: each second and each token is in one class, and the sums close.

`main_runs.run_main` and `drilled_run` apply them to each run that ends well, so every end-to-end test and every drill
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recipe.async_engine.record.event_file import files, read
from recipe.async_engine.record.events import Class

if TYPE_CHECKING:
    from main_runs import FinishedRun

CLOSES_WITHIN, MOST_NOT_KNOWN = 0.005, 0.01
EVERY_RUN = {Class.TRAINING, Class.DECODING, Class.PREFILL, Class.START_UP}


def check_seconds(account: Mapping[str, Any]) -> None:
    """Check that each device's classes, as in ``summary.json``, add up to its life, with hardly any unknown time."""
    for device, seconds in account["seconds"].items():
        life = seconds["life"]
        classes = {name: value for name, value in seconds.items() if name not in ("accelerators", "life")}
        assert abs(sum(classes.values()) - life) <= CLOSES_WITHIN * life, (device, seconds)
        assert seconds["not_known"] <= MOST_NOT_KNOWN * life, (device, seconds)
        assert min(classes.values()) >= 0
        assert classes.keys() <= set(Class)


def check_account(run: FinishedRun) -> dict[str, Any]:
    """Return the account of a run that ended well, after checking it."""
    account = run.summary["account"]
    assert account["closes"], account
    check_seconds(account)
    if run.summary["steps"] > run.summary["resumed"]["step"]:
        # A resumed run may only train what is in its checkpoint, and sample nothing.
        expected = EVERY_RUN if account["tokens"]["sampled"] else EVERY_RUN - {Class.DECODING, Class.PREFILL}
        spent = {name for name, value in account["accelerator_seconds"].items() if value > 0}
        if run.summary["resumed"]["step"] and Class.RE_PREFILL in spent:
            # All that a resumed run samples may go on from its checkpoint.
            expected = expected - {Class.PREFILL}
        assert spent >= expected, account
    check_tokens(run)
    return account


def check_if_recorded(run: FinishedRun) -> None:
    """Check the account of any run that has one, according to how the run ended."""
    if not (run.folder / "summary.json").is_file() or (account := run.summary.get("account")) is None:
        return
    if run.returncode == 0:
        check_account(run)
    else:
        check_seconds(account)


def check_tokens(run: FinishedRun) -> dict[str, int]:
    tokens = run.summary["account"]["tokens"]
    ended = sum(tokens[name] for name in ("trained", "filtered", "failed", "cut", "in_flight"))
    assert tokens["sampled"] + tokens["restored"] == ended, tokens
    assert tokens["not_known"] == 0, tokens
    if run.summary["resumed"]["step"] == 0:
        # The trainer counts trained tokens in its batches.
        assert tokens["trained"] == sum(run.column("fully_async/sampled_tokens")), tokens
    header, table, notes = read(files(run.folder)[-1])
    assert not notes
    assert header["accelerators"]["trainer"] >= 1
    assert table.num_rows > 0
    return tokens
