"""Train a policy on a Rookery environment with Tinker. It needs a Tinker API key or a server of Tinker's API.

TINKER_API_KEY=... python examples/tinker_loop.py arithmetic --model Qwen/Qwen3-4B-Instruct-2507 --steps 20
"""

import argparse
import asyncio
import json

import tinker

from rookery import Engine, Sampling
from rookery.adapters.tinker import TinkerPolicy, train_step
from rookery.training import make_rows


async def train(args: argparse.Namespace) -> None:
    service = tinker.ServiceClient()
    training = await service.create_lora_training_client_async(base_model=args.model, rank=32)
    client = await training.save_weights_and_get_sampling_client_async()
    policy = TinkerPolicy(client, model=args.model, tokenizer=training.get_tokenizer())
    with policy.serve() as upstream:
        async with Engine(
            args.env,
            policy=upstream,
            runners=0,
            record="tokens",
            rendering=args.rendering or {"tokenizer": args.model},
            sampling=policy.settle_sampling(Sampling(max_tokens=1024)),
        ) as engine:
            async for step in engine.steps(k=args.k, groups=args.groups, epochs=None):
                policy.check(step.groups, engine)
                metrics = await train_step(training, make_rows(step.groups))
                print(step.number, {name: round(value, 4) for name, value in metrics.items()})
                if step.number + 1 == args.steps:
                    break
                await policy.update(engine, training, version=step.number + 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", help="an environment: a name, module:attr or file.py")
    parser.add_argument("--model", required=True, help="base model, and name of its tokenizer on the hub")
    parser.add_argument("--rendering", type=json.loads, help='chat format as JSON (default: {"tokenizer": MODEL})')
    parser.add_argument("-k", type=int, default=8, help="rollouts per group")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=16, help="groups per step")
    asyncio.run(train(parser.parse_args()))
