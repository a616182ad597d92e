"""LiteLLM's proxy in front of one server that speaks vLLM's chat completions, as its own command starts it.

Run by `python -m benchmarks gateway` in the peer's own environment (`make peers`), one worker, on loopback alone.
Everything that costs and is not forwarding is off: no master key (so no look-up of keys), no database, no
telemetry, no request logs, no retries, its table of prices from disk. Its output goes to standard error; the
line on standard output says where it serves, and comes when it answers.
"""

import importlib.metadata
import json
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

SETTINGS = {
    # LiteLLM's word for a server on loopback that asks nobody for a key.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "NO_DOCS": "True",
    "DISABLE_ADMIN_UI": "True",
}
START_SECONDS = 120.0


def config(api_base: str, model: str) -> dict[str, object]:
    """JSON is YAML."""
    params = {"model": f"hosted_vllm/{model}", "api_base": api_base, "api_key": "none", "max_retries": 0}
    return {
        "model_list": [{"model_name": model, "litellm_params": params}],
        "litellm_settings": {
            "telemetry": False,
            "set_verbose": False,
            "num_retries": 0,
            "turn_off_message_logging": True,
            "disable_streaming_logging": True,
        },
        "general_settings": {"disable_spend_logs": True, "infer_model_from_keys": False},
    }


def announce(port: int, said: int) -> None:
    """Says on `said` where it serves, once it answers; ends the program when that takes too long."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5) as answer:
                if answer.status == 200:
                    line = f"LiteLLM {importlib.metadata.version('litellm')} at http://127.0.0.1:{port}\n"
                    os.write(said, line.encode())
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    print(f"did not answer within {START_SECONDS:g} s", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    api_base, model = sys.argv[1:3]
    os.environ.update(SETTINGS)
    said = os.dup(1)
    os.dup2(2, 1)
    path = Path("litellm.json")
    path.write_text(json.dumps(config(api_base, model)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threading.Thread(target=announce, args=(port, said), daemon=True).start()
    from litellm import run_server

    words = ["--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    # Under load its loop turns more slowly than the usual five seconds of an idle connection.
    run_server([*words, "--telemetry", "False", "--keepalive_timeout", "300"])


if __name__ == "__main__":
    main()
