# SPDX-License-Identifier: Apache-2.0
"""The entropy of the policy over a batch, as verl reports it where its trainer has computed the column."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss


def entropy_metric(entropy: torch.Tensor, response_mask: torch.Tensor, actor: Any) -> dict[str, float]:
    """``actor/entropy``, aggregated as the loss is (verl/experimental/separation/ray_trainer.py:522).

    Args:
        entropy: of each token's distribution, (rows, R).
        response_mask: 1 for the tokens that are trained, (rows, R).
        actor: verl's section ``actor_rollout_ref.actor``.
    """
    total = agg_loss(
        loss_mat=entropy,
        loss_mask=response_mask,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
    )
    return {"actor/entropy": total.item()}
