"""Run rows on `rookery serve --protocol nemo-gym`, as NeMo Gym does, and print the metrics.

rookery serve arithmetic --protocol nemo-gym --package gym -n 4
rookery serve arithmetic --protocol nemo-gym --policy embedded &
python examples/nemo_gym_client.py gym/tasks.jsonl
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp


async def run_row(http: aiohttp.ClientSession, index: int, row: dict[str, Any]) -> dict[str, Any] | None:
    row["responses_create_params"] |= {"temperature": 1.0, "max_output_tokens": 256}
    async with http.post("/run", json=row) as answer:
        result = await answer.json()
    if answer.status >= 500:
        print("missing, NeMo RL would try again:", result["error"])
        return None
    answer.raise_for_status()
    tokens = [len(item.get("generation_token_ids", ())) for item in result["response"]["output"]]
    print(f"{row['rookery']['id']}: reward {result['reward']:g}, sampled tokens per output item: {tokens}")
    return {**result, "_ng_task_index": index}


async def main(rows: list[dict[str, Any]], url: str) -> None:
    async with aiohttp.ClientSession(url) as http:
        results = await asyncio.gather(*(run_row(http, index, row) for index, row in enumerate(rows)))
        scored = [one for one in results if one is not None]
        async with http.post("/aggregate_metrics", json={"verify_responses": scored}) as answer:
            print((await answer.json())["key_metrics"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="the file tasks.jsonl that `rookery serve --package` wrote")
    parser.add_argument("--url", default="http://127.0.0.1:8600")
    args = parser.parse_args()
    lines = Path(args.rows).read_text(encoding="utf-8").splitlines()
    asyncio.run(main([json.loads(line) for line in lines], args.url))
