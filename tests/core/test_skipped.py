# SPDX-License-Identifier: Apache-2.0
"""Updates that were not made: counted, and so many in a row end the run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.skipped import SkippedUpdates, UpdatesSkipped

NORMS = st.sampled_from([0.5, 2.0, math.nan, math.inf])


@given(steps=st.lists(st.lists(NORMS, max_size=4)), limit=st.integers(1, 5))
def test_the_first_run_of_skipped_updates_as_long_as_the_limit_ends_it_across_steps_and_no_shorter_one(
    steps: list[list[float]], limit: int
) -> None:
    skipped = SkippedUpdates("actor", limit)
    seen = ""
    for norms in steps:
        seen += "".join("." if math.isfinite(norm) else "x" for norm in norms)
        if "x" * limit in seen:
            with pytest.raises(UpdatesSkipped, match=f"async_training.max_skipped_updates={limit}"):
                skipped.note(norms)
            return
        assert skipped.note(norms) == sum(not math.isfinite(norm) for norm in norms)
        assert skipped.total == seen.count("x")
