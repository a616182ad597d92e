"""Train a policy on a Rookery environment with Tinker. It needs a Tinker API key or a server of Tinker's API.

TINKER_API_KEY=... python examples/tinker_loop.py arithmetic --model Qwen/Qwen3-4B-Instruct-2507 --steps 20
"""

import argparse
import asyncio

import tinker

from rookery import Engine, Sampling
from rookery.adapters.tinker import TinkerPolicy, train_step
from rookery.training import make_rows


async def train(args: argparse.Namespace) -> None:
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client_async(base_model=args.model, rank=32)
    policy = TinkerPolicy(await training.save_weights_and_get_sampling_client_async(), model=args.model)
    with policy.serve() as upstream:
        async with Engine(
            args.env,
            policy=upstream,
            runners=0,
            record="tokens",
            rendering={"tokenizer": args.model},
            sampling=policy.settle_sampling(Sampling(max_tokens=1024)),
        ) as engine:
            async for step in engine.steps(k=8, groups=args.groups, epochs=None):
                metrics = await train_step(training, make_rows(step.groups))
                print(step.number, {name: round(value, 4) for name, value in metrics.items()})
                if step.number + 1 == args.steps:
                    break
                await policy.update(engine, training, version=step.number + 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", help="an environment: a name, module:attr or file.py")
    parser.add_argument("--model", required=True, help="base model, and name of its tokenizer on the hub")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=16, help="groups per step")
    asyncio.run(train(parser.parse_args()))
