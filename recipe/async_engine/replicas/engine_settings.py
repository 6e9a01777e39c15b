# SPDX-License-Identifier: Apache-2.0
"""What vLLM's engine is told when a rollout server starts it."""

from collections.abc import MutableMapping
from typing import Any

from recipe.async_engine.core.errors import RecipeError

RUNNER_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"


class UnsupportedRunner(RecipeError):
    """vLLM is to run the model by code that does not tell how many tokens its requests have."""


def choose_runner(environ: MutableMapping[str, str]) -> None:
    """Have vLLM run the model by its first model runner, in this process and those that it starts.

    On an accelerator vLLM takes its second one for many architectures (in 0.24 Qwen3, Llama and Mistral among them). It
    forgets requests that it has put off, and `StagingExtension.swap_staged` needs to know how many tokens each has.

    Raises:
        UnsupportedRunner: the environment asks for the second one.
    """
    if environ.get(RUNNER_CHOICE, "0").strip().lower() in ("1", "true"):
        raise UnsupportedRunner(
            f"{RUNNER_CHOICE}={environ[RUNNER_CHOICE]}: versions of tokens are known with vLLM's first model runner "
            "only, which has 0; unset it"
        )
    environ[RUNNER_CHOICE] = "0"


def peft_config(model_config: Any) -> dict[str, Any]:
    """The trainer's LoRA adapter in PEFT's words, as vLLM reads them."""
    targets = model_config.target_modules
    return {
        "r": model_config.lora_rank,
        "lora_alpha": model_config.lora_alpha,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "bias": "none",
    }
