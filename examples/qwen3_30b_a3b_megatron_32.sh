#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B, a mixture of experts, with Megatron and 4 nodes of 8 accelerators. Ray runs on all nodes
# (`ray start --head` on one, `ray start --address=...` on the others); start this on one of them. MODE:
# one_step_off, fully_async, fully_async_servers, partial_rollout (which shares all accelerators). MODEL, TRAIN, VAL:
# model and data. Further arguments override these.
set -euo pipefail

MODE=${MODE:-fully_async}
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}
TRAIN=${TRAIN:-$HOME/data/gsm8k/train.parquet}
VAL=${VAL:-$HOME/data/gsm8k/test.parquet}

case $MODE in
one_step_off)
    SPLIT=(
        --config-name one_step_off_ppo_megatron_trainer
        trainer.nnodes=2
        trainer.n_gpus_per_node=8
        rollout.nnodes=2
        rollout.n_gpus_per_node=8
        data.train_batch_size=256
    )
    ;;
fully_async)
    SPLIT=(
        --config-name fully_async_ppo_megatron_trainer
        trainer.nnodes=2
        trainer.n_gpus_per_node=8
        rollout.nnodes=2
        rollout.n_gpus_per_node=8
        rollout.total_rollout_steps=null
        async_training.staleness_threshold=0.5
        async_training.trigger_parameter_sync_step=4
    )
    ;;
fully_async_servers)
    SPLIT=(
        --config-name fully_async_ppo_megatron_trainer
        trainer.nnodes=2
        trainer.n_gpus_per_node=8
        rollout.nnodes=1
        rollout.n_gpus_per_node=8
        rollout.total_rollout_steps=null
        async_training.staleness_threshold=0.5
        async_training.trigger_parameter_sync_step=4
        model_engine_server=megatron
        model_engine_server.nnodes=1
        model_engine_server.n_gpus_per_node=8
        model_engine_server.anchor=generation
        algorithm.rollout_correction.rollout_is=token
        model_engine_server.engine.tensor_model_parallel_size=4
        model_engine_server.engine.pipeline_model_parallel_size=1
    )
    ;;
partial_rollout)
    SPLIT=(
        --config-name partial_rollout_ppo_megatron_trainer
        trainer.nnodes=4
        trainer.n_gpus_per_node=8
        data.train_batch_size=256
        async_training.staleness_threshold=1
        async_training.max_staleness=4
        # The engines use the accelerators' memory during their turn.
        actor_rollout_ref.actor.megatron.param_offload=true
        actor_rollout_ref.actor.megatron.optimizer_offload=true
    )
    ;;
*) echo "MODE=$MODE: one of one_step_off, fully_async, fully_async_servers, partial_rollout" >&2 && exit 2 ;;
esac

python -m "recipe.${MODE%_servers}.main" "${SPLIT[@]}" \
    data.train_files="$TRAIN" \
    data.val_files="$VAL" \
    data.max_prompt_length=1024 \
    data.max_response_length=8192 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
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
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=18432 \
    trainer.total_epochs=10 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.project_name=recipe \
    trainer.experiment_name="qwen3_30b_a3b_megatron_$MODE" \
    trainer.logger='[console,tensorboard]' \
    ray_kwargs.ray_init.address=auto \
    "$@"
