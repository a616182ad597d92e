"""LiteLLM's proxy in front of one server with vLLM's chat completions, started by its own command.

The benchmark `gateway` runs it in the peer's own environment (`make peers`), with one worker, on the loopback
address. Everything that costs time without forwarding is disabled: master key and key look-ups, database,
telemetry, request logs and retries; its price table comes from disk. Its output goes to standard error. When it
answers, it prints its address to standard output.
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
    # Lets LiteLLM run without authentication.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "NO_DOCS": "True",
    "DISABLE_ADMIN_UI": "True",
}
START_SECONDS = 120.0


def config(api_base: str, model: str) -> dict[str, object]:
    """Return the configuration, which LiteLLM reads as YAML, a superset of JSON."""
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


def announce(port: int, stdout: int) -> None:
    """Write the address to the descriptor `stdout` once the proxy answers; exit if that takes too long."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5) as response:
                if response.status == 200:
                    line = f"LiteLLM {importlib.metadata.version('litellm')} at http://127.0.0.1:{port}\n"
                    os.write(stdout, line.encode())
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    print(f"did not answer within {START_SECONDS:g} s", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    api_base, model = sys.argv[1:3]
    os.environ.update(SETTINGS)
    stdout = os.dup(1)
    os.dup2(2, 1)
    path = Path("litellm.json")
    path.write_text(json.dumps(config(api_base, model)))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    threading.Thread(target=announce, args=(port, stdout), daemon=True).start()
    from litellm import run_server

    options = ["--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    # Under load an iteration of its event loop takes longer than the default keep-alive of five seconds.
    run_server([*options, "--telemetry", "False", "--keepalive_timeout", "300"])


if __name__ == "__main__":
    main()
