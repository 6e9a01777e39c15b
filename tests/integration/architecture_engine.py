# SPDX-License-Identifier: Apache-2.0
"""Stages and swaps two versions of each architecture in a real engine, and compares it with fresh engines.

It is a separate process, started by test_staged_architectures.py, which prints its results as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import tiny_architectures
from safetensors.torch import load_file
from staged_engine import CPU_EXTENSION, EXTENSION, begin, swap

PROMPTS = [[1 + (7 * place + 3 * row) % 60 for place in range(40)] for row in range(3)]


def engine_of(folder: Path, device: str, dtype: str, graphs: str) -> Any:
    from vllm import LLM

    more: dict[str, Any] = {} if device == "cpu" else {"gpu_memory_utilization": 0.15}
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype=tiny_architectures.DTYPES.get(folder.parent.name, dtype),
        max_model_len=128,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=not graphs,
        worker_extension_cls=CPU_EXTENSION if device == "cpu" else EXTENSION,
        limit_mm_per_prompt={"image": 0, "video": 0},
        **more,
    )


def log_probs(engine: Any) -> list[float]:
    """Return the log-probs of each prompt token except the first, and of tokens sampled after each prompt."""
    from vllm import SamplingParams

    settings = SamplingParams(
        temperature=0, max_tokens=4, logprobs=0, prompt_logprobs=0, detokenize=False, ignore_eos=True
    )
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = []
    for request, answer in zip(requests, engine.generate(requests, settings, use_tqdm=False), strict=True):
        tokens = request["prompt_token_ids"][1:]
        found += [place[token].logprob for place, token in zip(answer.prompt_logprobs[1:], tokens, strict=True)]
        found += [next(iter(place.values())).logprob for place in answer.outputs[0].logprobs]
    return found


def stage(worker: Any, folder: str, version: int) -> None:
    worker.staged.begin()
    for file in sorted(Path(folder).glob("*.safetensors")):
        worker.staged.load(list(load_file(file).items()))
    worker.staged.complete(version)


def restart(worker: Any) -> None:
    worker.staged.begin()


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def seen_of(name: str, place: Path, how: str, *engine_is: str) -> dict[str, Any]:
    """Return log-probs of an engine that starts with one version, loads another one, and then the first one again."""
    folders = [place / name / str(version) for version in range(2)]
    for version, folder in enumerate(folders):
        tiny_architectures.save(name, version, folder)
    fresh = [log_probs(engine_of(folder, *engine_is)) for folder in folders[1:]]
    engine = engine_of(folders[0], *engine_is)
    fresh.insert(0, log_probs(engine))
    engine.collective_rpc(begin, args=(how,))
    seen: dict[str, Any] = {"versions": difference(*fresh), "swapped": [], "untouched": []}
    for number, version in enumerate((1, 0)):
        engine.collective_rpc(stage, args=(str(folders[version]), number))
        seen["untouched"].append(difference(log_probs(engine), fresh[1 - version]))
        engine.collective_rpc(swap, args=(number,))
        seen["swapped"].append(difference(log_probs(engine), fresh[version]))
    # The second set of weights is filled with NaN when a stream starts.
    engine.collective_rpc(restart)
    seen["untouched"].append(difference(log_probs(engine), fresh[0]))
    return seen


def main(
    device: str, names: str, place: str, how: str = "device", dtype: str = "float32", graphs: str = ""
) -> dict[str, Any]:
    """Run `seen_of` for each of ``names``, which are separated by semicolons.

    Args:
        how: "device" to stage on the device, or "from the host".
        graphs: not empty to capture graphs, on an accelerator.
    """
    if device == "cpu":
        # vLLM's CPU build has no kernels for latent attention, so keys and values are expanded.
        os.environ["VLLM_MLA_DISABLE"] = "1"
    found: dict[str, Any] = {}
    for name in names.split(";"):
        try:
            found[name] = seen_of(name, Path(place), how, device, dtype, graphs)
        except Exception as error:  # the others are tested too
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        everything = main(*sys.argv[1:])
    sys.stdout.write(json.dumps(everything) + "\n")
