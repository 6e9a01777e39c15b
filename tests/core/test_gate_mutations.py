# SPDX-License-Identifier: Apache-2.0
"""Mutations of the gate and of the ledger's use of it are caught by the schedules and by refusal probes.

Every comparison and every addition or subtraction of the gate's decisions is mutated: the right side one higher and one
lower (on integers this includes strict against non-strict), plus against minus; every `max(0, x)` loses its clamp. The
list is made from gate.py itself, so a new inequality is mutated without being named here. Mutations that need more
than one place, or are the ledger's, are written out.

Each mutant has to be caught by the random schedules (which judge it independently, or hit what the gate asserts of
itself) or by the probes below, which make calls that no lawful schedule makes. No mutation is excluded from the made
list. Not in the written list, because equivalent: a ledger that checks `version - start <= S` in `take` one looser (the
gate lets no such group through), and `can_take` over all starts from 0 to v instead of the live ones (the
clamp makes the starts without live groups trivially true: run below as a control).
"""

from __future__ import annotations

import ast
import copy
import inspect
import random
from collections.abc import Iterator
from typing import Any

import pytest
from schedule_simulator import Violation, run_schedules

from recipe.async_engine.core import gate as gate_module
from recipe.async_engine.core import ledger as ledger_module
from recipe.async_engine.core import live_groups as live_groups_module
from recipe.async_engine.core.errors import GateError, RecipeError, StalenessViolation
from recipe.async_engine.core.gate import GateSettings, StalenessGate
from recipe.async_engine.core.ledger import SampleLedger

FIRST_SEEDS = range(300)
MORE_SEEDS = range(300, 4000)
PROBES = range(200)
GATE_SOURCE = inspect.getsource(gate_module)
LEDGER_SOURCE = inspect.getsource(ledger_module)
LIVE_SOURCE = inspect.getsource(live_groups_module)


def shifted(operand: ast.expr, by: int) -> ast.expr:
    return ast.BinOp(operand, ast.Add(), ast.Constant(by))


def mutations_of(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(name, mutated copy) of one node, without its children's mutations."""
    if isinstance(node, ast.Compare):
        for place, (operator, right) in enumerate(zip(node.ops, node.comparators, strict=True)):
            if isinstance(operator, (ast.In, ast.NotIn, ast.Is, ast.IsNot)):
                continue
            multisets = "leaving <=" in ast.unparse(node)
            for by in (-1, 1):
                changed = copy.deepcopy(node)
                if multisets and by == 1:
                    continue
                if multisets:
                    changed.ops[place] = ast.Lt()
                else:
                    changed.comparators[place] = shifted(copy.deepcopy(right), by)
                yield ast.unparse(changed), changed
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Add, ast.Sub)):
        changed = copy.deepcopy(node)
        changed.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield ast.unparse(changed), changed
    elif isinstance(node, ast.Call) and ast.unparse(node).startswith("max(0, "):
        yield f"{ast.unparse(node)} without clamp", node.args[1]


class Replace(ast.NodeTransformer):
    """Replaces the one node at this place of a walk."""

    def __init__(self, target: ast.AST, by: ast.AST) -> None:
        self.target, self.by = target, by

    def visit(self, node: ast.AST) -> Any:
        return self.by if node is self.target else self.generic_visit(node)


def made_mutants() -> dict[str, str]:
    """Source of gate.py by mutation, for every mutation of every method of the gate."""
    mutants = {}
    for index, node in enumerate(ast.walk(ast.parse(GATE_SOURCE))):
        for name, _ in mutations_of(node):
            tree = ast.parse(GATE_SOURCE)
            gate = next(item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == "StalenessGate")
            target = list(ast.walk(tree))[index]
            method = next(
                (item.name for item in gate.body if isinstance(item, ast.FunctionDef) and target in ast.walk(item)),
                None,
            )
            if method is None:
                continue
            by = dict(mutations_of(target))[name]
            mutants[f"{method}: {name}"] = ast.unparse(ast.fix_missing_locations(Replace(target, by).visit(tree)))
    return mutants


