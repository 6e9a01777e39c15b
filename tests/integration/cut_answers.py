# SPDX-License-Identifier: Apache-2.0
"""Answers that are cut at random, beside the same ones whole: the real client, server and engine, without Ray.

A process of its own, started by test_cut_answers.py: it prints what it saw as one line of JSON. The weights stay the
same, so that each answer can be compared with the whole one, token by token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import verl  # noqa: F401  (its plugin makes this vLLM known)
from odd_processor import OddTokens
from remote_fakes import Handle
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

END, THINK, THOUGHT = "<|end|>", "<think>", "</think>"
# Pairs of bytes, so that a stop string may begin and end within a token.
MERGES = [(left, right) for left in "aeiou" for right in "nrst"]
LONGEST, AT_ONCE, BLOCK = 40, 16, 128
CUT_EVERY_S = 0.1
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


def make_model(folder: Path) -> Any:
    """A random model of bytes, and its tokenizer."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [END, THINK, THOUGHT, *letters, *(left + right for left, right in MERGES)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: place for place, token in enumerate(tokens)},
        merges=MERGES,
        eos_token=END,
        pad_token=END,
        unk_token=END,
    )
    tokenizer.add_tokens([THINK, THOUGHT])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokens),
        num_key_value_heads=1,
        initializer_range=0.3,
        max_position_embeddings=512,
        eos_token_id=0,
        tie_word_embeddings=False,
        **sizes,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return tokenizer


def make_engine(folder: Path) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from recipe.async_engine.platform.continued_answers import SCHEDULER

    settings = AsyncEngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=AT_ONCE * 256,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="mp",
        reasoning_config={"reasoning_start_str": THINK, "reasoning_end_str": THOUGHT},
        logits_processors=[f"{OddTokens.__module__}:{OddTokens.__name__}"],
        worker_extension_cls="recipe.async_engine.weights.cpu_engine_extension.CPUStagingExtension",
        scheduler_cls=SCHEDULER,
    )
    return AsyncLLM.from_engine_args(settings)


