# SPDX-License-Identifier: Apache-2.0
"""Compares answers that are interrupted at random with uninterrupted ones: real client, server and engine, without Ray.

It is a separate process, started by test_cut_answers.py, which prints its results as one line of JSON. The weights do
not change, so each answer can be compared with the uninterrupted one, token by token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import verl  # noqa: F401  (its plugin makes this vLLM known)
from cut_cases import AT_ONCE, BLOCK, ENGINE, LONGEST, Case, batches, letters_of, make_tokenizer
from remote_fakes import Handle
from transformers import Qwen2Config, Qwen2ForCausalLM

CUT_EVERY_S = 0.1


def make_model(folder: Path) -> Any:
    """Create a random model over bytes, and its tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
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
        worker_extension_cls="recipe.laptop.engines.engine_extension.CPUStagingExtension",
        **ENGINE,
    )
    return AsyncLLM.from_engine_args(settings)


class Config(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def make_server(engine: Any, **settings: Any) -> Any:
    """Create a rollout server in this process, in its state after it has launched its engine.

    ``settings`` are rollout settings that differ from those below.
    """
    from verl.workers.rollout.vllm_rollout.vllm_async_server import RolloutMode, vLLMHttpServer

    from recipe.async_engine.engines.vllm import server as servers
    from recipe.async_engine.engines.vllm.continued_answers import patch_output_processor

    class Server(servers.GatedVLLMHttpServer):
        """Counts the requests for the remainder of an answer."""

        cuts = 0

        async def generate(self, *args: Any, **request: Any) -> Any:
            self.cuts += bool(request["sampled"])
            return await super().generate(*args, **request)

    vLLMHttpServer._post_init = lambda self, devices: None
    servers.part_id = lambda node_rank: "run"
    server = object.__new__(Server)
    own = {"max_model_len": 256, "response_length": LONGEST, "prompt_length": BLOCK}
    own["enable_rollout_routing_replay"] = False
    server.config = Config(
        load_format="auto", custom={"recipe": {}}, full_determinism=False, mtp=None, **own | settings
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
    patch_output_processor(engine.output_processor)
    return server


def make_client(*servers: Any, fetch_every_s: float | None = None, **settings: Any) -> Any:
    from omegaconf import OmegaConf

    from recipe.async_engine.engines.load_balancer import CountingBalancer
    from recipe.async_engine.rollout.client import ResumingClient

    rollout = {"name": "vllm", "prompt_length": BLOCK, "response_length": LONGEST} | settings
    timeouts = dict.fromkeys(["generation", "batch_wait", "weight_sync", "checkpoint", "validation"], 120.0)
    training = {"partial_rollout": True, "timeouts": timeouts, "partial_tokens_interval": fetch_every_s}
    config = OmegaConf.create({"async_training": training, "actor_rollout_ref": {"rollout": rollout}})
    handles = {f"server-{number}": Handle(server) for number, server in enumerate(servers)}
    return ResumingClient(config, load_balancer_handle=Handle(CountingBalancer(handles)))


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
    """Interrupt all running requests repeatedly."""
    while True:
        await asyncio.sleep(rng.expovariate(1 / CUT_EVERY_S))
        await server.abort_all_requests(reset_prefix_cache=rng.random() < 0.5)
        await server.resume_generation()


def difference(cut: Any, whole: Any) -> str | None:
    """Return how the first answer differs from the second; None if it does not."""
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
    letters = letters_of(tokenizer)
    seen: dict[str, Any] = {"cuts": 0, "answers": 0, "kinds": {}, "errors": [], "differences": []}
    for turn, kinds in enumerate(batches(rng)):
        if seen["cuts"] >= wanted:
            break
        cases = [Case(number, rng, len(tokenizer), turn % 2 == 0) for number in range(AT_ONCE)]
        for case, plain in zip(cases, await answers(client, cases), strict=True):
            case.choose(kinds, tokenizer.decode(plain.token_ids), letters)
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
