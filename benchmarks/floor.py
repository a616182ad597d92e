"""The floor: what the HTTP call alone costs, so that the distance to it is seen."""

import asyncio
import time

import aiohttp
import orjson

from benchmarks.server import MODEL, TOKENS


async def floor_cpu_ms(url: str, *, n: int, repeats: int, concurrency: int) -> list[float]:
    """The same HTTP call and nothing else: aiohttp and orjson, one process, `concurrency` at once."""

    async def calls(session: aiohttp.ClientSession, numbers: list[int]) -> None:
        while numbers:
            text = f"Question {numbers.pop()}: what is six times seven?"
            messages = [{"role": "user", "content": text}]
            body = orjson.dumps({"model": MODEL, "messages": messages, "logprobs": True, "return_token_ids": True})
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/chat/completions", data=body, headers=headers) as reply:
                answer = orjson.loads(await reply.read())
            if len(answer["choices"][0]["token_ids"]) != TOKENS:
                raise RuntimeError(f"the instant model did not answer {TOKENS} tokens")
            # Held over the next call, 64 of these make it 0.45 instead of 0.27 CPU-ms (medians of nine,
            # interleaved; 0.33 with the collector off, so it is most of the difference and not all).
            del answer

    async def together(session: aiohttp.ClientSession, count: int) -> None:
        numbers = list(range(count))
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(calls(session, numbers))

    costs: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await together(session, 8 * concurrency)
        for _ in range(repeats):
            began = time.process_time()
            await together(session, n)
            costs.append(1e3 * (time.process_time() - began) / n)
    return costs
