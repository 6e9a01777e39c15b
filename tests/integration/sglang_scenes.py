# SPDX-License-Identifier: Apache-2.0
"""Plays scenes with one real SGLang server, whose weights arrive through the real adapter, without Ray.

It is a separate process, started by test_sglang_server.py, which prints its results as one line of JSON. With the
weights `says` (v) the next token is always `token_of` (v), whatever precedes it; the weights `random_weights` (v) are
compared with Hugging Face's forward pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import httpx
import psutil
import torch
import verl  # noqa: F401  (its plugin makes a CPU ready for SGLang)
from remote_fakes import Handle
from swap_scenario import token_of
from swap_scenario import weights_of as weights_that_say
from transformers import AutoConfig, AutoModelForCausalLM

from recipe.async_engine.record.activity import Work

PLACES, LONGEST = 4, 96
PROMPT = [5, 9, 17, 6, 11]
LONG_PROMPT = [4 + 7 * place % 23 for place in range(60)]
NEVER_S, SOON_S, CUT_EVERY_S = 0.5, 60.0, 0.06
GREEDY = {"temperature": 0.0, "max_tokens": LONGEST, "ignore_eos": True, "logprobs": True, "seed": 1}
# Parameters that depend on an answer's earlier tokens.
CUT_CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "repetition_penalty": {**GREEDY, "repetition_penalty": 1.4},
    "presence_penalty": {**GREEDY, "presence_penalty": 1.5},
    "frequency_penalty": {**GREEDY, "frequency_penalty": 0.7},
    "min_new_tokens": {**GREEDY, "ignore_eos": False, "min_new_tokens": 60},
}
Weights = Iterable[tuple[str, torch.Tensor]]


def says(path: str, version: int) -> Weights:
    return weights_that_say(path, torch.float32, version)


def random_model(path: str, seed: int) -> Any:
    config = AutoConfig.from_pretrained(path)
    config.initializer_range = 0.3
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def random_weights(path: str, seed: int) -> Weights:
    yield from random_model(path, seed).state_dict().items()


def only(weights: Weights, damage: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights of which one tensor is missing, has a NaN, or has another shape."""
    for name, tensor in weights:
        if name.endswith("layers.0.self_attn.k_proj.weight"):
            if damage == "missing":
                continue
            tensor = tensor.clone()
            if damage == "NaN":
                tensor[1, 1] = float("nan")
            if damage == "shape":
                tensor = tensor[:, :-1]
        yield name, tensor


