# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own parts make of an answer's tokens, given one by one or, those before a cut, at once.

The engine as a whole is in test_staged_engine.py and test_cut_answers.py.
"""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cut_cases import THINK, THOUGHT, make_tokenizer
from vllm import SamplingParams
from vllm.reasoning import ReasoningParserManager
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from recipe.async_engine.core.cuts import SAMPLED
from recipe.async_engine.engines.vllm import continued_answers
from recipe.async_engine.engines.vllm.continued_answers import feed_tokens

TOKENIZER = make_tokenizer()


def request_of(prompt: list[int], **parameters: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(**parameters),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def stopped_at(detokenizer: Any, tokens: list[int]) -> int:
    """After how many of these tokens it finds a stop string; beyond them all if it does not."""
    return next((n for n, token in enumerate(tokens, 1) if detokenizer.update([token], False)), len(tokens) + 1)


@pytest.mark.parametrize("kind", [FastIncrementalDetokenizer, SlowIncrementalDetokenizer])
@pytest.mark.parametrize("seed", range(30))
def test_a_stop_string_is_found_wherever_the_answer_was_cut(kind: Any, seed: int) -> None:
    """Tokens are bytes and pairs of bytes, so that characters are cut too."""
    rng = random.Random(seed)
    prompt = TOKENIZER.encode("ab\u00e9")
    text = "".join(rng.choice(["an", "e", "r", "\u00e9", "\u4e16", "\U0001f600", "in", " "]) for _ in range(30))
    tokens = TOKENIZER.encode(text)
    begin = rng.randrange(len(text) - 5)
    parameters = {
        "max_tokens": 1000,
        "stop": [text[begin : begin + rng.randint(1, 5)], "never"],
        "include_stop_str_in_output": rng.random() < 0.5,
        "min_tokens": rng.choice([0, rng.randrange(len(tokens))]),
    }
    whole = kind(TOKENIZER, request_of(prompt, **parameters))
    end = stopped_at(whole, tokens)
    for cut in range(1, min(end, len(tokens))):
        rest = kind(TOKENIZER, request_of(prompt, **parameters))
        feed_tokens(rest, tokens[:cut])
        assert rest.num_output_tokens() == 0
        assert cut + stopped_at(rest, tokens[cut:]) == end
        assert rest.output_text == whole.output_text
        assert list(rest.output_token_ids) == tokens[cut:end]


def holder_of() -> ThinkingBudgetStateHolder:
    reasoning = SimpleNamespace(reasoning_start_token_ids=[1], reasoning_end_token_ids=[2, 3])
    return ThinkingBudgetStateHolder(reasoning, 4, 0, torch.device("cpu"), False)


def forced(holder: ThinkingBudgetStateHolder, tokens: list[int]) -> int:
    """The token that the holder has come next, 0 if it leaves that open."""
    holder.update_state([tokens], None)
    logits = holder.apply_to_logits(torch.zeros(1, 16), False, [[]])
    return int(logits[0].argmax())


@pytest.mark.parametrize("seed", range(30))
def test_a_thinking_budget_is_spent_by_the_tokens_before_a_cut_as_if_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.choice([1, 2, 3, 4, 5]) for _ in range(rng.randrange(6))]
    parameters = SamplingParams(thinking_token_budget=rng.randint(0, 8))
    tokens: list[int] = []
    whole, seen = holder_of(), []
    sync = continued_answers._replaying(ThinkingBudgetStateHolder.sync_batch)
    sync(whole, SimpleNamespace(removed=[], added=[(0, parameters, prompt, tokens)], moved=[]))
    for _ in range(30):
        seen.append(forced(whole, tokens))
        tokens.append(seen[-1] or rng.choice([1, 2, 3, 4, 5, 6]))
    for cut in range(1, 30):
        rest, before = holder_of(), tokens[:cut]
        sync(rest, SimpleNamespace(removed=[], added=[(0, parameters, prompt, before)], moved=[]))
        for place in range(cut, 30):
            assert forced(rest, before) == seen[place]
            before.append(tokens[place])


@pytest.mark.parametrize("seed", range(20))
def test_a_grammar_takes_in_what_follows_the_reasoning_before_a_cut(seed: int) -> None:
    rng = random.Random(seed)
    reasoner = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(TOKENIZER)
    start, end = TOKENIZER.convert_tokens_to_ids([THINK, THOUGHT])
    prompt = [4, start, *rng.choices(range(5, 20), k=2), *rng.choice([[], [end]])]
    before = rng.choices([*range(5, 20), end], k=rng.randint(1, 20))
    asked = SimpleNamespace(reasoning_ended=None)
    request = SimpleNamespace(
        prompt_token_ids=prompt,
        structured_output_request=asked,
        sampling_params=SamplingParams(extra_args={SAMPLED: before}),
    )
    grammars = SimpleNamespace(reasoner_cls=type(reasoner), enable_in_reasoning=False, _get_reasoner=lambda _: reasoner)
    ruled = continued_answers._after_reasoning(copy.copy(request), grammars)
    if end in prompt:
        assert ruled == before and asked.reasoning_ended
    else:
        assert ruled == (before[before.index(end) + 1 :] if end in before else [])
        assert asked.reasoning_ended == (end in before)
    grammars.enable_in_reasoning = True
    assert continued_answers._after_reasoning(request, grammars) == before