def edited(source: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    return source


EXCESS = "if remaining > slots_after:"
CHECK = "if older > self.slots(start):"
ALL_STARTS = (
    "for start in sorted(self._starts):\n            remaining",
    "for start in range(self.version + 1):\n            remaining",
)
WRITTEN_GATE_MUTANTS = {
    "every start is checked, without the clamp": edited(
        GATE_SOURCE, ALL_STARTS, ("return max(0, versions_left * bound", "return (versions_left * bound")
    ),
    "only s = v is checked at the take": edited(
        GATE_SOURCE, (EXCESS, "if start == self.version and remaining > slots_after:")
    ),
    "only s = v is checked anywhere": edited(
        GATE_SOURCE,
        (EXCESS, "if start == self.version and remaining > slots_after:"),
        (CHECK, "if start == self.version and older > self.slots(start):"),
    ),
    "aggregate admission, no check at the take": edited(GATE_SOURCE, (EXCESS, "if False:"), (CHECK, "if False:")),
    "soft depth without the batches left": edited(
        GATE_SOURCE, ("ahead + self.batches_left * self.settings.batch_groups", "ahead")
    ),
    "soft depth as if no batch had been taken": edited(
        GATE_SOURCE,
        (
            "ahead + self.batches_left * self",
            "ahead + self.settings.batches_per_version * self",
        ),
    ),
    "hard bound instead of the depth": edited(
        GATE_SOURCE,
        ("return self.live + 1 <= self.admission_limit", "return self.live + 1 <= self.slots(self.announced)"),
    ),
    "a take frees no place": edited(GATE_SOURCE, ("self.live -= len(starts)", "pass")),
    "given-up group keeps its place": edited(
        GATE_SOURCE, ("        self._discard(start)\n        self.live -= 1\n", "        self._discard(start)\n")
    ),
    "depth as if what is sealed were announced": edited(
        GATE_SOURCE, ("min(self._groups_ahead, versions_left * self.settings.version_groups)", "self._groups_ahead")
    ),
    "groups start at the version that is sealed": edited(
        GATE_SOURCE, ("self._starts[self.announced] += 1", "self._starts[self.version] += 1")
    ),
    "what is sealed is announced": edited(
        GATE_SOURCE, ("        self.version += 1\n", "        self.version += 1\n        self.announced += 1\n")
    ),
    "admission without a refusal": edited(GATE_SOURCE, ("if not self.admits():", "if False:")),
}
WRITTEN_LEDGER_MUTANTS = {
    "filtered groups are not credited": edited(LEDGER_SOURCE, ("        self._gate.remove(group.start)\n", "")),
    "start of the newest token": edited(
        LEDGER_SOURCE,
        ("self._gate.move(group.start, oldest_version)", "self._gate.move(group.start, self.version)"),
        ("state=GroupState.READY, start=oldest_version", "state=GroupState.READY, start=self.version"),
    ),
}

WRITTEN_LIVE_MUTANTS = {
    "the oldest groups by issue alone": edited(
        LIVE_SOURCE,
        (
            "        for _, ids in sorted(self._by_start[state].items()):\n            if len(found)",
            "        for _, ids in sorted(self._by_start[state].items(), reverse=True):\n            if len(found)",
        ),
    ),
    "newest first, and what may be taken by it": edited(
        LIVE_SOURCE,
        (
            "        for _, ids in sorted(self._by_start[state].items()):\n            if len(found)",
            "        for _, ids in sorted(self._by_start[state].items(), reverse=True):\n            if len(found)",
        ),
        (
            "        for start, ids in sorted(self._by_start[state].items()):\n            if count",
            "        for start, ids in sorted(self._by_start[state].items(), reverse=True):\n            if count",
        ),
    ),
    "a group that has left a state is counted in it all the same": edited(
        LIVE_SOURCE, ("        self._counts[group.state] -= 1\n", "")
    ),
}


def load(
    gate_source: str = GATE_SOURCE, ledger_source: str = LEDGER_SOURCE, live_source: str = LIVE_SOURCE
) -> tuple[Any, type[SampleLedger]]:
    """The gate and the ledger of these sources."""
    live: dict[str, Any] = {"__name__": live_groups_module.__name__}
    exec(compile(live_source, "live groups mutant", "exec"), live)
    gate: dict[str, Any] = {"__name__": gate_module.__name__}
    exec(compile(gate_source, "gate mutant", "exec"), gate)
    ledger: dict[str, Any] = {"__name__": ledger_module.__name__}
    exec(compile(ledger_source, "ledger mutant", "exec"), ledger)
    ledger |= {"StalenessGate": gate["StalenessGate"], "LiveGroups": live["LiveGroups"]}
    return gate["StalenessGate"], ledger["SampleLedger"]


def places(settings: GateSettings, version: int, taken: int, start: int) -> int:
    batches = (start + settings.max_staleness - version) * settings.batches_per_version
    return max(0, (batches + settings.batches_per_version - taken) * settings.batch_groups)


def refused(error: type[RecipeError], call: Any, *arguments: Any, **named: Any) -> bool:
    try:
        call(*arguments, **named)
    except error:
        return True
    return False


def probe(gate_type: type[StalenessGate], seed: int) -> None:
    """Assert what the gate refuses, and the definition of its slots, in a random lawful state."""
    rng = random.Random(seed)
    bound = rng.randint(0, 3)
    settings = GateSettings(rng.randint(1, 3), rng.randint(1, 3), bound, bound)
    version, taken = rng.randint(0, 5), rng.randint(0, settings.batches_per_version)
    at = {"version": version, "batches_taken": taken}
    for start in range(max(0, version - bound - 2), version + 1):
        room = places(settings, version, taken, start)
        gate = gate_type(settings, starts=[start] * room, **at)
        assert gate.slots(start) == room
        assert refused(StalenessViolation, gate_type, settings, starts=[start] * (room + 1), **at)
        if room:
            assert refused(GateError, gate.move, start, start - 1)
            assert refused(GateError, gate.move, start, version + 1)
            gate.move(start, version)
            assert gate.starts().get(version, 0) >= 1
    full = gate_type(settings, starts=[version] * places(settings, version, taken, version), **at)
    assert refused(GateError, full.add)
    assert refused(GateError, gate_type, settings, starts=[version + 1], **at)
    assert refused(GateError, gate_type, settings, version=version, batches_taken=settings.batches_per_version + 1)
    assert refused(GateError, full.announce)
    if not refused(GateError, full.seal):
        assert taken == settings.batches_per_version
        room = min(bound * settings.version_groups, (bound - 1) * settings.version_groups)
        assert full.admission_limit == room + settings.version_groups
        assert refused(GateError, full.move, version, version + 1)
        assert full.announce() == version + 1
        assert full.admission_limit == (bound + 1) * settings.version_groups
        assert refused(GateError, full.announce)
    else:
        assert taken != settings.batches_per_version
    batch = [version] * settings.batch_groups
    fresh = gate_type(settings, starts=[version] * places(settings, version, taken, version), **at)
    assert fresh.can_take(batch) == (taken != settings.batches_per_version)
    if taken != settings.batches_per_version:
        before = fresh.live, fresh.starts(), fresh.batches_left
        fresh.take(batch)
        fresh.give_back(batch)
        assert (fresh.live, fresh.starts(), fresh.batches_left) == before
    assert not fresh.can_take(batch[1:])
    assert not fresh.can_take([*batch, version])
    assert not gate_type(settings, **at).can_take(batch)


def caught(
    gate_source: str = GATE_SOURCE, ledger_source: str = LEDGER_SOURCE, live_source: str = LIVE_SOURCE
) -> str | None:
    """How the mutant is caught: the kind of violation, or the name of what gate or ledger raised; None if it is not."""
    try:
        gate_type, ledger_type = load(gate_source, ledger_source, live_source)
        run_schedules(FIRST_SEEDS, ledger_type)
        for seed in PROBES:
            probe(gate_type, seed)
        run_schedules(MORE_SEEDS, ledger_type)
    except Violation as violation:
        return violation.kind
    except (AssertionError, RecipeError) as error:
        return type(error).__name__
    return None


MADE_GATE_MUTANTS = made_mutants()


def test_unmutated_gate_and_ledger_pass_the_same_schedules_and_probes() -> None:
    assert caught() is None


def test_checking_every_start_instead_of_the_live_ones_is_equivalent_with_the_clamp() -> None:
    assert caught(edited(GATE_SOURCE, ALL_STARTS)) is None


def test_every_decision_of_the_gate_is_mutated() -> None:
    methods = {name.split(":")[0] for name in MADE_GATE_MUTANTS}
    assert methods >= {
        "_places", "admission_limit", "admits", "batches_left", "can_take", "check", "move",
        "seal", "announce", "add", "remove", "take", "give_back",
    }  # fmt: skip
    assert len(MADE_GATE_MUTANTS) >= 40


@pytest.mark.parametrize("mutation", sorted(MADE_GATE_MUTANTS))
def test_off_by_one_or_unclamped_gate_is_caught(mutation: str) -> None:
    assert caught(gate_source=MADE_GATE_MUTANTS[mutation]) is not None


@pytest.mark.parametrize("mutation", sorted(WRITTEN_GATE_MUTANTS))
def test_weakened_gate_rule_is_caught(mutation: str) -> None:
    assert caught(gate_source=WRITTEN_GATE_MUTANTS[mutation]) is not None


@pytest.mark.parametrize("mutation", sorted(WRITTEN_LEDGER_MUTANTS))
def test_weakened_use_of_the_gate_is_caught(mutation: str) -> None:
    assert caught(ledger_source=WRITTEN_LEDGER_MUTANTS[mutation]) is not None


@pytest.mark.parametrize("mutation", sorted(WRITTEN_LIVE_MUTANTS))
def test_group_that_is_found_in_the_wrong_place_is_caught(mutation: str) -> None:
    assert caught(live_source=WRITTEN_LIVE_MUTANTS[mutation]) is not None


@pytest.mark.parametrize(
    ("mutation", "kind"),
    [
        ("aggregate admission, no check at the take", "stale"),
        ("every start is checked, without the clamp", "deadlock"),
        ("soft depth without the batches left", "deadlock"),
        ("soft depth as if no batch had been taken", "depth"),
        ("hard bound instead of the depth", "depth"),
    ],
)
def test_weakened_rule_fails_in_the_way_that_the_proof_names(mutation: str, kind: str) -> None:
    assert caught(gate_source=WRITTEN_GATE_MUTANTS[mutation]) == kind
