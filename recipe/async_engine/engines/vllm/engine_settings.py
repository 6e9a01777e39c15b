# SPDX-License-Identifier: Apache-2.0
"""What vLLM's engine is told when a rollout server starts it."""

import traceback
from collections.abc import MutableMapping
from typing import Any

from recipe.async_engine.core.errors import RecipeError

RUNNER_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"


class RolloutServerError(RecipeError):
    """A rollout server cannot start as it is configured, or holds no weights by which it could answer a request."""


def choose_runner(environ: MutableMapping[str, str]) -> None:
    """Have vLLM run the model by its first model runner, in this process and those that it starts.

    On an accelerator vLLM takes its second one for many architectures (in 0.24 Qwen3, Llama and Mistral among them). It
    forgets requests that it has put off, and `StagingExtension.swap_staged` needs to know how many tokens each has.

    Raises:
        RolloutServerError: the environment asks for the second one.
    """
    if environ.get(RUNNER_CHOICE, "0").strip().lower() in ("1", "true"):
        raise RolloutServerError(
            f"{RUNNER_CHOICE}={environ[RUNNER_CHOICE]}: versions of tokens are known with vLLM's first model runner "
            "only, which has 0; unset it"
        )
    environ[RUNNER_CHOICE] = "0"


def refused_arguments(ended: SystemExit) -> RolloutServerError:
    """Why vLLM's parser of arguments has ended this process, in the words that it prints where nobody looks."""
    frames = (frame for frame, _ in traceback.walk_tb(ended.__traceback__))
    said = [str(frame.f_locals.get("message")) for frame in frames if frame.f_code.co_name == "error"]
    words = said[0] if said else f"it ends with status {ended.code}"
    return RolloutServerError(
        f"vLLM does not take its arguments: {words}. Correct actor_rollout_ref.rollout.engine_kwargs.vllm, or what "
        "else of actor_rollout_ref.rollout that is of"
    )


def peft_config(model_config: Any) -> dict[str, Any]:
    """The trainer's LoRA adapter in PEFT's words, as vLLM reads them."""
    targets = model_config.target_modules
    return {
        "r": model_config.lora_rank,
        "lora_alpha": model_config.lora_alpha,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "bias": "none",
    }
