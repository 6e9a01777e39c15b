# SPDX-License-Identifier: Apache-2.0
"""Work goes to the server with the fewest outstanding tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recipe.async_engine.core.spread import TokenSpread


def test_equal_servers_take_turns() -> None:
    spread = TokenSpread("abc")
    chosen = []
    for _ in range(6):
        server = spread.choose()
        assert server is not None
        chosen.append(server)
        spread.begin(server, 10)
        spread.end(server, 10)
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == ["a", "b", "c"]


def test_server_that_is_gone_is_not_chosen_and_one_that_is_back_starts_empty() -> None:
    spread = TokenSpread("ab")
    spread.begin("a", 10)
    spread.remove("b")
    assert spread.choose() == "a" and spread.choose(but=["a"]) is None
    spread.remove("a")
    assert spread.choose() is None and len(spread) == 0
    spread.end("a", 10)
    spread.add("a")
    assert "a" in spread and spread.choose() == "a"


@given(
    servers=st.integers(1, 5),
    work=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 3)), min_size=1, max_size=60),
)
def test_no_server_has_more_than_one_piece_of_work_above_another(servers: int, work: list[tuple[int, int]]) -> None:
    """Whatever ends when: the chosen server had the least, so it is above none by more than what it was just given."""
    names = [str(number) for number in range(servers)]
    spread = TokenSpread(names)
    running: list[tuple[str, int]] = []
    loads = dict.fromkeys(names, 0)
    for tokens, ended in work:
        server = spread.choose()
        assert server is not None and loads[server] == min(loads.values())
        spread.begin(server, tokens)
        loads[server] += tokens
        running.append((server, tokens))
        for _ in range(min(ended, len(running))):
            done, size = running.pop(0)
            spread.end(done, size)
            loads[done] -= size