def make_server(path: str) -> Any:
    """Create a rollout server and the adapter that brings it weights, in this process."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf, open_dict
    from verl.workers.rollout.replica import RolloutMode

    from recipe.async_engine.config.sections import Timeouts
    from recipe.async_engine.engines import weight_stream
    from recipe.async_engine.engines.sglang.adapter import SGLangServerAdapter
    from recipe.async_engine.engines.sglang.server import GatedSGLangHttpServer
    from recipe.async_engine.trainer.verl_settings import tell_servers

    weight_stream.part_id = lambda node_rank: f"{os.getpid()}-{node_rank}"
    of_rollout = {
        "name": "sglang",
        "max_num_seqs": PLACES,
        "max_model_len": 256,
        "skip_tokenizer_init": "false",
        "engine_kwargs.sglang.max_total_tokens": "4096",
    }
    overrides = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in of_rollout.items()]
    overrides = ["preset=tiny_cpu", f"actor_rollout_ref.model.path={path}", "data.max_response_length=128", *overrides]
    with initialize_config_module("recipe.fully_async.config", version_base=None):
        config = compose("fully_async_ppo_trainer", overrides=overrides)
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    with open_dict(config):
        tell_servers(rollout, Timeouts(weight_sync=SOON_S), places=PLACES)
    OmegaConf.resolve(config)
    server = GatedSGLangHttpServer(rollout, model, RolloutMode.STANDALONE, [], 0, 0, 1, "", 0)
    os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1")
    adapter = SGLangServerAdapter(server.config, server.model_config, None, 0)
    adapter.server_handle = Handle(server)
    return server, adapter


class Scenes:
    """The scenes, in the order of `play`, and the weights that are live."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.server, self.adapter = make_server(path)
        self.client = httpx.AsyncClient(timeout=SOON_S)
        self.version = -1
        self.asked = 0

    async def publish(self, weights: Weights, way: str = "interrupt") -> None:
        self.version += 1
        checksum = await self.adapter.stage_weights(iter(weights), self.version)
        await self.pause(way)
        await self.server.swap(self.version, checksum)
        await self.server.resume_generation()

    async def pause(self, way: str) -> None:
        await (self.server.hold_requests() if way == "keep" else self.server.abort_all_requests())

    async def ask(
        self, prompt: list[int], parameters: dict[str, Any], name: str = "", sampled: int = 0, **more: Any
    ) -> Any:
        self.asked += 1
        name = name or f"request {self.asked}."
        return await self.server.generate(list(prompt), dict(parameters), name, Work.NEW, sampled, **more)

    def start(self, prompt: list[int], parameters: dict[str, Any], name: str = "", **more: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self.ask(prompt, parameters, name, **more))

    async def say(self) -> list[int]:
        return list((await self.ask(PROMPT, {**GREEDY, "max_tokens": 4})).token_ids)

    async def until_sampled(self, name: str, count: int) -> Any:
        """Wait until a request has this number of tokens, and return what the server tells of them."""
        async with asyncio.timeout(SOON_S):
            while True:
                told = (await self.server.sampled_since({name: 0})).get(name)
                if told is not None and len(told.token_ids) >= count:
                    return told
                await asyncio.sleep(0.002)

    def http(self, method: str, path: str, **body: Any) -> asyncio.Task[httpx.Response]:
        host, port = self.server.get_server_address()

        return asyncio.create_task(self.client.request(method, f"http://{host}:{port}{path}", json=body or None))

    def complete(self) -> asyncio.Task[httpx.Response]:
        return self.http("POST", "/v1/completions", model="default", prompt=PROMPT, max_tokens=4, temperature=0)

    async def first_weights(self) -> dict[str, Any]:
        waiting, over_http = self.start(PROMPT, GREEDY), self.complete()
        await asyncio.wait({waiting, over_http}, timeout=NEVER_S)
        early = [waiting.done(), over_http.done()]
        await self.publish(says(self.path, 0))
        answer = await waiting
        return {
            "early": early,
            "tokens": answer.token_ids,
            "log_probs": answer.log_probs,
            "stop_reason": answer.stop_reason,
            "versions": [answer.extra_fields["submitted_version"], answer.extra_fields["global_steps"]],
            "http": (await over_http).status_code,
        }

    async def endpoints(self) -> dict[str, Any]:
        from sglang.srt.entrypoints.http_server import app

        offered = {
            (method, route.path)
            for route in app.routes
            for method in getattr(route, "methods", None) or ()
            if "{" not in route.path
        }
        refused, passed = [], []
        for method, path in sorted(offered):
            if method == "POST" or (method == "GET" and ("POST", path) in offered):
                status = (await self.http(method, path)).status_code
                (refused if status == 403 else passed).append([method, path])
        reading = [(await self.http("GET", path)).status_code for path in ("/health", "/model_info", "/v1/models")]
        await self.server.abort_all_requests()
        over_http = self.complete()
        await asyncio.wait({over_http}, timeout=NEVER_S)
        early = over_http.done()
        await self.server.resume_generation()
        found = await over_http
        straggler = await self._straggler()
        return {
            "straggler": straggler,
            "refused": refused,
            "passed": passed,
            "reading": reading,
            "early": early,
            "status": found.status_code,
            "text": found.text,
            "said": await self.say(),
        }

    async def _straggler(self) -> dict[str, Any]:
        """Let a request reach the engine when the server has paused already, as an HTTP request may."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        self.version += 1
        checksum = await self.adapter.stage_weights(iter(says(self.path, self.version)), self.version)
        await self.server.abort_all_requests()
        parameters = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        request = GenerateReqInput(rid="straggler.", input_ids=list(PROMPT), sampling_params=parameters)
        task = asyncio.create_task(anext(self.server.tokenizer_manager.generate_request(request)))
        await asyncio.wait({task}, timeout=NEVER_S)
        early = task.done()
        await self.server.swap(self.version, checksum)
        await self.server.resume_generation()
        return {"early": early, "said": (await task)["output_ids"], "version": self.version}

    async def held(self) -> list[dict[str, Any]]:
        """Swap under requests that the engine keeps, more of them than it has places."""
        names = [f"held {number}." for number in range(PLACES + 2)]
        first = self.version
        tasks = [
            self.start(PROMPT, {**GREEDY, "max_tokens": LONGEST - 7 * place}, name) for place, name in enumerate(names)
        ]
        told = []
        while not all(task.done() for task in tasks):
            await self.until_any(names)
            await self.publish(says(self.path, self.version + 1), "keep")
            told += [
                [one.token_ids, one.runs] for one in (await self.server.sampled_since(dict.fromkeys(names, 0))).values()
            ]
        answers = [await task for task in tasks]
        return [
            {
                "asked": LONGEST - 7 * place,
                "tokens": answer.token_ids,
                "runs": answer.extra_fields.get("recipe_version_runs"),
                "versions": [answer.extra_fields["submitted_version"], answer.extra_fields["global_steps"]],
                "recomputed": answer.extra_fields.get("recipe_recomputed_tokens"),
                "log_prob": min(answer.log_probs),
                "told": told if place == 0 else [],
                "first": first,
            }
            for place, answer in enumerate(answers)
        ]

    async def until_any(self, names: list[str]) -> None:
        """Wait until one of the requests has more tokens than now, or none is left."""
        before = await self.server.sampled_since(dict.fromkeys(names, 0))
        count = {name: len(told.token_ids) for name, told in before.items()}
        for _ in range(500):
            await asyncio.sleep(0.002)
            now = await self.server.sampled_since(dict.fromkeys(names, 0))
            if not now or any(len(told.token_ids) > count.get(name, 0) + 2 for name, told in now.items()):
                return

    async def late(self) -> dict[str, Any]:
        """Swap while an answer that is complete is on its way through SGLang's detokenizer."""
        (detokenizer,) = [child for child in psutil.Process().children(recursive=True) if "detoken" in child.name()]
        old = self.version
        task = self.start(PROMPT, {**GREEDY, "max_tokens": 20}, "late.")
        await self.until_sampled("late.", 2)
        detokenizer.suspend()
        try:
            await asyncio.sleep(NEVER_S)
            early = task.done()
            await self.publish(says(self.path, old + 1), "keep")
        finally:
            detokenizer.resume()
        answer = await task
        runs = answer.extra_fields["recipe_version_runs"]
        return {"old": old, "early": early, "tokens": list(answer.token_ids), "runs": runs}

    async def cut(self) -> dict[str, Any]:
        """Compare answers that are interrupted and continued with whole ones, by the same weights."""
        await self.publish(random_weights(self.path, 1))
        seen: dict[str, Any] = {}
        for case, parameters in CUT_CASES.items():
            wholes = [await self.ask(prompt, parameters) for prompt in (PROMPT, LONG_PROMPT, PROMPT)]
            cutter = asyncio.create_task(self._cutting())
            pieces = [await self._whole_from_pieces(prompt, parameters) for prompt in (PROMPT, LONG_PROMPT)]
            cutter.cancel()
            await asyncio.wait({cutter})
            await self.server.resume_generation()
            pieces.append(await self._held_under_swaps(parameters))
            seen[case] = [
                {
                    "whole": list(whole.token_ids),
                    "cut": tokens,
                    "cuts": cuts,
                    "difference": max(
                        (abs(one - other) for one, other in zip(log_probs, whole.log_probs, strict=False)), default=0.0
                    ),
                    "log_probs": len(log_probs),
                }
                for whole, (tokens, log_probs, cuts) in zip(wholes, pieces, strict=True)
            ]
        return seen

    async def _held_under_swaps(self, parameters: dict[str, Any]) -> tuple[list[int], list[float], int]:
        """Swap to the same weights again while the engine holds the request."""
        swaps, task = 0, self.start(PROMPT, parameters, "held under swaps.")
        await self.until_sampled("held under swaps.", 5)
        while not task.done():
            await self.publish(random_weights(self.path, 1), "keep")
            swaps += not task.done()
        answer = await task
        return list(answer.token_ids), list(answer.log_probs), swaps

    async def _cutting(self) -> None:
        cuts = 0
        while True:
            await asyncio.sleep(CUT_EVERY_S)
            cuts += 1
            await self.server.abort_all_requests(reset_prefix_cache=cuts % 2 == 0)
            await self.server.resume_generation()

    async def _whole_from_pieces(
        self, prompt: list[int], parameters: dict[str, Any]
    ) -> tuple[list[int], list[float], int]:
        tokens: list[int] = []
        log_probs: list[float] = []
        cuts = 0
        while True:
            answer = await self.ask([*prompt, *tokens], parameters, sampled=len(tokens))
            tokens, log_probs = [*tokens, *answer.token_ids], [*log_probs, *answer.log_probs]
            if answer.stop_reason == "completed" or len(tokens) >= parameters["max_tokens"]:
                return tokens, log_probs, cuts
            cuts += bool(tokens)

    async def interrupted(self) -> dict[str, Any]:
        """Interrupt an answer by a swap, and continue it with the new weights."""
        await self.publish(says(self.path, self.version + 1))
        old = self.version
        task = self.start(PROMPT, GREEDY, "interrupted.")
        told = await self.until_sampled("interrupted.", 5)
        await self.publish(says(self.path, old + 1))
        piece = await task
        rest = await self.ask([*PROMPT, *piece.token_ids], GREEDY, sampled=len(piece.token_ids))
        return {
            "old": old,
            "asked": LONGEST,
            "told": [told.token_ids, told.runs, told.log_probs],
            "piece": [list(piece.token_ids), piece.stop_reason, piece.extra_fields["submitted_version"]],
            "rest": [list(rest.token_ids), rest.stop_reason, rest.extra_fields["submitted_version"]],
        }

    async def dropped(self) -> dict[str, Any]:
        """Fill all places, and drop one request for which another one waits."""
        long = {**GREEDY, "max_tokens": 200}
        tasks = {name: self.start(PROMPT, long, name) for name in [f"full {number}." for number in range(PLACES)]}
        for name in tasks:
            await self.until_sampled(name, 1)
        waits = self.start(PROMPT, {**GREEDY, "max_tokens": 4}, "waits.")
        await asyncio.sleep(0.05)
        told = await self.server.sampled_since({"waits.": 0})
        before = len(told["waits."].token_ids)
        await self.server.drop_request("full 0.")
        answer = await waits
        unfinished = sum(not task.done() for task in tasks.values())
        others = [await task for name, task in tasks.items() if name != "full 0."]
        dropped = await tasks["full 0."]
        early = await self._dropped_before_it_came()
        await asyncio.sleep(0.2)
        return {
            "before": before,
            "answer": len(answer.token_ids),
            "unfinished": unfinished,
            "others": [len(other.token_ids) for other in others],
            "dropped": [list(dropped.token_ids), dropped.stop_reason],
            "early": early,
            "left": sorted(self.server._engine_requests()),
            "states": sorted(map(str, self.server.tokenizer_manager.rid_to_state)),
        }

    async def _dropped_before_it_came(self) -> list[Any]:
        await self.server.drop_request("early.")
        answer = await self.ask(PROMPT, GREEDY, "early.")
        return [list(answer.token_ids), answer.stop_reason]

    async def by_age(self) -> list[list[int]]:
        """Let requests of several groups wait for one place, and return the order in which they had it.

        The second time, the engine holds all of them during a swap.
        """
        orders = []
        for holds in (False, True):
            full = [self.start(PROMPT, {**GREEDY, "max_tokens": 120}, f"old {n}.", priority=0) for n in range(PLACES)]
            for number in range(PLACES):
                await self.until_sampled(f"old {number}.", 1)
            order: list[int] = []
            waiting = []
            for age in (7, 3, 9, 5):
                waiting.append(self.start(PROMPT, {**GREEDY, "max_tokens": 60}, f"of age {age}.", priority=age))
                waiting[-1].add_done_callback(lambda _, age=age, order=order: order.append(age))
                await asyncio.sleep(0.02)
            if holds:
                await self.publish(says(self.path, self.version + 1), "keep")
            await self.server.drop_request("old 0.")
            await asyncio.gather(*waiting, *full)
            orders.append(order)
        return orders

    async def refused(self) -> list[Any]:
        seen = []
        for damage in ("missing", "NaN", "shape"):
            old = self.version
            try:
                await self.publish(only(says(self.path, old + 1), damage))
                error = None
            except Exception as refusal:
                error = f"{type(refusal).__name__}: {refusal}"
            seen.append([damage, error, old, await self.say()])
            self.version = old
        await self.publish(says(self.path, self.version + 1))
        return [*seen, ["none", None, self.version, await self.say()]]

    async def swap_of_nothing(self) -> dict[str, Any]:
        """Swap to a version that was not staged: the server stays closed until complete weights come."""
        try:
            await self.server.abort_all_requests()
            await self.server.swap(self.version + 5, "no such")
            error = None
        except Exception as refusal:
            error = str(refusal)
        await self.server.resume_generation()
        waiting = self.start(PROMPT, {**GREEDY, "max_tokens": 4})
        await asyncio.wait({waiting}, timeout=NEVER_S)
        early = waiting.done()
        await self.publish(says(self.path, self.version + 1))
        return {"error": error, "early": early, "said": list((await waiting).token_ids), "version": self.version}

    async def cached(self) -> dict[str, float]:
        """Let a request find the prefix of an earlier one in the cache: of its own weights, and of older ones."""
        found = {}
        for seed, way in enumerate(("interrupt", "keep")):
            await self.publish(random_weights(self.path, 10 + seed), way)
            found[way] = max([await self._difference(10 + seed) for _ in range(2)])
        drop, self.server._drop_computed = self.server._drop_computed, partial(asyncio.sleep, 0)
        await self.publish(random_weights(self.path, 12))
        found["without dropping it"] = await self._difference(12)
        self.server._drop_computed = drop
        await self.publish(random_weights(self.path, 13))
        found["again"] = await self._difference(13)
        found["of another version"] = await self._difference(12)
        return found

    async def _difference(self, seed: int) -> float:
        """Return the largest difference between an answer's log-probs and those of Hugging Face's forward pass."""
        answer = await self.ask(LONG_PROMPT, {**GREEDY, "max_tokens": 12})
        ids = torch.tensor([[*LONG_PROMPT, *answer.token_ids]])
        with torch.no_grad():
            expected = torch.log_softmax(random_model(self.path, seed)(ids).logits[0].float(), -1)
        places = range(len(LONG_PROMPT) - 1, ids.shape[1] - 1)
        return max(
            abs(log_prob - float(expected[place, ids[0, place + 1]]))
            for log_prob, place in zip(answer.log_probs, places, strict=True)
        )

    async def slept(self) -> dict[str, Any]:
        """Let the engine give its memory back, and wake it with the next weights, as beside a trainer.

        A CPU keeps the memory; the calls, their order and what SGLang asserts of a sleeping engine are the same.
        """
        from verl.workers.rollout.replica import RolloutMode

        mode, self.server.rollout_mode = self.server.rollout_mode, RolloutMode.HYBRID
        for config in (self.server.config, self.adapter.config):
            object.__setattr__(config, "free_cache_engine", True)
        busy = self.start(PROMPT, {**GREEDY, "max_tokens": 100}, "busy")
        await self.until_sampled("busy", 2)
        await self.server.abort_all_requests()
        await self.adapter.release()
        cut = await busy
        waiting = self.start(PROMPT, {**GREEDY, "max_tokens": 4})
        await self.adapter.resume(["weights"])
        self.version += 1
        await self.adapter.update_weights(iter(says(self.path, self.version)), self.version)
        await self.adapter.resume(["kv_cache"])
        early = waiting.done()
        await self.server.resume_generation()
        answer = await waiting
        self.server.rollout_mode = mode
        for config in (self.server.config, self.adapter.config):
            object.__setattr__(config, "free_cache_engine", False)
        return {"cut": cut.stop_reason, "early": early, "said": list(answer.token_ids), "version": self.version}

    async def in_place(self) -> dict[str, Any]:
        """Load weights over the live ones: the server is closed until the last tensor has come."""
        await self.server.abort_all_requests()
        self.version += 1
        error = None
        try:
            await self.adapter.update_weights(only(says(self.path, self.version), "missing"), self.version)
        except Exception as refusal:
            error = str(refusal)
        await self.server.resume_generation()
        waiting = self.start(PROMPT, {**GREEDY, "max_tokens": 4})
        await asyncio.wait({waiting}, timeout=NEVER_S)
        early = waiting.done()
        await self.server.abort_all_requests()
        await self.adapter.update_weights(iter(says(self.path, self.version)), self.version)
        await self.server.resume_generation()
        answer = await waiting
        return {
            "error": error,
            "early": early,
            "said": list(answer.token_ids),
            "submitted": answer.extra_fields["submitted_version"],
            "version": self.version,
        }


async def play(path: str) -> dict[str, Any]:
    scenes = Scenes(path)
    await scenes.server.launch_server()
    await scenes.server.activity()
    seen: dict[str, Any] = {"token_of": [token_of(version) for version in range(100)], "seconds": {}}
    for scene in (
        scenes.first_weights,
        scenes.endpoints,
        scenes.held,
        scenes.interrupted,
        scenes.late,
        scenes.dropped,
        scenes.by_age,
        scenes.refused,
        scenes.swap_of_nothing,
        scenes.in_place,
        scenes.slept,
        scenes.cut,
        scenes.cached,
    ):
        begun = time.monotonic()
        async with asyncio.timeout(2 * SOON_S):
            seen[scene.__name__] = await scene()
        seen["seconds"][scene.__name__] = round(time.monotonic() - begun, 2)
        sys.stderr.write(f"{scene.__name__}: {seen['seconds'][scene.__name__]} s\n")
    seen["activity"] = (await scenes.server.activity()).tokens
    return seen


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = asyncio.run(play(sys.argv[2]))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    # SGLang's processes end with this one.
    os._exit(0)