class Config(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def make_server(engine: Any) -> Any:
    """A rollout server of this process, as it is once it has launched its engine."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import RolloutMode, vLLMHttpServer

    from recipe.async_engine.platform.continued_answers import in_output_processor
    from recipe.async_engine.replicas import server as servers

    class Server(servers.GatedVLLMHttpServer):
        """Counts the requests for what is missing of an answer."""

        cuts = 0

        async def generate(self, *args: Any, **request: Any) -> Any:
            self.cuts += bool(request["sampled"])
            return await super().generate(*args, **request)

    vLLMHttpServer._post_init = lambda self, devices: None
    servers.part_id = lambda node_rank: "run"
    server = object.__new__(Server)
    server.config = Config(
        load_format="auto",
        custom={"recipe": {}},
        max_model_len=256,
        response_length=LONGEST,
        prompt_length=BLOCK,
        full_determinism=False,
        enable_rollout_routing_replay=False,
        mtp=None,
    )
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    server.rollout_mode, server.global_steps = RolloutMode.STANDALONE, 0
    server.node_rank = server.replica_rank = server._admitting = 0
    server._submission_paused = server._rejecting = False
    server._resume_event = asyncio.Event()
    server._resume_event.set()
    server._disaggregation_role, server._pd_decode_peers = None, []
    server._post_init("")
    server.engine = engine
    engine.generate = server._outputs.watching(server._salted(engine.generate))
    in_output_processor(engine.output_processor)
    return server


def make_client(server: Any) -> Any:
    from omegaconf import OmegaConf

    from recipe.async_engine.replicas.load_balancer import CountingBalancer
    from recipe.async_engine.rollout.client import ResumingClient

    rollout = {"name": "vllm", "prompt_length": BLOCK, "response_length": LONGEST}
    training = {"partial_rollout": True, "timeouts": {"generation": 120.0}, "partial_tokens_interval": None}
    config = OmegaConf.create({"async_training": training, "actor_rollout_ref": {"rollout": rollout}})
    return ResumingClient(config, load_balancer_handle=Handle(CountingBalancer({"server-0": Handle(server)})))


class Case:
    """One prompt, and the parameters that its answer is asked for with."""

    def __init__(self, number: int, rng: random.Random, vocabulary: int, greedy: bool) -> None:
        self.number, self.rng, self.vocabulary = number, rng, vocabulary
        # Some have an answer that passes the end of a block of cached prefixes.
        length = rng.choice([rng.randint(2, 12), BLOCK - rng.randint(1, LONGEST // 2)])
        self.prompt = [rng.randrange(3, vocabulary) for _ in range(length)]
        self.parameters: dict[str, Any] = {"max_tokens": rng.randint(LONGEST // 2, LONGEST), "logprobs": True}
        # A batch without a seed for one of its requests draws with none of the others' seeds on a CPU.
        self.parameters |= {"temperature": 0.0} if greedy else {"temperature": 1.0, "seed": rng.randrange(1 << 30)}

    def tokens(self, count: int) -> list[int]:
        return self.rng.sample(range(3, self.vocabulary), count)

    def choose(self, kinds: Sequence[str], whole: str, words: list[str]) -> None:
        """Take parameters of these kinds; ``whole`` is the text of the answer without them."""
        from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

        rng = self.rng
        at = rng.randrange(max(1, len(whole) - 3))
        begin = rng.randrange(3, 8)
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
            "words": {"bad_words": rng.sample(words, 40)},
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
                # False would have vLLM give log-probs of a cached prompt that it has not computed.
                "skip_reading_prefix_cache": rng.choice([None, True]),
                "skip_clone": rng.random() < 0.5,
                "flat_logprobs": rng.random() < 0.5,
                "n": 1,
            },
        }
        self.kinds = kinds
        for kind in self.kinds:
            self.parameters |= choices[kind]
        if "thinking" in self.kinds and rng.random() < 0.5:
            self.prompt[-rng.randint(1, len(self.prompt))] = 1


KINDS = [
    *("structure", "thinking", "stop", "penalties", "processor", "repetition", "returned", "words"),
    *("special", "least", "filters", "end", "silent", "bias", "allowed"),
]


def batches(rng: random.Random) -> Iterator[Sequence[str]]:
    """Kinds of parameters for one batch after the other, each greedy and with seeds: alone first, then several.

    All of a batch have the same: vLLM's own answers are not the same twice where only some requests of a batch have
    logits processors.
    """
    for kind in KINDS:
        yield from [(kind,)] * 2
    while True:
        yield from [rng.sample(KINDS, rng.randint(2, 4))] * 2


async def answers(client: Any, cases: list[Case]) -> list[Any]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def answer(case: Case) -> Any:
        async with slots:
            try:
                return await client.generate(
                    f"{case.number}", prompt_ids=list(case.prompt), sampling_params=dict(case.parameters)
                )
            except Exception as error:
                return f"{type(error).__name__}: {error}"

    return await asyncio.gather(*[answer(case) for case in cases])


async def cutting(server: Any, rng: random.Random) -> None:
    """Cut what is under way again and again."""
    while True:
        await asyncio.sleep(rng.expovariate(1 / CUT_EVERY_S))
        await server.abort_all_requests(reset_prefix_cache=rng.random() < 0.5)
        await server.resume_generation()


def difference(cut: Any, whole: Any) -> str | None:
    """What of the first is not as in the second; None if nothing."""
    if isinstance(cut, str) or isinstance(whole, str):
        return None if type(cut) is type(whole) else f"{cut} for {whole}"
    if cut.token_ids != whole.token_ids:
        return f"{cut.token_ids} for {whole.token_ids}"
    if not torch.allclose(torch.tensor(cut.log_probs), torch.tensor(whole.log_probs), atol=1e-3):
        return f"log-probs {cut.log_probs} for {whole.log_probs}"
    for name in ("prompt_ids", "prompt_logprobs"):
        found, expected = cut.extra_fields.get(name), whole.extra_fields.get(name)
        if (found is None) != (expected is None) or (found is not None and len(found) != len(expected)):
            return f"{name} {found} for {expected}"
    return None


async def play(folder: Path, wanted: int, seed: int) -> dict[str, Any]:
    tokenizer = make_model(folder)
    engine = make_engine(folder)
    server = make_server(engine)
    client = make_client(server)
    rng = random.Random(seed)
    words = [tokenizer.decode([left, right]) for left in range(3, 40) for right in range(60, 90)]
    words = [word for word in words if word.strip() and "\ufffd" not in word]
    seen: dict[str, Any] = {"cuts": 0, "answers": 0, "kinds": {}, "errors": [], "differences": []}
    for turn, kinds in enumerate(batches(rng)):
        if seen["cuts"] >= wanted:
            break
        cases = [Case(number, rng, len(tokenizer), turn % 2 == 0) for number in range(AT_ONCE)]
        for case, plain in zip(cases, await answers(client, cases), strict=True):
            case.choose(kinds, tokenizer.decode(plain.token_ids), words)
        wholes = await answers(client, cases)
        server.cuts = 0
        cutter = asyncio.create_task(cutting(server, rng))
        cuts = await answers(client, cases)
        cutter.cancel()
        await asyncio.wait({cutter})
        await server.resume_generation()
        seen["cuts"] += server.cuts
        for case, cut, whole in zip(cases, cuts, wholes, strict=True):
            seen["answers"] += 1
            for kind in case.kinds:
                seen["kinds"][kind] = seen["kinds"].get(kind, 0) + 1
            if isinstance(whole, str):
                seen["errors"].append([case.kinds, whole])
            if (found := difference(cut, whole)) is not None:
                seen["differences"].append([case.kinds, case.parameters.get("seed"), repr(case.parameters), found])
    engine.shutdown()
    return seen


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = asyncio.run(play(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    sys.stdout.write(json.dumps(found) + "\n")
