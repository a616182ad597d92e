"""Test doubles for vLLM and SGLang: their HTTP APIs on top of the embedded policy, without a GPU.

Tokens are really sampled; token IDs are those of the embedded policy. The request and response formats follow vLLM
at commit a014e35 and SGLang at commit cce0a12, both of 22 August 2026.

    async with standin("vllm") as server:                # in the test's own process
        ... server.url, server.root, server.requests
        await server.fault(after_bytes=1000)             # cut the next response after 1000 bytes
        await server.post("/pause?mode=keep")
        with server.freezing(10): ...                    # pause when a sequence has exactly 10 tokens

    async with standin_process("sglang") as server:      # in a subprocess: server.pid, server.kill()
        ...

`python -m tests.engine_standins vllm --port 8000` starts one by hand.

Behaviour:
- responses have the fields of the real server; rejected requests get its status and error body;
- request fields that the real server ignores are ignored, and counted at `/standin/ignored`;
- request fields that the real server honours and the stand-in does not implement are rejected with status 501;
- a fault requested at `/standin/faults` affects the next matching requests and no others.
"""

from tests.engine_standins.faults import Fault
from tests.engine_standins.launch import (
    ENGINES,
    SRC,
    EngineName,
    StandinServer,
    small_weights,
    standin,
    standin_process,
)

__all__ = ["ENGINES", "SRC", "EngineName", "Fault", "StandinServer", "small_weights", "standin", "standin_process"]
