"""Exact requests, and answers in the documented format of SGLang, kept as files.

The files were written from SGLang's protocol models. An answer has exactly their keys and types; strings are
compared where a client goes by them.
"""

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.engine_standins import standin

FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted(FIXTURES.glob("sglang/*.json"))
EXACT = {"object", "type", "role", "finish_reason", "status", "param", "code", "owned_by", "matched", "retryable"}
"""Keys whose values clients depend on."""


def check(expected: Any, got: Any, where: str = "$") -> None:
    """Check keys and types. A list element is compared with the expected one at its index, or with the last."""
    if isinstance(expected, dict):
        assert isinstance(got, dict), where
        assert set(got) == set(expected) or where.endswith("top_logprobs[]"), (where, set(got) ^ set(expected))
        for key in set(expected) & set(got):
            if key in EXACT and not isinstance(expected[key], dict | list):
                assert got[key] == expected[key], (where, key, got[key])
            check(expected[key], got[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(got, list), where
        assert bool(got) == bool(expected), (where, got)
        assert len(got) == len(expected) or where.rpartition(".")[2] not in ("choices", "data", "$"), where
        for index, value in enumerate(got):
            check(expected[min(index, len(expected) - 1)], value, f"{where}[]")
    else:
        assert type(got) is type(expected), (where, expected, got)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_recorded_request_gets_exactly_the_documented_keys_and_types(file: Path) -> None:
    kept = orjson.loads(file.read_bytes())
    request = kept["request"]
    async with standin("sglang", weights=None) as server:
        async with server.http.request(
            request["method"],
            server.root + request["path"],
            params=request["query"],
            headers=request["headers"],
            json=request["body"],
        ) as answer:
            body = await answer.read()
        assert answer.status == kept["status"], body
        if "events" in kept:
            pieces = body.split(b"\n\n")
            assert pieces.pop() == b""
            found = [piece.removeprefix(b"data: ") for piece in pieces]
            got = [piece.decode() if piece == b"[DONE]" else orjson.loads(piece) for piece in found]
            assert len(got) == len(kept["events"]), got
            for number, (expected, event) in enumerate(zip(kept["events"], got, strict=True)):
                check(expected, event, f"event {number}")
            return
        reply: Any = orjson.loads(body) if body else None
        check(kept["response"], reply)
        if "message" in kept:
            assert reply["error"]["message"] == kept["message"]


def test_every_recorded_request_is_used() -> None:
    assert len(FILES) == 23
