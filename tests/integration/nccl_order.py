# SPDX-License-Identifier: Apache-2.0
"""Communicators over the devices of cuda_order.py. For tests only; rules name their section of the NCCL User Guide."""

from __future__ import annotations

from typing import Any

from cuda_order import NON_BLOCKING, Device, Joint, Meeting, MisuseError, Op, Stream

INVALID = "NCCL_ERROR_INVALID_ARGUMENT: invalid argument"


class UniqueId:
    """The id that the members of a communicator share: "Creating a Communicator", ncclGetUniqueId."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.joining: Meeting | None = None
        self.meetings: list[Meeting] = []
        self.members: dict[int, Device] = {}
        self.left = False
        """Whether some member has left."""


class Communicator:
    """One member's part of a communicator.

    Creating it blocks until all members have come ("Creating a Communicator": ncclCommInitRank is called by all ranks,
    and "waits for all ranks").
    """

    def __init__(self, device: Device, unique: UniqueId, size: int, rank: int) -> None:
        self._device, self._unique, self._size, self._rank = device, unique, size, rank
        self._world = device.world
        self._sequence = 0
        self._last: Op | None = None
        self._aborted = False
        with self._world.changed:
            self._world.enter(device)
            if unique.joining is None:
                unique.joining = Meeting(f"joining {unique.name}", size)
            unique.members[rank] = unique.joining.members[rank] = device
            host = Stream(device, NON_BLOCKING, on_host=True)
            self._world.wait(device, [self._meet(unique.joining, host, ())], "join")

    def launch(self, stream: Stream, kind: tuple[object, ...], effect: Joint | None = None, memory: Any = None) -> Op:
        """Queue a collective on this rank's ``memory`` and return ("CUDA Stream Semantics": "enqueued to the stream").

        Ranks' collectives are matched by their order on the communicator ("Collective Operations"). Those of one
        communicator run one after the other, on whatever streams ("CUDA Stream Semantics").

        Raises:
            MisuseError: another rank has launched a collective of another kind at this position.
            RuntimeError: the communicator has been aborted.
        """
        with self._world.changed:
            self._world.enter(self._device)
            if self._aborted:
                raise RuntimeError(INVALID)
            unique, number = self._unique, self._sequence
            if number == len(unique.meetings):
                name = f"{kind[0]} {number} of {self._unique.name}"
                meeting = Meeting(name, self._size, kind, effect, members=unique.members, broken=unique.left)
                unique.meetings.append(meeting)
            meeting = unique.meetings[number]
            if meeting.kind != kind:
                raise MisuseError(f"rank {self._rank} of {meeting.name}: {kind} where others have {meeting.kind}")
            self._sequence += 1
            before = [self._last, self._device.last_collective if self._world.in_turn else None]
            meeting.memory[self._rank] = memory
            op = self._last = self._meet(meeting, stream, [op for op in before if op is not None])
            self._device.last_collective = op
            self._world.launched(op)
            return op

    def _meet(self, meeting: Meeting, stream: Stream, after: list[Op] | tuple[()]) -> Op:
        op = stream.launch(meeting.name, after=after)
        op.meeting = meeting
        meeting.ops[self._rank] = op
        if len(meeting.ops) == self._size:
            self._world.changed.notify_all()
        return op

    @property
    def waits(self) -> bool:
        """Return whether it has unfinished work."""
        return not self._aborted and self._last is not None and not self._last.done

    def abort(self) -> None:
        """End its work in progress, without an error and with whatever is in the buffers ("Communicator abort").

        The other members keep waiting until they abort theirs.
        """
        with self._world.changed:
            self._aborted = self._unique.left = True
            for meeting in self._unique.meetings:
                op = meeting.ops.get(self._rank)
                if op is None or not op.done:
                    meeting.broken = True
                if op is not None and not op.done:
                    op.meeting = None
            self._world.changed.notify_all()
