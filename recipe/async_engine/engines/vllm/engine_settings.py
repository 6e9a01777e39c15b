# SPDX-License-Identifier: Apache-2.0
"""Settings that a rollout server checks at its launch and passes to vLLM's engine."""

import traceback
from collections.abc import MutableMapping
from typing import Any

from recipe.async_engine.engines.weights_gate import RolloutServerError

RUNNER_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"


def choose_runner(environ: MutableMapping[str, str]) -> None:
    """Make vLLM use its V1 model runner in this process and the processes that it starts.

    On an accelerator vLLM would use its V2 model runner for many architectures (vLLM 0.24 for Qwen3, Llama and Mistral,
    among others). The V2 runner drops the state of preempted requests, but `StagingExtension.swap_staged` needs the
    token count of every request.

    Raises:
        RolloutServerError: the environment variable asks for the V2 model runner.
    """
    if environ.get(RUNNER_CHOICE, "0").strip().lower() in ("1", "true"):
        raise RolloutServerError(
            f"{RUNNER_CHOICE}={environ[RUNNER_CHOICE]}: the policy version of each token is known only with vLLM's V1 "
            "model runner; unset the variable"
        )
    environ[RUNNER_CHOICE] = "0"


def refused_arguments(ended: SystemExit) -> RolloutServerError:
    """Return an error with the message that vLLM's argument parser printed before it exited with ``ended``."""
    frames = (frame for frame, _ in traceback.walk_tb(ended.__traceback__))
    said = [str(frame.f_locals.get("message")) for frame in frames if frame.f_code.co_name == "error"]
    words = said[0] if said else f"it ends with status {ended.code}"
    return RolloutServerError(
        f"vLLM refuses its arguments: {words}. Correct actor_rollout_ref.rollout.engine_kwargs.vllm or "
        "the setting of actor_rollout_ref.rollout that the argument comes from"
    )


def peft_config(model_config: Any) -> dict[str, Any]:
    targets = model_config.target_modules
    return {
        "r": model_config.lora_rank,
        "lora_alpha": model_config.lora_alpha,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "bias": "none",
    }
