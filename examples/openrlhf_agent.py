"""Agent executor for OpenRLHF: pass this file as `--train.agent_func_path`. Run it to print the dataset.

python examples/openrlhf_agent.py arithmetic > arithmetic.jsonl

The environment and the tokenizer are read from ROOKERY_ENV and ROOKERY_TOKENIZER.
"""

import json
import os
import sys

from rookery import load_environment
from rookery.adapters.openrlhf import make_executor
from rookery.tasks import tasks_from

if __name__ == "__main__":
    environment = load_environment(sys.argv[1])
    for task in tasks_from(environment.tasks(), environment.title):
        print(json.dumps({"prompt": task.text, "label": task.id}))
else:
    AgentExecutor = make_executor(
        os.environ.get("ROOKERY_ENV", "arithmetic"),
        rendering={"tokenizer": os.environ.get("ROOKERY_TOKENIZER", "Qwen/Qwen3-0.6B")},
    )
