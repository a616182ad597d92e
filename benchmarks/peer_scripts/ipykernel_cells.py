"""Measures the time of a cell in ipykernel, with jupyter_client's blocking client.

The benchmark `workers` runs it in the peer's own environment (`make peers`). The time of a cell lasts from sending
it until its reply has arrived and the kernel is idle again, so all output is there. There is a pause between
cells, as in our own measurement.

The last line of the output is one JSON object: {"peer", "cells": [ms, …]}.
"""

import argparse
import importlib.metadata
import json
import time

from jupyter_client.manager import KernelManager


def run_cell(client, source: str) -> list[str]:  # type: ignore[no-untyped-def]
    """Run a cell and return the texts of its output and value. Raise if it failed."""
    texts = []
    message_id = client.execute(source)
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != message_id:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            texts.append(content["text"])
        elif kind == "execute_result":
            texts.append(content["data"]["text/plain"])
        elif kind == "error":
            raise RuntimeError(content["evalue"])
        elif kind == "status" and content["execution_state"] == "idle":
            break
    while client.get_shell_msg(timeout=60)["parent_header"].get("msg_id") != message_id:
        pass
    return texts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, required=True)
    parser.add_argument("--setup", required=True)
    parser.add_argument("--cell", required=True, help="source with {n}; prints n and has the value 2 * n")
    parser.add_argument("--pause", type=float, required=True)
    args = parser.parse_args()
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        run_cell(client, args.setup)
        times = []
        for n in range(args.cells + 5):
            time.sleep(args.pause)
            source = args.cell.replace("{n}", str(n))
            began = time.perf_counter()
            texts = run_cell(client, source)
            took = 1e3 * (time.perf_counter() - began)
            if "".join(texts) != f"{n}\n{2 * n}":
                raise RuntimeError(f"a cell returned {texts}")
            if n >= 5:  # the first cells are slower
                times.append(took)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    print(json.dumps({"peer": f"ipykernel {importlib.metadata.version('ipykernel')}", "cells": times}))


if __name__ == "__main__":
    main()
