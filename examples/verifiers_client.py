"""Run one group of rollouts on `rookery serve --protocol verifiers`, as prime-rl's orchestrator does.

    rookery serve arithmetic --protocol verifiers --package taskset
    pip install verifiers ./taskset
    rookery serve arithmetic --protocol verifiers &
    python examples/verifiers_client.py rookery-arithmetic --policy embedded --model embedded

It needs verifiers 0.4.
"""

import argparse
import asyncio

from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_taskset


async def run_group(args: argparse.Namespace) -> None:
    task = next(iter(load_taskset(EnvConfig(taskset={"id": args.taskset}).taskset)))
    client = EnvClient(args.address)
    await client.wait_for_server_startup()
    policy = TrainClientConfig(base_url=args.policy, api_key_var="ROOKERY_API_KEY")
    sampling = SamplingConfig(temperature=1.0, max_tokens=256)
    try:
        episodes = await asyncio.gather(
            *(client.run(policy, args.model, sampling, task.data.model_dump(mode="json")) for _ in range(args.k))
        )
    finally:
        await client.close()
    for episode in episodes:
        if not episode.ok:
            print("missing:", episode.errors[-1].type)
        for trace in episode.traces:
            trained = [sum(branch.sampled_mask) for branch in trace.branches]
            print(f"reward {trace.reward:g}, {trace.num_turns} turns, trained tokens per branch: {trained}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("taskset", help="name of the generated taskset package")
    parser.add_argument("--address", default="tcp://127.0.0.1:5000")
    parser.add_argument("--policy", required=True, help="URL of the inference server")
    parser.add_argument("--model", required=True)
    parser.add_argument("-k", type=int, default=4, help="rollouts")
    asyncio.run(run_group(parser.parse_args()))
