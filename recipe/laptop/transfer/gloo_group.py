# SPDX-License-Identifier: Apache-2.0
"""A gloo group of the sender of weights and its receivers, in which every wait has a deadline.

The members of a group find each other through the sender's rendezvous store. It listens on the sender's cluster
address, on a port that the system chooses, and serves several groups, whose keys have different prefixes. gloo, too,
uses only the node's cluster address, never all interfaces.

A group that failed cannot be used any more. Deleting it closes its connections, which makes pending calls of the other
members fail at once; then all members can join a new group.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

from recipe.async_engine.core.errors import WeightStreamError

LOOPBACK = "127.0.0.1"


class Deadline:
    """The time, on the monotonic clock, at which a weight sync fails if it is not complete."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = time.monotonic() + seconds

    def remaining(self, waiting_for: str) -> timedelta:
        """Return the time that is left. If there is none, raise a WeightStreamError that names ``waiting_for``."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise WeightStreamError(f"no time left for {waiting_for}: the weight sync has timeout_s={self._seconds:g}")
        # Return at least 1 ms, because gloo counts whole milliseconds and interprets 0 as no timeout.
        return timedelta(seconds=max(left, 0.001))


def node_address() -> str:
    """Return this node's address in the cluster, or loopback if Ray is not running."""
    import ray

    return ray.util.get_node_ip_address().strip("[]") if ray.is_initialized() else LOOPBACK


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Create the sender's rendezvous store, which listens only on the address ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect a receiver to the sender's rendezvous store; raise WeightStreamError if there is no answer in time."""
    try:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise WeightStreamError(
            f"no answer from the sender of weights at {host}:{port} within connect_timeout_s={timeout_s:g}: {error}"
        ) from error


class GlooGroup:
    """The connection between sender (rank 0) and receivers.

    All members must start the same operations in the same order.

    Args:
        group_id: name of the group, which no earlier group of this store may have had.
        store: the sender's rendezvous store.
        rank, world_size: this member's rank and the number of members.
        address: local address on which to listen.
        timeout_s: seconds to wait for the other members.

    Raises:
        WeightStreamError: not all members connected in time. Every method also raises it if a member has died or left,
            or if the deadline has passed.
    """

    def __init__(
        self, group_id: str, store: dist.Store, rank: int, world_size: int, address: str, timeout_s: float
    ) -> None:
        self.group_id = group_id
        self.rank = rank
        self.world_size = world_size
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._threads = 2
        self._outstanding: deque[dist.Work] = deque()
        try:
            own = dist.PrefixStore(f"weights/{group_id}", store)
            self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(own, rank, world_size, options)
        except RuntimeError as error:
            raise WeightStreamError(
                f"rank {rank} of {world_size} could not connect to the other members of the weight-sync group within "
                f"connect_timeout_s={timeout_s:g}: {error}"
            ) from error

    def _connected(self, what: str) -> dist.ProcessGroupGloo:
        # Callers must not bind the result to a name; a comment in `finish` gives the reason.
        if self._group is None:
            raise WeightStreamError(f"{what} was broken off: this member has left the weight-sync group")
        return self._group

    def start_broadcast(self, tensor: torch.Tensor, deadline: Deadline, what: str) -> None:
        """Start to send ``tensor`` (on rank 0) or to receive into it (on other ranks).

        The tensor must not be used before `finish` has waited for this operation.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = deadline.remaining(what)
        self._outstanding.append(self._connected(what).broadcast([tensor], options))

    def start_barrier(self, deadline: Deadline, what: str) -> None:
        """Enter a barrier without waiting. `finish` then waits until all members have entered it."""
        options = dist.AllreduceOptions()
        options.timeout = deadline.remaining(what)
        self._outstanding.append(self._connected(what).allreduce([torch.zeros(1, dtype=torch.int64)], options))

    def finish(self, what: str, leaving: int = 0) -> None:
        """Wait for the oldest operations, until at most ``leaving`` (the newest ones) are outstanding.

        Each operation has its own deadline; ``what`` names the work in errors.
        """
        while len(self._outstanding) > leaving:
            try:
                # Do not bind the operation to a name: the frames of a traceback would refer to it, and so keep the
                # connections open.
                self._outstanding.popleft().wait()
            except RuntimeError as error:
                why = "since a member is gone or the deadline has passed"
                raise WeightStreamError(f"{what} failed, {why}: {error}") from None

    def close(self) -> None:
        """Close the connections, so that waiting members fail. This call blocks while a broadcast is in progress."""
        self._outstanding.clear()
        self._group = None
