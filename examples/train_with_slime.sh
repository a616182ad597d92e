#!/usr/bin/env bash
# Train a model on arithmetic with slime 0.3, inside a clone of slime. Rollouts run in Rookery's sandboxes.
#   MODEL=Qwen/Qwen3-4B examples/train_with_slime.sh MODEL_AND_PARALLEL_OPTIONS_OF_SLIME
set -euo pipefail
cat > rookery.yaml <<'YAML'
rookery:
  env: arithmetic
  concurrency: 256
YAML
python train.py \
    --custom-config-path rookery.yaml \
    --rollout-function-path rookery.adapters.slime.generate_rollout \
    --custom-reward-post-process-path rookery.adapters.slime.post_process_rewards \
    --data-source-path rookery.adapters.slime.RookeryDataSource \
    --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
    --advantage-estimator grpo \
    --rollout-batch-size 32 \
    --n-samples-per-prompt 8 \
    --global-batch-size 256 \
    --rollout-max-response-len 2048 \
    --rollout-max-context-len 4096 \
    --rollout-temperature 1 \
    "$@"
