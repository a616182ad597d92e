"""Train with SkyRL on a Rookery environment. All arguments are SkyRL's, except `--write-dataset FILE`.

The environment is read from ROOKERY_ENV. It needs SkyRL 0.4 with its extra `skyrl-train`, Python 3.12 and a GPU.
"""

import os
import sys
from typing import Any

from rookery import load_environment
from rookery.tasks import tasks_from

ENVIRONMENT = os.environ.get("ROOKERY_ENV", "arithmetic")


def write_dataset(path: str) -> None:
    import datasets

    environment = load_environment(ENVIRONMENT)
    tasks = [task for task in tasks_from(environment.tasks(), environment.title) if not task.invalid]
    rows = [
        {"prompt": [{"role": "user", "content": task.text}], "env_class": "rookery", "task": task.id}
        for task in tasks
    ]
    datasets.Dataset.from_list(rows).to_parquet(path)


def main() -> None:
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    from rookery.adapters.skyrl import RookeryGenerator

    class Experiment(BasePPOExp):
        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> RookeryGenerator:
            url = inference_engine_client.get_endpoint_url()
            return RookeryGenerator(ENVIRONMENT, config=cfg, policy=url, tokenizer=tokenizer)

    @ray.remote(num_cpus=1)
    def train(cfg: Any) -> None:
        Experiment(cfg).run()

    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(config)
    initialize_ray(config)
    ray.get(train.remote(config))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write-dataset"]:
        write_dataset(sys.argv[2])
    else:
        main()
