# SPDX-License-Identifier: Apache-2.0
"""The account of a run that has ended, as its ``summary.json`` has it.

Contract: it is made of the run's record, in the process that writes the summary. Shown by
tests/integration/test_recording.py and tests/accounts.py.
"""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from recipe.async_engine.record.event_file import events_of, read
from recipe.async_engine.record.events import GROUPS, TRAJECTORIES, Recorded
from recipe.report.account import Account, close

logger = logging.getLogger(__name__)


def account_of(recorded: Recorded) -> Account:
    """The account up to the end of the record."""
    table = read(recorded.file).events
    many = pc.is_in(table["lane"], pa.array([TRAJECTORIES, GROUPS]))
    return close(events_of(table.filter(pc.invert(many))), recorded.devices, recorded.until, recorded.tokens)


def settled(recorded: Recorded) -> dict[str, Any]:
    """The account in the keys of ``summary.json``."""
    account = account_of(recorded)
    if not account.closes:
        logger.warning("the account of the run does not close: %s", account.summary())
    return {**account.summary(), "events_lost": recorded.events_lost, "cpu_seconds": recorded.cpu_seconds}
