# SPDX-License-Identifier: Apache-2.0
"""The settings of the log-prob servers, and whose log-probs the trainer takes as proximal ones."""

import dataclasses
from enum import StrEnum

from recipe.async_engine.config.fields import field, seconds
from recipe.async_engine.core.scoring import Anchor, ScoringSettings

DISABLED = "disabled"


class Proximal(StrEnum):
    """Where the proximal log-probs come from: those of the policy that an update starts from."""

    BYPASS = "bypass"
    RECOMPUTE = "recompute"
    SERVER = "server"
    LOGLINEAR = "loglinear"


@dataclasses.dataclass(frozen=True, slots=True)
class LogProbServers:
    """The Model Engine Server: replicas of the training engine, on resources of their own, that compute log-probs.

    Composed by the group `model_engine_server` (`disabled`, `fsdp2` or `megatron`), which adds `engine`, verl's own
    configuration of that training engine.
    """

    backend: str = field(DISABLED, "The training engine.", choices=(DISABLED, "fsdp2", "megatron"))
    nnodes: int = field(1, "Nodes for log-prob servers.", minimum=1)
    n_gpus_per_node: int = field(8, "Accelerators for log-prob servers on each node.", minimum=1)
    replicas: int = field(1, "Servers that share these accelerators evenly.", minimum=1)
    reference_replicas: int = field(
        0,
        "Servers beside these, each with as many accelerators as one of them, that keep the initial weights and compute"
        " the log-probs of the reference policy. What they do not answer the trainer's reference workers compute.",
        minimum=0,
    )
    anchor: str = field(
        "generation",
        "Whose log-probs: `generation`, for each token those of the version that sampled it; `latest`, those of the"
        " newest published version, computed anew for samples that wait when it changes.",
        choices=tuple(Anchor),
    )
    max_batch_tokens: int = field(
        16384,
        "Tokens of a batch of one server, prompts included, which its data-parallel ranks share: a rank has about this"
        " divided by their number at once. A longer sequence is a batch of its own.",
        unit="tokens",
        minimum=1,
    )
    max_delay: float = field(0.05, "How long a request waits for others to fill its batch.", unit="s", minimum=0)
    drain: float = field(
        10.0,
        "With `anchor: generation`: how long complete new weights wait for requests of the version before. Later ones"
        " are computed by the newer version, marked and counted.",
        unit="s",
        minimum=0,
    )
    while_loading: str = field(
        "wait",
        "With `anchor: latest`, for requests of a version that is still on its way: `wait` for it, or `old_version`"
        " answers.",
        choices=("wait", "old_version"),
    )
    staging: str = field(
        "device",
        "Where new weights gather beside the live ones until all of them are there.",
        choices=("device", "host"),
    )
    timeout: float = seconds(
        120.0, "One request, whichever server answers it; after it the trainer computes those log-probs itself."
    )

    @property
    def enabled(self) -> bool:
        return self.backend != DISABLED

    @property
    def shared_accelerators(self) -> int:
        """Of the servers that follow the policy, together."""
        return self.nnodes * self.n_gpus_per_node if self.enabled else 0

    @property
    def ranks(self) -> int:
        """Accelerators of one server."""
        return self.shared_accelerators // self.replicas

    @property
    def accelerators(self) -> int:
        """Of all servers together."""
        return self.shared_accelerators + self.reference_replicas * self.ranks

    @property
    def scoring(self) -> ScoringSettings:
        """What each server is told."""
        return ScoringSettings(
            anchor=Anchor(self.anchor),
            max_batch_tokens=self.max_batch_tokens,
            max_delay_s=self.max_delay,
            drain_s=self.drain,
            answer_stale=self.while_loading == "old_version",
        )
