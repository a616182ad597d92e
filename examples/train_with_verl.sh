#!/usr/bin/env bash
# Train a model on arithmetic with verl 0.9 or newer, on one machine with GPUs. Rollouts run in Rookery's sandboxes.
#   MODEL=Qwen/Qwen3-4B GPUS=8 examples/train_with_verl.sh trainer.total_training_steps=100
set -euo pipefail
python -c '
from rookery.adapters.verl import write_dataset
print(write_dataset("train.parquet", "arithmetic"), "tasks")
'
python -m verl.trainer.main_ppo \
    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rookery.adapters.verl.RookeryManager \
    +rookery.env=arithmetic \
    +rookery.concurrency=256 \
    data.train_files=train.parquet \
    data.val_files=train.parquet \
    data.train_batch_size=32 \
    data.max_prompt_length=2048 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-4B}" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=false \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    "$@"
