# SPDX-License-Identifier: Apache-2.0
"""How each of vLLM's sampling parameters behaves when an answer is interrupted and later continued.

Contract: with unchanged weights, an interrupted and continued answer has exactly the tokens that the engine would have
sampled without the interruption. The request that continues an answer has the parameters of the whole answer and, under
the key `SAMPLED`, the tokens sampled before, which the engine treats as its own output
(`engines/vllm/continued_answers.py`). A request with parameters that do not allow this is refused when the answer
begins. Shown by tests/core/test_cuts.py, which fails for a vLLM parameter without an entry in `SPANS`, and with a real
engine by tests/integration/test_cut_answers.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SAMPLED = "recipe_sampled"
"""Key in a request's ``extra_args`` for the answer's tokens that were sampled before an interruption."""

_NEXT = "decides on one token at a time, by its logits alone"
_OUTPUT = "goes by the answer's tokens so far, which the engine has"
_COUNT = "counts the answer's tokens, those before the cut among them"
_TEXT = "goes by the answer's text so far, which the server's detokenizer has read again"
_REQUEST = "is about how the engine gives an answer back, not about its tokens"
_DERIVED = "vLLM's own, derived from the others"

SPANS = {
    "temperature": _NEXT,
    "top_p": _NEXT,
    "top_k": _NEXT,
    "min_p": _NEXT,
    "logit_bias": _NEXT,
    "allowed_token_ids": _NEXT,
    "stop_token_ids": _NEXT,
    "ignore_eos": _NEXT,
    "presence_penalty": _OUTPUT,
    "frequency_penalty": _OUTPUT,
    "repetition_penalty": _OUTPUT,
    "bad_words": _OUTPUT,
    "watermarking": _OUTPUT,
    "trace_decode_token_ids": _OUTPUT,
    "repetition_detection": _OUTPUT,
    "structured_outputs": "its grammar has taken in the tokens before the cut",
    "thinking_token_budget": "has gone through the tokens before the cut one by one",
    "extra_args": "a logits processor is given the answer's tokens so far; calls that it counts itself begin anew",
    "max_tokens": _COUNT,
    "min_tokens": _COUNT,
    "seed": "its generator has drawn as often as for the tokens before the cut",
    "stop": _TEXT,
    "include_stop_str_in_output": _TEXT,
    "skip_special_tokens": _TEXT,
    "spaces_between_special_tokens": _TEXT,
    "detokenize": _TEXT,
    "logprobs": "each part brings those of its own tokens",
    "prompt_logprobs": "are of the prompt alone, in whichever part has them first",
    "prompt_logprob_start": _REQUEST,
    "prompt_logprob_token_ids": _REQUEST,
    "logprob_token_ids": _REQUEST,
    "flat_logprobs": _REQUEST,
    "n": "one answer a request: more are refused",
    "output_kind": "DELTA is refused: verl's server would keep the last piece of an answer only",
    "stream_interval": _REQUEST,
    "skip_clone": _REQUEST,
    "skip_reading_prefix_cache": _REQUEST,
    "routed_experts_prompt_start": _REQUEST,
    "output_text_buffer_length": _DERIVED,
    "_eos_token_id": _DERIVED,
    "_all_stop_token_ids": _DERIVED,
    "_bad_words_token_ids": _DERIVED,
}
"""For each of vLLM's sampling parameters, why a continued answer obeys it as an uninterrupted one would."""

_DELTA = 1


def sampled_before(sampling_params: Any) -> list[int]:
    """Return the tokens that a continued answer had before its interruption, or [] for a new answer."""
    before: list[int] = (getattr(sampling_params, "extra_args", None) or {}).get(SAMPLED, [])
    return before


def refused(sampling_params: Mapping[str, Any]) -> str | None:
    """Return why an answer with these parameters could not be continued after an interruption; None if it could."""
    if sampling_params.get("n") not in (None, 1):
        return f"n={sampling_params['n']}: a request has one answer; ask once for each, or set rollout.n"
    if getattr(sampling_params.get("output_kind"), "value", sampling_params.get("output_kind")) == _DELTA:
        return "output_kind=DELTA: verl's server keeps the last piece of an answer only; remove it"
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
