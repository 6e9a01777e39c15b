# SPDX-License-Identifier: Apache-2.0
"""The settings of the log-prob servers, and the sources of proximal log-probs."""

from enum import StrEnum
from typing import Literal

from pydantic.dataclasses import dataclass

from recipe.async_engine.config.fields import STRICT, seconds, setting
from recipe.async_engine.core.scoring import Anchor, ScoringSettings

DISABLED = "disabled"


class Proximal(StrEnum):
    """The source of the proximal log-probs: those of the proximal policy, relative to which an update is clipped."""

    BYPASS = "bypass"
    RECOMPUTE = "recompute"
    SERVER = "server"
    LOGLINEAR = "loglinear"


@dataclass(frozen=True, slots=True, config=STRICT)
class LogProbServers:
    """The Model Engine Server: replicas of the training engine, on resources of their own, that compute log-probs.

    Hydra's config group `model_engine_server` (`disabled`, `fsdp2` or `megatron`) composes this section. It adds the
    subsection `engine`, which is verl's own configuration of the chosen training engine.
    """

    backend: Literal["disabled", "fsdp2", "megatron"] = setting("disabled", "The training engine.")
    nnodes: int = setting(1, "Nodes for log-prob servers.", ge=1)
    n_gpus_per_node: int = setting(8, "Accelerators for log-prob servers on each node.", ge=1)
    replicas: int = setting(1, "Servers that share these accelerators evenly.", ge=1)
    reference_replicas: int = setting(
        0,
        "Servers beside these, each with as many accelerators as one of them, that keep the initial weights and compute"
        " the log-probs of the reference policy. If they fail to answer, the trainer's reference workers compute them.",
        ge=0,
    )
    anchor: Literal[Anchor.GENERATION, Anchor.LATEST] = setting(
        Anchor.GENERATION,
        "Which version computes log-probs: `generation`, for each token the version that sampled it; `latest`, the"
        " newest published version, and again for samples that still wait when it changes.",
    )
    max_batch_tokens: int = setting(
        16384,
        "Tokens of a batch of one server, prompts included, which its data-parallel ranks share: a rank has about this"
        " divided by their number at once. A longer sequence is a batch of its own.",
        unit="tokens",
        ge=1,
    )
    max_delay: float = setting(0.05, "How long a request waits for others to fill its batch.", unit="s", ge=0)
    staging: Literal["device", "host"] = setting(
        "device",
        "Where new weights are kept beside the live ones until all of them have arrived.",
    )
    timeout: float = seconds(
        120.0, "One request, whichever server answers it; then the trainer computes these log-probs itself."
    )

    @property
    def enabled(self) -> bool:
        return self.backend != DISABLED

    @property
    def shared_accelerators(self) -> int:
        """Number of accelerators of the servers that score with the trained policy, not with the reference policy."""
        return self.nnodes * self.n_gpus_per_node if self.enabled else 0

    @property
    def ranks(self) -> int:
        """Number of accelerators of one server, each of which has one rank."""
        return self.shared_accelerators // self.replicas

    @property
    def accelerators(self) -> int:
        """Number of accelerators of all servers, including those of the reference policy."""
        return self.shared_accelerators + self.reference_replicas * self.ranks

    @property
    def scoring(self) -> ScoringSettings:
        return ScoringSettings(
            anchor=self.anchor,
            max_batch_tokens=self.max_batch_tokens,
            max_delay_s=self.max_delay,
        )
