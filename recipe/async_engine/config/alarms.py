# SPDX-License-Identifier: Apache-2.0
"""The settings of the alarms: `recipe.async_engine.core.alarms` says what each one watches."""

import dataclasses

from recipe.async_engine.config.fields import field


@dataclasses.dataclass(frozen=True, slots=True)
class Alarms:
    """What ends a run that goes on without learning. With null an alarm is counted and shown, and never ends it."""

    failed_groups: float | None = field(
        0.5,
        "The run ends where more than this share of prompt groups has failed for good, of the last four batches' worth"
        " (32 groups at least), or of all in a run of fewer. The alarm rings at a share of 0.1.",
        above=0,
    )
    skipped_updates: int | None = field(
        3,
        "The run ends after so many updates in a row that the optimizer skipped because the norm of the gradient was"
        " not finite; those of actor and critic are counted apart.",
        unit="updates",
        minimum=1,
    )
    unchanged_weights: int | None = field(
        3,
        "The run ends after so many versions in a row whose weights arrived as those of the version before, although"
        " their updates had gradients and a learning rate: the rollout does not see what is trained.",
        unit="versions",
        minimum=1,
    )
    zero_gradients: int | None = field(
        None,
        "The run ends after so many steps in a row in which the gradient was exactly 0; those of actor and critic are"
        " counted apart. The alarm rings at 3: a policy that has nothing left to learn has such steps.",
        unit="steps",
        minimum=1,
    )
    uniform_rewards: int | None = field(
        None,
        "The run ends after so many steps in a row in which the answers to each prompt all had the same reward (with"
        " one answer for each prompt: all of the batch). The alarm rings at 3.",
        unit="steps",
        minimum=1,
    )
    empty_answers: int | None = field(
        None,
        "The run ends after so many steps in a row of whose answers half or more had no token, or special ones alone.",
        unit="steps",
        minimum=1,
    )
    failed_validation: int | None = field(
        None,
        "The run ends after so many validations in a row in which a prompt was left without a score.",
        unit="validations",
        minimum=1,
    )
    exit_status: bool = field(
        True,
        "Whether a run that ended with alarms, and otherwise well, exits with status 3. false: with 0.",
    )
