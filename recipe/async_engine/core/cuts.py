# SPDX-License-Identifier: Apache-2.0
"""How each sampling parameter of a rollout engine behaves when an answer is interrupted and later continued.

Contract: with unchanged weights, an interrupted and continued answer has exactly the tokens that the engine would have
sampled without the interruption. The request that continues an answer has the parameters of the whole answer and, under
the key `SAMPLED`, the tokens sampled before, which the engine treats as its own output (the packages in
`recipe.async_engine.engines` make it do so). A request with parameters that do not allow this is refused when the
answer begins. docs/partial-rollout.md says why a continued answer obeys each parameter. Shown by
tests/core/test_cuts.py, which fails if that page lacks a parameter, and with a real engine by
tests/integration/test_cut_answers.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SAMPLED = "recipe_sampled"
"""Key in a request's ``extra_args`` for the answer's tokens that were sampled before an interruption."""

_DELTA = 1  # an engine's `RequestOutputKind.DELTA`


def sampled_before(sampling_params: Any) -> list[int]:
    """Return the tokens that a continued answer had before its interruption, or [] for a new answer."""
    before: list[int] = (getattr(sampling_params, "extra_args", None) or {}).get(SAMPLED, [])
    return before


def refused(sampling_params: Mapping[str, Any]) -> str | None:
    """Return the reason why an answer with these parameters cannot be continued after an interruption, or None."""
    if sampling_params.get("n") not in (None, 1):
        return f"n={sampling_params['n']}: a request has one answer; send one request for each answer, or set rollout.n"
    if getattr(sampling_params.get("output_kind"), "value", sampling_params.get("output_kind")) == _DELTA:
        return "output_kind=DELTA: verl's server would keep only the last piece of an answer; remove it"
    return None


def engine_request(
    prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], sampled: int
) -> tuple[list[int], dict[str, Any]]:
    """Return the prompt ids and sampling parameters to send to the engine.

    For a continued answer, the last ``sampled`` of ``prompt_ids`` are the answer's tokens so far. They are moved from
    the prompt ids to the parameters, under the key `SAMPLED`.
    """
    # Drop flat_logprobs: if no log-probs are requested, it selects a format that verl cannot read.
    parameters = {name: given for name, given in sampling_params.items() if name != "flat_logprobs"}
    split = len(prompt_ids) - sampled
    if sampled:
        before = list(prompt_ids[split:])
        parameters["extra_args"] = {**(parameters.get("extra_args") or {}), SAMPLED: before}
    return list(prompt_ids[:split]), parameters
