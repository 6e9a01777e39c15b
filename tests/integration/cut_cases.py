# SPDX-License-Identifier: Apache-2.0
"""Prompts with sampling parameters of every kind, for engines whose answers are interrupted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from odd_processor import OddTokens
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from recipe.async_engine.engines.vllm.continued_answers import SCHEDULER

END, THINK, THOUGHT = "<|end|>", "<think>", "</think>"
# Pairs of bytes, so that a stop string may begin and end within a token.
MERGES = [(left, right) for left in "aeiou" for right in "nrst"]
LONGEST, AT_ONCE, BLOCK = 40, 16, 128
STRUCTURES: list[dict[str, Any]] = [
    {"regex": r"([a-f]{3}-){2,9}[0-9]{4,12}"},
    {"choice": ["abcdefghijklmnop", "abcdefghzzzzzzzz", "an entirely other answer"]},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
            "required": ["a"],
        }
    },
    {"json_object": True},
    {"grammar": 'root ::= "(" root ")" | "x" root | "y"'},
]


# Settings of an engine that supports all these parameters; the last one continues interrupted answers.
ENGINE: dict[str, Any] = {
    "reasoning_config": {"reasoning_start_str": THINK, "reasoning_end_str": THOUGHT},
    "logits_processors": [f"{OddTokens.__module__}:{OddTokens.__name__}"],
    "scheduler_cls": SCHEDULER,
}


def make_tokenizer() -> Any:
    """Return a tokenizer of bytes and some pairs of bytes."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [END, THINK, THOUGHT, *letters, *(left + right for left, right in MERGES)]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=MERGES, eos_token=END, pad_token=END, unk_token=END)
    tokenizer.add_tokens([THINK, THOUGHT])
    return tokenizer


def letters_of(tokenizer: Any) -> dict[str, int]:
    """Return the letters that are tokens of their own, whatever their neighbours."""
    return {letter: tokenizer.convert_tokens_to_ids(letter) for letter in "bcdfghjklmpqvwxz"}


class Case:
    """One prompt, and the sampling parameters of its answer."""

    def __init__(self, number: int, rng: random.Random, vocabulary: int, greedy: bool) -> None:
        self.number, self.rng, self.vocabulary = number, rng, vocabulary
        # Some have an answer that crosses the end of a block of cached prefixes.
        length = rng.choice([rng.randint(2, 12), BLOCK - rng.randint(1, LONGEST // 2)])
        self.prompt = [rng.randrange(3, vocabulary) for _ in range(length)]
        self.parameters: dict[str, Any] = {"max_tokens": rng.randint(LONGEST // 2, LONGEST), "logprobs": True}
        # On a CPU vLLM ignores all seeds of a batch in which one request has none, so every request gets one.
        self.parameters |= {"temperature": 0.0} if greedy else {"temperature": 1.0, "seed": rng.randrange(1 << 30)}

    def tokens(self, count: int) -> list[int]:
        return self.rng.sample(range(3, self.vocabulary), count)

    def choose(self, kinds: Sequence[str], whole: str, letters: dict[str, int]) -> None:
        """Choose parameters of these kinds; ``whole`` is the text of the answer without them."""
        from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

        rng = self.rng
        at = rng.randrange(max(1, len(whole) - 3))
        begin = rng.randrange(3, 8)
        # Half of the words from four letters, which are likely everywhere, so that a cut is usually within one.
        four = rng.sample(list(letters), 4)
        bad_words = rng.sample([left + right for left in four for right in four], 8)
        choices: dict[str, Any] = {
            "penalties": {
                "presence_penalty": rng.uniform(-1, 2),
                "frequency_penalty": rng.uniform(-0.5, 2),
                "repetition_penalty": rng.uniform(0.8, 1.6),
            },
            "filters": {"top_p": rng.uniform(0.5, 1), "top_k": rng.randint(2, 40), "min_p": rng.uniform(0, 0.2)},
            "least": {"min_tokens": rng.randint(1, 19), "stop_token_ids": self.tokens(60)},
            "end": {"ignore_eos": True, "stop_token_ids": self.tokens(3)},
            "stop": {
                "stop": [whole[at : at + rng.randint(2, 5)] or "zz", "qqqq"],
                "include_stop_str_in_output": rng.random() < 0.5,
                "min_tokens": rng.choice([0, 0, rng.randint(1, 15)]),
            },
            "special": {
                "stop": whole[at : at + 2] or "zz",
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "logit_bias": {1: 3.0, 2: 3.0},
            },
            "silent": {"detokenize": False},
            "bias": {"logit_bias": {token: rng.uniform(-3, 6) for token in self.tokens(6)}},
            "allowed": {"allowed_token_ids": [0, *self.tokens(12)]},
            "words": {"bad_words": bad_words, "logit_bias": {letters[letter]: 8.0 for letter in four}},
            "structure": {
                "structured_outputs": StructuredOutputsParams(**rng.choice(STRUCTURES)),
                "repetition_penalty": 1.3,
            },
            "thinking": {"thinking_token_budget": rng.randint(1, 20), "logit_bias": {1: 4.0, 2: 2.0}},
            "repetition": {
                "repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_count=2),
                "repetition_penalty": 0.6,
            },
            "processor": {"extra_args": {"odd_after": begin}},
            "returned": {
                "prompt_logprobs": rng.randint(0, 2),
                "output_kind": rng.choice([RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY]),
                "stream_interval": rng.randint(1, 5),
                # With False vLLM would be asked for log-probs of a cached prompt, which it has not computed.
                "skip_reading_prefix_cache": rng.choice([None, True]),
                "skip_clone": rng.random() < 0.5,
                "flat_logprobs": rng.random() < 0.5,
                "n": 1,
            },
        }
        self.kinds = kinds
        for kind in self.kinds:
            self.parameters |= choices[kind]
        if "structure" in self.kinds:
            # A short grammar may end before that many tokens, and the answer fails, interrupted or not.
            self.parameters["min_tokens"] = 0
        if "thinking" in self.kinds and rng.random() < 0.5:
            self.prompt[-rng.randint(1, len(self.prompt))] = 1


KINDS = [
    *("structure", "thinking", "stop", "penalties", "processor", "repetition", "returned", "words"),
    *("special", "least", "filters", "end", "silent", "bias", "allowed"),
]
# These may forbid every token that a grammar allows: such an answer fails, interrupted or not. With xgrammar a token of
# `stop_token_ids` can only end an answer.
FORBIDDING = {"processor", "allowed", "words", "least", "end"}


def batches(rng: random.Random) -> Iterator[Sequence[str]]:
    """Yield kinds of parameters for successive batches, each greedy and with seeds: first single kinds, then several.

    All requests of a batch have the same kinds, because vLLM's own answers are not reproducible if only some requests
    of a batch have logits processors.
    """
    for kind in KINDS:
        yield from [(kind,)] * 2
    while True:
        kinds = rng.sample(KINDS, rng.randint(2, 4))
        if "structure" not in kinds or FORBIDDING.isdisjoint(kinds):
            yield from [kinds] * 2
