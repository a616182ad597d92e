"""Test doubles for SGLang and vLLM: their HTTP APIs on top of the embedded policy, without a GPU.

`README.md` lists their endpoints, the versions that they follow, and the faults that can be injected.

    async with standin("vllm") as server:                # in the test's own process
        ... server.url, server.root
        await server.fault(after_bytes=1000)             # cut the next response after 1000 bytes
        await server.post("/pause?mode=keep")
        with server.freezing(10): ...                    # pause when a sequence has exactly 10 tokens

    async with standin_process("sglang") as server:      # in a subprocess: server.pid, server.kill()
        ...
"""

from tests.engine_standins.launch import (
    ENGINES,
    SRC,
    EngineName,
    StandinServer,
    small_weights,
    standin,
    standin_process,
)

__all__ = ["ENGINES", "SRC", "EngineName", "StandinServer", "small_weights", "standin", "standin_process"]
