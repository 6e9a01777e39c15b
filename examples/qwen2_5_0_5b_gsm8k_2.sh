#!/usr/bin/env bash
# GRPO of Qwen2.5-0.5B-Instruct on GSM8K with 2 accelerators, or 1 with MODE=partial_rollout. One machine; it starts
# its own Ray. MODE: one_step_off, fully_async, partial_rollout (which shares all accelerators). MODEL, TRAIN, VAL:
# model and data. Further arguments override these.
set -euo pipefail

MODE=${MODE:-fully_async}
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
TRAIN=${TRAIN:-$HOME/data/gsm8k/train.parquet}
VAL=${VAL:-$HOME/data/gsm8k/test.parquet}

case $MODE in
one_step_off)
    SPLIT=(
        trainer.nnodes=1
        trainer.n_gpus_per_node=1
        rollout.nnodes=1
        rollout.n_gpus_per_node=1
        data.train_batch_size=128
    )
    ;;
fully_async)
    SPLIT=(
        trainer.nnodes=1
        trainer.n_gpus_per_node=1
        rollout.nnodes=1
        rollout.n_gpus_per_node=1
        rollout.total_rollout_steps=null
        async_training.staleness_threshold=0.5
        async_training.trigger_parameter_sync_step=4
    )
    ;;
partial_rollout)
    SPLIT=(
        trainer.nnodes=1
        trainer.n_gpus_per_node=${GPUS:-1}
        data.train_batch_size=128
        async_training.staleness_threshold=1
        async_training.max_staleness=4
    )
    ;;
*) echo "MODE=$MODE: one of one_step_off, fully_async, partial_rollout" >&2 && exit 2 ;;
esac

python -m "recipe.${MODE%_servers}.main" "${SPLIT[@]}" \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8192 \
    trainer.total_epochs=10 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.project_name=recipe \
    trainer.experiment_name="qwen2_5_0_5b_gsm8k_$MODE" \
    trainer.logger='[console,tensorboard]' \
    "$@"
