# SPDX-License-Identifier: Apache-2.0
"""What holds of the account of every run: each second and each token is in one class, and the sums close."""

from __future__ import annotations

from typing import Any

from main_runs import FinishedRun

from recipe.async_engine.core.events import Class
from recipe.async_engine.storage.event_file import files, read

EVERY_RUN = {Class.TRAINING, Class.DECODING, Class.PREFILL, Class.START_UP}


def check_account(run: FinishedRun) -> dict[str, Any]:
    """The account of a run that ended well, checked."""
    account = run.summary["account"]
    assert account["closes"], account
    for device, seconds in account["seconds"].items():
        life = seconds["life"]
        classes = {name: value for name, value in seconds.items() if name not in ("accelerators", "life")}
        assert abs(sum(classes.values()) - life) <= 0.005 * life, (device, seconds)
        assert seconds["not_known"] <= 0.01 * life, (device, seconds)
        assert min(classes.values()) >= 0
        assert classes.keys() <= set(Class)
    assert {name for name, value in account["accelerator_seconds"].items() if value > 0} >= EVERY_RUN, account
    check_tokens(run)
    return account


def check_tokens(run: FinishedRun) -> dict[str, int]:
    tokens = run.summary["account"]["tokens"]
    ended = sum(tokens[name] for name in ("trained", "filtered", "failed", "cut", "in_flight"))
    assert tokens["sampled"] + tokens["restored"] == ended, tokens
    assert tokens["not_known"] == 0, tokens
    if run.summary["resumed"]["step"] == 0:
        # The trainer counts them in its batches.
        assert tokens["trained"] == sum(run.column("fully_async/sampled_tokens")), tokens
    header, table = read(files(run.folder)[-1])
    assert header["accelerators"]["trainer"] >= 1
    assert table.num_rows > 0
    return tokens
