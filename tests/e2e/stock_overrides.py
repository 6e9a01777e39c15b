# SPDX-License-Identifier: Apache-2.0
"""Environment and Hydra overrides that a stock verl main needs on a machine without an accelerator.

The stock mains run unchanged; settings tell them all that they need to know about the CPU. The module is shared by the
tests of the stock mains and by comparative benchmarks.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from main_process import run_module
from surroundings import shared_forks, with_helpers

from recipe.async_engine import features
from recipe.laptop.choice import CPU_ENVIRONMENT
from recipe.laptop.task.settings import TaskPaths

WORKER_EXTENSION = "recipe.laptop.engines.vllm_cpu.CPUWorkerExtension"
GLOO_ENGINE = "recipe.laptop.transfer.gloo_engine"
FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


def stock_environment(checkout: Path) -> dict[str, str]:
    """Return the environment for a stock main on the CPU, with the plugin loaded by one of its two ways."""
    environment = dict(os.environ) | CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
    environment.pop("RAY_ADDRESS", None)
    if not features.loading_routes(environment):
        environment["VERL_USE_EXTERNAL_MODULES"] = features.MODULE_NAME
    # Ray's workers get the path from here too; an installed package is found either way.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), environment.get("PYTHONPATH")]))
    return environment


def cpu_overrides(task: TaskPaths, out_dir: Path, ray_dir: Path, devices: int) -> list[str]:
    """Return overrides that any stock main needs for fp32 GRPO with ``devices`` trainer and rollout workers in all.

    ``ray_dir`` must be short: a socket path below it has at most 107 bytes.
    """
    rollout = "actor_rollout_ref.rollout"
    actor = "actor_rollout_ref.actor"
    return [
        f"data.train_files={task.train}",
        f"data.val_files={task.val}",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        "data.shuffle=False",
        f"reward.custom_reward_function.path={task.reward_file}",
        "reward.num_workers=1",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        f"actor_rollout_ref.model.path={task.model}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.hybrid_engine=False",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.dtype=float32",
        f"+{actor}.fsdp_config.mixed_precision={FP32}",
        f"{actor}.use_torch_compile=False",
        f"{actor}.use_kl_loss=False",
        f"{actor}.optim.lr=1e-4",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.name=vllm",
        f"{rollout}.mode=async",
        f"{rollout}.n=4",
        f"{rollout}.dtype=float32",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.free_cache_engine=False",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.max_model_len=128",
        f"{rollout}.max_num_seqs=64",
        f"{rollout}.max_num_batched_tokens=8192",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.checkpoint_engine.backend=recipe_gloo",
        f"{rollout}.checkpoint_engine.custom_backend_module={GLOO_ENGINE}",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=64",
        f"+{rollout}.checkpoint_engine.engine_kwargs.recipe_gloo.timeout_s=120",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={64 << 20}",
        f"+{rollout}.engine_kwargs.vllm.worker_extension_cls={WORKER_EXTENSION}",
        "trainer.device=cpu",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.total_epochs=1",
        "trainer.project_name=stock",
        "trainer.experiment_name=cpu",
        f"trainer.default_local_dir={out_dir}/checkpoints",
        f"hydra.run.dir={out_dir}/hydra",
        "rollout.nnodes=1",
        f"rollout.n_gpus_per_node={devices - 1}",
        "ray_kwargs.ray_init.num_cpus=40",
        f"+ray_kwargs.ray_init.num_gpus={devices}",
        "+ray_kwargs.ray_init.object_store_memory=1000000000",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
    ]


def forked_main(
    main: str, overrides: list[str], folder: Path, environment: dict[str, str], timeout_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run a stock main to its end, with workers forked from a process that has imported the stack."""
    environment = with_helpers(environment)
    return run_module(main, overrides, folder, environment, timeout_s, shared_forks(environment))


ONE_STEP_MAIN = "verl.experimental.one_step_off_policy.main_ppo"
FULLY_ASYNC_MAIN = "verl.experimental.fully_async_policy.fully_async_main"


def one_step_overrides(steps: int) -> list[str]:
    """Return overrides for ``steps`` training steps of the stock one-step-off-policy main."""
    return [
        # The file's own search path works only within a verl checkout.
        "hydra.searchpath=[pkg://verl.trainer.config]",
        "data.train_batch_size=4",
        # The trainer then computes its own log-probs and reports their difference from vLLM's.
        "algorithm.rollout_correction.bypass_mode=False",
        f"trainer.total_training_steps={steps}",
    ]


def fully_async_overrides(steps: int) -> list[str]:
    """Return overrides for ``steps`` training steps of the stock fully-async main, with a weight sync after each."""
    return [
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "rollout.n=4",
        f"rollout.total_rollout_steps={4 * steps}",
        "async_training.staleness_threshold=1.0",
        "async_training.trigger_parameter_sync_step=1",
        "async_training.require_batches=1",
        "async_training.partial_rollout=True",
    ]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the metrics that verl's ``file`` logger wrote, one dictionary per step."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["data"] for line in lines if line.strip()]
