"""Train with AReaL on a Rookery environment. The arguments are AReaL's; the environment is read from ROOKERY_ENV.

It needs AReaL 1.0 and a GPU. Set `actor.reward_norm` and `actor.adv_norm` to null in the configuration.
"""

import os
import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import Dataset

from rookery import load_environment
from rookery.adapters.areal import make_workflow
from rookery.tasks import tasks_from

ENVIRONMENT = os.environ.get("ROOKERY_ENV", "arithmetic")


def main() -> None:
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    environment = load_environment(ENVIRONMENT)
    tasks = [task for task in tasks_from(environment.tasks(), environment.title) if not task.invalid]
    workflow = make_workflow(
        ENVIRONMENT,
        k=8,
        gconfig=config.gconfig,
        actor=config.actor,
        rendering={"tokenizer": config.tokenizer_path},
    )
    dataset = Dataset.from_list([{"task": task.id} for task in tasks])
    with PPOTrainer(config, train_dataset=dataset, valid_dataset=None) as trainer:
        trainer.train(workflow=workflow)


if __name__ == "__main__":
    main()
