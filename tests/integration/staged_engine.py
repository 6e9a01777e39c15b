# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine that stages weights beside those with which it generates.

It is a separate process, started by test_staged_engine.py, which prints its results as one line of JSON. A greedy
answer's log-probs are compared with Hugging Face's forward pass of the weights that should have sampled it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

PROMPT = [1, 2, 3, 4, 5]
# Two of the blocks in which prefixes are cached, and a part of a third one.
LONG_PROMPT = [1 + 7 * place % 60 for place in range(300)]
SIZES = {
    # At least the vocabulary of the tokenizer in cut_cases.py.
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
# The second model's biases are packed too; only the first one's head is its embedding.
MODELS: dict[str, Any] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
}
WITHOUT = ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight")


def weights_of(family: str, version: int) -> Any:
    torch.manual_seed(version)
    model = MODELS[family]()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.eval()


def begin(worker: Any, how: str) -> None:
    from recipe.async_engine.engines.vllm.engine_extension import staged_model_of

    runner = worker.model_runner
    worker.staged = staged_model_of(runner.get_model(), runner.vllm_config, worker.device, how == "from the host")


def stage(worker: Any, family: str, version: int, without: str | None = None) -> str | None:
    from recipe.async_engine.weights.staged import StagingRefused

    worker.staged.begin()
    for name, tensor in weights_of(family, version).state_dict().items():
        if name != without:
            worker.staged.load([(name, tensor)])
    try:
        worker.staged.complete(version)
    except StagingRefused as error:
        return str(error)
    return None


def swap(worker: Any, version: int) -> None:
    worker.staged.swap(version)


EXTENSION = "recipe.async_engine.engines.vllm.engine_extension.StagingExtension"
CPU_EXTENSION = "recipe.laptop.engines.engine_extension.CPUStagingExtension"


class Engine:
    """``device``: the engine's. The reference is computed on the CPU in fp32, from weights in ``dtype``."""

    def __init__(self, family: str, folder: Path, device: str = "cpu", dtype: str = "float32", **settings: Any) -> None:
        from vllm import LLM

        self.family, self.dtype = family, dtype
        weights_of(family, 0).save_pretrained(folder)
        if device != "cpu":
            settings = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.3} | settings
        self.engine = LLM(
            str(folder),
            dtype=dtype,
            max_model_len=512,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=64 << 20,
            worker_extension_cls=CPU_EXTENSION if device == "cpu" else EXTENSION,
            **{"enforce_eager": True, "skip_tokenizer_init": True, **settings},
        )

    def ask(self, what: Any, *arguments: Any) -> Any:
        return self.engine.collective_rpc(what, args=arguments)[0]

    def differs_from(self, version: int | torch.nn.Module, **request: Any) -> float:
        """Return the largest difference of log-probs between its answers and the forward pass of a version or model."""
        self.engine.reset_prefix_cache()
        return self._difference(version, PROMPT, "none", **request)

    def differs_with_cached_prefixes(self, version: int, salt: str) -> float:
        """Return the difference for a request that may use prefixes cached by requests of this salt."""
        return self._difference(version, LONG_PROMPT, salt)

    def _difference(self, version: int | torch.nn.Module, prompt: list[int], salt: str, **more: Any) -> float:
        from vllm import SamplingParams

        settings = SamplingParams(temperature=0, max_tokens=16, logprobs=0, detokenize=False, ignore_eos=True)
        request = {"prompt_token_ids": prompt, "cache_salt": salt}
        answer = self.engine.generate(request, settings, use_tqdm=False, **more)[0].outputs[0]
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.no_grad():
            model = weights_of(self.family, version) if isinstance(version, int) else version
            model = model.to(getattr(torch, self.dtype)).float()
            expected = torch.log_softmax(model(ids).logits[0], -1)
        found = [position[token].logprob for position, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        places = range(len(prompt) - 1, ids.shape[1] - 1)
        return max(
            abs(value - float(expected[place, ids[0, place + 1]])) for value, place in zip(found, places, strict=True)
        )


def main(device: str, family: str, folder: str, dtype: str = "float32", graphs: str = "") -> dict[str, Any]:
    """``graphs``: not empty to capture graphs."""
    from cut_cases import ENGINE, make_tokenizer
    from cut_requests import cut_and_whole

    make_tokenizer().save_pretrained(folder)
    engine = Engine(family, Path(folder), device, dtype, enforce_eager=not graphs, skip_tokenizer_init=False, **ENGINE)
    seen: dict[str, Any] = {"at_start": engine.differs_from(0), "staged": [], "swapped": [], "refused": []}
    version = 0
    for how in ("on the device", "from the host"):
        engine.ask(begin, how)
        for _ in range(2):
            seen["staged"].append((engine.ask(stage, family, version + 1), engine.differs_from(version)))
            version += 1
            engine.ask(swap, version)
            seen["swapped"].append((engine.differs_from(version), engine.differs_from(version - 1)))
        for name in WITHOUT:
            seen["refused"].append((engine.ask(stage, family, version + 1, name), engine.differs_from(version)))
    seen["cached"] = {"before": engine.differs_with_cached_prefixes(version, "before")}
    engine.ask(stage, family, version + 1)
    engine.ask(swap, version + 1)
    for name, salt in (("of the version before", "before"), ("of its own", "after")):
        seen["cached"][name] = engine.differs_with_cached_prefixes(version + 1, salt)
    # A CPU has no sleep mode: the calls do nothing there.
    engine.engine.sleep(level=1)
    engine.engine.wake_up()
    seen["woken"] = engine.differs_from(version + 1)
    seen["cut"] = cut_and_whole(engine.engine, seed=version)
    return seen


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = main(*sys.argv[1:])
    sys.stdout.write(json.dumps(found) + "\n")
