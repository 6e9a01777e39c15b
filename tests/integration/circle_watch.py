# SPDX-License-Identifier: Apache-2.0
"""Finds circular waits in cuda_order.py's world while they exist, and says who waits for what. For tests only.

A waiting thread goes on when everything that it waits for is done. Work is done when everything that it needs is done.
A collective needs its members to launch their parts, which any call of a member may do once it goes on. Whatever can
never go on by these rules is in a circle, or behind one. It must be found in two inspections, `CONFIRM_S` apart,
between which none of these calls has done anything, because a thread may be on its way from one request to the next.

A wait for a process that is gone, for one that is frozen or for a member that has left hangs, but is not circular; such
waits are left to deadlines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cuda_order import LOOK_S, Call, Meeting, Op, Wait, World

CONFIRM_S = 0.2
Node = Op | Meeting | Wait | Call


@dataclass(frozen=True)
class Link:
    """``member`` is blocked at ``where`` (a call, or a stream) and waits for something."""

    member: str
    where: str
    waits_for: str

    def __str__(self) -> str:
        return f"{self.member}, {self.where}, waits for {self.waits_for}"


class CircleOfWaits(Exception):
    """A group of members each wait for the next one, and the last for the first."""

    def __init__(self, links: list[Link], after_s: float) -> None:
        super().__init__("\n".join(["a circle of waits:", *map(str, links)]))
        self.links = links
        self.after_s = after_s
        """The time for which the circle had existed."""


class Watch:
    """Inspects a world repeatedly, and fails it with a `CircleOfWaits`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._suspected: tuple[object, ...] = ()
        self._since = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(LOOK_S) and not self.look():
                continue

        thread = threading.Thread(target=look, name="circle-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def look(self) -> bool:
        """Return whether the world has failed, because of a circle that is confirmed now or for another reason."""
        with self._world.changed:
            stuck = stuck_nodes(self._world)
            calls = [node for node in stuck if isinstance(node, Call)]
            found = tuple(sorted((id(call), call.deeds) for call in calls))
            if found != self._suspected:
                self._suspected, self._since = found, time.monotonic()
            elif calls and time.monotonic() - self._since > CONFIRM_S:
                after_s = time.monotonic() - max(call.last_deed for call in calls)
                self._world.fail(CircleOfWaits(circle_from(calls[0], stuck, self._world), after_s))
            return self._world.failure is not None


def stuck_nodes(world: World) -> dict[Node, None]:
    """Return everything that can never go on."""
    calls = [call for call in world.calls if call.waits and not call.device.frozen and not call.device.gone]
    stuck: dict[Node, None] = {}
    todo: list[Node] = [*calls]
    while todo:
        node = todo.pop()
        if node not in stuck and not _hangs(node):
            stuck[node] = None
            todo += _needs(node, world)
    while True:
        free = [node for node in stuck if _goes_on(node, stuck, world)]
        if not free:
            return stuck
        for node in free:
            del stuck[node]


def _hangs(node: Node) -> bool:
    """Return whether it waits for a fault to be noticed, or does not wait at all."""
    if isinstance(node, Call):
        return not node.waits or node.device.frozen or node.device.gone
    if isinstance(node, Op):
        return node.done
    if isinstance(node, Meeting):
        return node.broken or any(device.gone for device in node.members.values())
    return False


def _needs(node: Node, world: World) -> list[Node]:
    """Return what it waits for."""
    if isinstance(node, Call):
        return [*node.waits]
    if isinstance(node, Wait):
        return [op for op in node.goals if not op.done]
    if isinstance(node, Op):
        return [node.meeting] if node.meeting is not None else [op for op in node.needs if not op.done]
    needs: list[Node] = [need for op in node.ops.values() for need in op.needs if not need.done]
    for rank in _missing(node):
        needs += _calls_of(node, rank, world)
    return needs


def _goes_on(node: Node, stuck: dict[Node, None], world: World) -> bool:
    if isinstance(node, Call):
        return any(wait not in stuck for wait in node.waits)
    if isinstance(node, Meeting):
        if any(need in stuck for op in node.ops.values() for need in op.needs if not need.done):
            return False
        return all(any(call not in stuck for call in _calls_of(node, rank, world)) for rank in _missing(node))
    return all(need not in stuck for need in _needs(node, world))


def _missing(meeting: Meeting) -> list[int]:
    return [rank for rank in range(meeting.size) if rank not in meeting.ops]


def _calls_of(meeting: Meeting, rank: int, world: World) -> list[Node]:
    """Return the calls that may launch a rank's part; a placeholder stands for a call that is still to come."""
    device = meeting.members.get(rank)
    calls: list[Node] = [call for call in world.calls if call.device is device]
    return calls or [Call(world.devices[0], "a call to come")]


def circle_from(start: Node, stuck: dict[Node, None], world: World) -> list[Link]:
    """Return the circle that is reached from something that is stuck."""
    path, node = list[Node](), start
    while node not in path:
        path.append(node)
        node = next(need for need in _needs(node, world) if need in stuck)
    circle = path[path.index(node) :]
    links: list[Link] = []
    for place, found in enumerate(circle):
        link = _link(found, circle[(place + 1) % len(circle)], circle[place - 1])
        if link is not None and links and (links[-1].member, links[-1].where) == (link.member, link.where):
            links.pop()  # work of the same stream, further to its head
        links += [link] if link is not None else []
    return links


def _link(node: Node, following: Node, before: Node) -> Link | None:
    if isinstance(node, Wait):
        goal = following
        assert isinstance(goal, Op)
        return Link(node.call.device.name, node.call.name, f"its {node.what}: {goal.name} on the {goal.stream.name}")
    if isinstance(node, Meeting):
        # Describe whose part is late: a call that has to launch it, or work before it in a stream.
        if isinstance(following, Call):
            return Link(_member(before), _place(before), f"{following.device.name} to launch {node.name}")
        late = next(op for op in node.ops.values() if following in op.needs)
        assert isinstance(following, Op)
        return Link(late.stream.device.name, late.stream.name, f"{following.name} before {node.name}")
    if isinstance(node, Op) and isinstance(following, Op):
        return Link(node.stream.device.name, node.stream.name, f"{following.name} on the {following.stream.name}")
    if isinstance(node, Op) and isinstance(following, Meeting):
        return Link(node.stream.device.name, node.stream.name, f"the others in {following.name}")
    return None


def _member(node: Node) -> str:
    return node.stream.device.name if isinstance(node, Op) else "?"


def _place(node: Node) -> str:
    return node.stream.name if isinstance(node, Op) else "?"
