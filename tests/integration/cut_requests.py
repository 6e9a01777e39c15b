# SPDX-License-Identifier: Apache-2.0
"""Ends requests of vLLM's engine after some tokens, continues them as new ones, and compares them with whole ones."""

from __future__ import annotations

import random
from typing import Any

from cut_cases import AT_ONCE, KINDS, Case, letters_of, make_tokenizer

from recipe.async_engine.core.cuts import SAMPLED
from recipe.async_engine.engines.vllm.continued_answers import patch_output_processor


def answer_all(llm: Any, cases: list[Case], before: list[list[int]], ends: list[int]) -> list[tuple[list[int], bool]]:
    """Return what follows ``before`` in each answer, up to ``ends`` tokens, and whether the answer is complete."""
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
    """Return the number of cuts and, by kind of parameters, each answer that the cuts changed."""
    tokenizer, rng = make_tokenizer(), random.Random(seed)
    patch_output_processor(llm.llm_engine.output_processor)
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
