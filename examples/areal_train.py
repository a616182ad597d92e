"""Train with AReaL on a Rookery environment. The arguments are AReaL's.

The environment is read from ROOKERY_ENV, and the chat format, as JSON, from ROOKERY_RENDERING (default: that of
the tokenizer).

It needs AReaL 1.0 and a GPU. Set `actor.reward_norm` and `actor.adv_norm` to null in the configuration.
"""

import json
import os
import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import Dataset
from transformers import AutoTokenizer

from rookery.adapters.areal import make_workflow

ENVIRONMENT = os.environ.get("ROOKERY_ENV", "arithmetic")
RENDERING = json.loads(os.environ.get("ROOKERY_RENDERING", "null"))


def main() -> None:
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    workflow = make_workflow(
        ENVIRONMENT,
        k=8,
        gconfig=config.gconfig,
        actor=config.actor,
        rendering=RENDERING or {"tokenizer": config.tokenizer_path},
        tokenizer=AutoTokenizer.from_pretrained(config.tokenizer_path),
    )
    dataset = Dataset.from_list([{"task": row["task"]} for row in workflow.rollouts.make_rows()])
    with PPOTrainer(config, train_dataset=dataset, valid_dataset=None) as trainer:
        trainer.train(workflow=workflow)


if __name__ == "__main__":
    main()
