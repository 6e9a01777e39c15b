# SPDX-License-Identifier: Apache-2.0
"""Requests of vLLM's engine that end after some of their tokens and go on as others, beside the same ones whole."""

from __future__ import annotations

import random
from typing import Any

from cut_cases import AT_ONCE, KINDS, Case, letters_of, make_tokenizer

from recipe.async_engine.core.cuts import SAMPLED
from recipe.async_engine.engines.vllm.continued_answers import in_output_processor


def answer_all(llm: Any, cases: list[Case], before: list[list[int]], ends: list[int]) -> list[tuple[list[int], bool]]:
    """What follows ``before`` in each answer, as far as its end or ``ends`` tokens of it; and whether it is whole."""
    from vllm import SamplingParams

    engine, answers = llm.llm_engine, {}
    for number, (case, sampled) in enumerate(zip(cases, before, strict=True)):
        given = {name: value for name, value in case.parameters.items() if name not in ("logprobs", "output_kind")}
        if sampled:
            given["extra_args"] = {**given.get("extra_args", {}), SAMPLED: sampled}
        engine.add_request(f"{number}", {"prompt_token_ids": case.prompt}, SamplingParams(**given))
    while engine.has_unfinished_requests():
        for output in engine.step():
            number, tokens = int(output.request_id), list(output.outputs[0].token_ids)
            answers[number] = (tokens, output.outputs[0].finish_reason not in (None, "abort"))
            if not output.finished and len(before[number]) + len(tokens) >= ends[number]:
                engine.abort_request([output.request_id], internal=False)
    return [answers[number] for number in range(len(cases))]


def cut_and_whole(llm: Any, seed: int) -> dict[str, Any]:
    """How many cuts, and by the kind of its parameters each answer that is another one for having been cut."""
    tokenizer, rng = make_tokenizer(), random.Random(seed)
    in_output_processor(llm.llm_engine.output_processor)
    seen: dict[str, Any] = {"cuts": 0, "differences": []}
    for turn, kind in enumerate(KINDS):
        cases = [Case(number, rng, len(tokenizer), turn % 2 == 0) for number in range(AT_ONCE // 4)]
        nothing: list[list[int]] = [[] for _ in cases]
        for case, (tokens, _) in zip(cases, answer_all(llm, cases, nothing, [1000] * len(cases)), strict=True):
            case.choose([kind], tokenizer.decode(tokens), letters_of(tokenizer))
        wholes = [tokens for tokens, _ in answer_all(llm, cases, nothing, [1000] * len(cases))]
        answers, left = nothing, list(range(len(cases)))
        while left:
            ends = [len(answers[number]) + rng.randint(1, 12) for number in left]
            before = [answers[number] for number in left]
            seen["cuts"] += sum(map(bool, before))
            found = answer_all(llm, [cases[number] for number in left], before, ends)
            for number, (tokens, _) in zip(left, found, strict=True):
                answers[number] = answers[number] + tokens
            left = [number for number, (_, is_whole) in zip(left, found, strict=True) if not is_whole]
        for case, cut, whole in zip(cases, answers, wholes, strict=True):
            if cut != whole:
                seen["differences"].append([kind, repr(case.parameters), cut, whole])
    return seen
