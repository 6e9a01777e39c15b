#!/usr/bin/env bash
# Fully-asynchronous GRPO with log-prob servers, Megatron throughout: 8 accelerators train, 8 generate, 8 compute
# log-probs. Three nodes of 8 with Ray running on them; start it on one of them. Further arguments override these.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
TRAIN=${TRAIN:-$HOME/data/gsm8k/train.parquet}
VAL=${VAL:-$HOME/data/gsm8k/test.parquet}

python -m recipe.fully_async.main --config-name fully_async_ppo_megatron_trainer \
    model_engine_server=megatron \
    model_engine_server.nnodes=1 \
    model_engine_server.n_gpus_per_node=8 \
    model_engine_server.replicas=2 \
    model_engine_server.engine.tensor_model_parallel_size=2 \
    model_engine_server.engine.pipeline_model_parallel_size=2 \
    model_engine_server.anchor=generation \
    model_engine_server.max_batch_tokens=32768 \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    data.max_prompt_length=1024 \
    data.max_response_length=8192 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    actor_rollout_ref.actor.megatron.use_mbridge=true \
    actor_rollout_ref.actor.megatron.vanilla_mbridge=true \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    algorithm.rollout_correction.rollout_is=token \
    async_training.staleness_threshold=0.5 \
    async_training.trigger_parameter_sync_step=4 \
    rollout.nnodes=1 \
    rollout.n_gpus_per_node=8 \
    rollout.total_rollout_steps=51200 \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.logger='[console,tensorboard]' \
    ray_kwargs.ray_init.address=auto \
    "$@"
