"""Fuzz every decoder of bytes from a sandbox, agent, engine or dataset: it may raise only its own typed error.

`ROOKERY_FUZZ_SECONDS` sets the time spent on each decoder.
"""

import asyncio
import contextlib
import gzip
import io
import json
import os
import socket
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from rookery.core import RookeryError, ScoringError, TaskError, UsageError, ints
from rookery.gateway.dialects.chat import ChatDialect
from rookery.gateway.dialects.completions import CompletionsDialect
from rookery.gateway.dialects.messages import MessagesDialect
from rookery.gateway.dialects.protocol import BadRequestError
from rookery.gateway.dialects.responses import ResponsesDialect
from rookery.gateway.tools import ToolsError
from rookery.journal.tokens import FILE_HEADER, TokenReader, decode_turn
from rookery.sandbox_runtime import guard_protocol
from rookery.sandbox_runtime.grader.codec import Malformed, decode, encode
from rookery.sandbox_runtime.worker import protocol
from rookery.sandboxes.channel import CommandReport, GuardChannel
from rookery.sandboxes.egress import messages as proxy_messages
from rookery.sandboxes.images.unpacker import tar_stream
from rookery.scoring.code_tasks import parse_code_task
from rookery.scoring.line_channel import MalformedLine, decode_line
from rookery.scoring.outputs import outputs_match
from rookery.scoring.programs import parse_program
from rookery.scoring.swe.reward_files import parse_reward
from rookery.scoring.unit_tests import _TestProgress, parse_failure, parse_load_error, parse_with_nonce
from rookery.tasks import check_tasks
from rookery.tasks.archives import unpack
from rookery.upstreams import ModelRequest, llamacpp, openai, sglang, vllm
from rookery.upstreams.format import ErrorReply, Format, ReplyContext, ReplyFormatError
from rookery.upstreams.hang_detector import parse_engine_load
from rookery.upstreams.openai_format import decode_reply
from rookery.upstreams.registry import list_load_metrics
from rookery.upstreams.sse import Events, EventTooLong
from rookery.workers.cell_report import CellReport, build_cell
from rookery.workers.limits import WorkerLimits
from tests.fuzz.kit import LEAVES, fuzz, json_like, messages, mutated, retyped

pytestmark = pytest.mark.long

# ---- grading

KINDS = ["dict", "tuple", "set", "frozenset", "range", "slice", "int", "float", "complex", "bytes", "bytearray"]
KINDS += ["Decimal", "Fraction", "date", "datetime", "time", "timedelta", "ndarray", "ref"]
WRITTEN = [
    "0xff", "nan", "1/2", "2020-01-01", "2020-01-01T00:00:00+00:00", "01:00Z", "00ff", "<f8", "|b1", "O", "sNaN",
]  # fmt: skip


def test_grader_codec_survives_fuzzing() -> None:
    def check(plain: Any) -> None:
        with contextlib.suppress(Malformed):
            value = decode(plain, lambda _: None)
            encode(value, _no_reference)  # a decoded value can be encoded again

    leaves = LEAVES | st.sampled_from(WRITTEN)
    tagged = st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.fixed_dictionaries({"t": st.sampled_from(KINDS), "v": inner | st.lists(inner, max_size=3)})
            | st.dictionaries(st.sampled_from(["t", "v", "n"]), inner, max_size=3)
        ),
        max_leaves=14,
    )
    fuzz(tagged, check)


def _no_reference(value: Any) -> Any:
    raise AssertionError(f"decoded a {type(value).__name__}, which cannot be encoded")


def test_unit_test_lines_survive_fuzzing() -> None:
    verdict = {"n": 0, "verdict": "passed", "detail": "é", "by": ""}
    seeds: list[Any] = [["test a"], 0, verdict, ["word", verdict], ["crash", "why"], {"name": "E", "message": "x"}]

    def check(data: bytes) -> None:
        parse_load_error(data)
        parse_with_nonce(b"v" + data, "word")
        with contextlib.suppress(MalformedLine):
            plain = decode_line(data)
            for kind in (b"n", b"b", b"v", b"z"):
                board = _TestProgress()
                board.names = ["test a"]
                with contextlib.suppress(MalformedLine):
                    board.add(kind, plain)
                    msgspec.json.encode(board.get_results("crash", ""))
            parse_failure(plain)

    fuzz(messages(seeds, ["n", "verdict", "passed", "detail", "by", "name", "message", "crash", "word"]), check)


def test_reward_file_parser_survives_fuzzing() -> None:
    def check(data: bytes) -> None:
        for source in ("reward.json", "reward.txt"):
            with contextlib.suppress(ScoringError):
                msgspec.json.encode(parse_reward(source, data, 0.0, 1.0))

    texts = mutated([b"1", b"0.5\n", b"1e-3", b"nan", b'{"reward": 1, "a": 0.5}'])
    fuzz(messages([1, 0.5, {"reward": 1, "a": 0.5}], ["reward", "a"]) | texts, check)


def test_output_comparison_survives_fuzzing() -> None:
    words = st.lists(
        st.sampled_from(["1", "inf", "nan", "1e400", "-0", "1_0", "x", "9" * 400]) | st.text(), max_size=4
    )

    def check(pair: tuple[list[str], list[str], float | None]) -> None:
        expected, got, tolerance = " ".join(pair[0]), " ".join(pair[1]), pair[2]
        assert outputs_match(expected, expected, tolerance)
        outputs_match(expected, got, tolerance)

    tolerances = st.none() | st.floats(min_value=0, allow_nan=False, allow_infinity=False)
    fuzz(st.tuples(words, words, tolerances), check)


# ---- workers


def test_worker_frame_decoder_survives_fuzzing() -> None:
    head = protocol.DONE_HEAD.pack(1, 0, 0, 0.1, 0.1, 0.0, 1, 0, 0)
    done = head + protocol.pack_texts([b"value", b"", b"1\nx\n2", b"", b"fig.png", b"\0", b"file"])
    seeds = [done, protocol.HEAD.pack(len(done), protocol.DONE) + done, protocol.pack_texts([b"a", b"\xff"])]

    def check(data: bytes) -> None:
        with contextlib.suppress(protocol.MalformedFrame):
            msgspec.json.encode(build_cell(CellReport.decode(data), WorkerLimits()))
        decoder = protocol.FrameDecoder(1 << 16)
        decoder.buffer += data
        with contextlib.suppress(protocol.MalformedFrame):
            for _, payload in decoder.frames():
                protocol.unpack_texts(payload)

    fuzz(mutated(seeds) | st.binary(max_size=120), check)


# ---- sandboxes


class _NonKillingChannel(GuardChannel):
    """Guard channel that does not kill the guard after a malformed report."""

    def kill_guard(self) -> None:
        """Do nothing: the test ends the process."""


def test_guard_channel_survives_fuzzed_reports() -> None:
    seeds = [
        guard_protocol.REPORT.pack(kind, 1, 0, 0, 0.1, 5, 0.2, 0)
        for kind in (guard_protocol.READY, guard_protocol.ALL_KILLED, 99)
    ]

    async def each(reports: list[bytes]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, ours, subprocess.Popen(["sleep", "60"]) as child:
            try:
                ours.setblocking(False)
                channel = _NonKillingChannel(child.pid, ours, None, os.pidfd_open(child.pid))
                promise = channel._pending[1] = asyncio.get_running_loop().create_future()
                for report in reports:
                    if report:
                        theirs.send(report)
                        channel._receive()
                assert not promise.done() or isinstance(promise.result(), CommandReport | None)
            finally:
                for fd in (ours.fileno(), channel._pidfd):
                    asyncio.get_running_loop().remove_reader(fd)
                os.close(channel._pidfd)
                child.kill()

    fuzz(st.lists(mutated(seeds), min_size=20, max_size=40), lambda reports: asyncio.run(each(reports)))


# ---- agents

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "ok"},
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = {
    "model": "m", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "temperature": 0.5, "stop": ["a"],
    "max_tokens": 5, "n": 1, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True,
    "response_format": {"type": "json_object"},
}  # fmt: skip
ANTHROPIC = {
    "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "1",
         "content": [{"type": "text", "text": "r"}]}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 10},
}  # fmt: skip
RESPONSES = {
    "model": "m", "instructions": "i", "max_output_tokens": 3, "tools": [{"type": "function", "name": "f"}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "reasoning", "summary": []},
    ],
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "previous_response_id": "r",
}  # fmt: skip
COMPLETIONS = {"model": "m", "prompt": ["a"], "max_tokens": 3, "logprobs": 1, "echo": False, "stop": "x"}


@pytest.mark.parametrize(
    ("dialect", "seed"),
    [
        (ChatDialect(), CHAT),
        (MessagesDialect(), ANTHROPIC),
        (ResponsesDialect(), RESPONSES),
        (CompletionsDialect(), COMPLETIONS),
    ],
    ids=["chat", "messages", "responses", "completions"],
)
def test_dialect_request_parser_survives_fuzzing(dialect: Any, seed: dict[str, Any]) -> None:
    words = sorted({word for word in _words(seed) if word})

    def check(body: bytes) -> None:
        with contextlib.suppress(BadRequestError, ToolsError):
            dialect.parse_request(body)

    fuzz(messages([seed], words), check)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": ["input_text"], "text": "a"}]},
        {"role": "user", "content": [{"type": {}}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "namespace": 5},
    ],
)
def test_responses_items_with_wrong_types_raise_only_bad_request(item: dict[str, Any]) -> None:
    with contextlib.suppress(BadRequestError):
        ResponsesDialect().parse_request(json.dumps({"model": "m", "input": [item]}).encode())


def _words(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(word for one in value.values() for word in _words(one))}
    if isinstance(value, list):
        return {word for one in value for word in _words(one)}
    return {value} if isinstance(value, str) else set()


def test_egress_proxy_parsers_survive_fuzzing() -> None:
    seeds = [
        b"GET http://example.org/a?b HTTP/1.1\r\nHost: example.org\r\nContent-Length: 3",
        b"CONNECT [::1]:443 HTTP/1.1\r\nHost: [::1]:443",
        b"POST http://example.org:80/ HTTP/1.0\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close",
    ]
    asked = proxy_messages.parse_request(seeds[0])

    def check(head: bytes) -> None:
        with contextlib.suppress(proxy_messages.BadRequest):
            proxy_messages.build_request(proxy_messages.parse_request(head))
        with contextlib.suppress(proxy_messages.BadRequest):
            proxy_messages.parse_response(head, asked)
        with contextlib.suppress(proxy_messages.BadRequest):
            proxy_messages.parse_chunk_size(head[:20])

    fuzz(mutated(seeds) | st.binary(max_size=100), check)


# ---- engines

REPLY = {
    "id": "1", "model": "m", "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "prompt_token_ids": [1, 2, 3],
    "choices": [{
        "index": 0, "finish_reason": "stop", "token_ids": [4, 5],
        "message": {"role": "assistant", "content": "a", "tool_calls": MESSAGES[2]["tool_calls"]},
        "logprobs": {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}] * 2},
    }],
}  # fmt: skip


def test_openai_reply_decoder_survives_fuzzing() -> None:
    def check(data: bytes) -> None:
        for raw_logprobs in (False, True):
            with contextlib.suppress(ReplyFormatError):
                decode_reply(data, raw_logprobs=raw_logprobs)

    fuzz(messages([REPLY], sorted(_words(REPLY))), check)


def test_sglang_reply_decoder_survives_fuzzing() -> None:
    meta = {"finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 3, "completion_tokens": 2}
    entry = [-0.5, 4, "a"]
    answer = {
        "text": "a",
        "output_ids": [4, 5],
        "meta_info": {**meta, "output_token_logprobs": [entry, entry], "output_top_logprobs": [[entry], None]},
    }

    def check(data: bytes) -> None:
        for read in (sglang.read_answer, sglang.read_ids, sglang.read_entries, sglang.read_alternatives):
            with contextlib.suppress(ReplyFormatError, ErrorReply):
                read(data)

    seeds: list[Any] = [answer, [4, 5], [entry, None], [[entry], None], {"error": {"message": "x"}}]
    fuzz(messages(seeds, sorted(_words(answer))), check)


def test_event_stream_decoder_survives_fuzzing() -> None:
    seeds = [b"data: {}\n\n", b"\xef\xbb\xbfevent: x\r\ndata: a\r\ndata: b\r\n\r\n", b": c\n\ndata: [DONE]\n\n"]

    def check(pieces: list[bytes]) -> None:
        events = Events()
        found = []
        with contextlib.suppress(EventTooLong):
            for piece in pieces:
                found += events.feed(piece)
            whole = Events().feed(b"".join(pieces))
            assert found == whole, "the result depends on how the stream was split"

    fuzz(st.lists(mutated(seeds), max_size=5), check)


ENTRY = {"id": 4, "token": "a", "logprob": -0.5, "top_logprobs": [{"id": 4, "token": "a", "logprob": -0.5}]}
CHUNK = {"prompt_token_ids": [1, 2], "choices": [{
    "index": 0, "delta": {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": [
        {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    "text": "a", "token_ids": [4], "logprobs": {"content": [ENTRY]}, "finish_reason": None}]}  # fmt: skip
GENERATED = {"text": "a", "output_ids": [4], "meta_info": {
    "id": "1", "finish_reason": None, "completion_tokens": 1, "weight_version": "3",
    "output_token_logprobs": [[-0.5, 4, "a"]], "output_top_logprobs": [[[-0.5, 4, "a"]]]}}  # fmt: skip
COMPLETION = {"content": "a", "tokens": [4], "stop": True, "stop_type": "eos", "completion_probabilities": [ENTRY]}
STREAMED: list[Any] = [CHUNK, GENERATED, COMPLETION, {"error": {"message": "x", "code": 500}}]


@pytest.mark.parametrize(
    "form",
    [openai.CHAT, openai.COMPLETIONS, vllm.Generate(), sglang.Generate(), llamacpp.NativeCompletion()],
    ids=["chat", "completions", "vllm", "sglang", "llamacpp"],
)
def test_every_reply_format_survives_fuzzing(form: Format) -> None:
    prompt = ModelRequest(model="", tokens=ints([1, 2]), top_logprobs=1)
    words = sorted({word for seed in STREAMED for word in _words(seed)})

    def check(events: list[bytes]) -> None:
        gathered = form.stream_parser(prompt)
        with contextlib.suppress(ReplyFormatError, ErrorReply):
            for event in events:
                gathered.feed(b"data: " + event.replace(b"\n", b" ") + b"\n\n")
            if not gathered.ended():
                gathered.reply(ReplyContext())
        for event in events:
            with contextlib.suppress(ReplyFormatError, ErrorReply):
                form.decode(event, prompt, ReplyContext())

    fuzz(st.lists(messages(STREAMED, words), min_size=1, max_size=4), check)


def test_engine_metrics_parser_survives_fuzzing() -> None:
    seeds = [
        b'# TYPE x gauge\nvllm:num_requests_running{engine="0",model_name="m"} 3.0\nvllm:num_requests_waiting 1\n',
        b'vllm:generation_tokens_total{model_name="m"} 1e5\nsglang:num_running_reqs{a="\\"}"} 2\n',
    ]
    fuzz(mutated(seeds) | st.binary(max_size=200), lambda text: parse_engine_load(text, list_load_metrics()))


# ---- datasets

ROWS: list[Any] = [
    {"id": "a", "prompt": "x", "answer": "1", "limits": {"turns": 3, "run": 5}, "data": {"level": 1}},
    {"id": "b", "prompt": [{"role": "user", "content": "x"}], "tests": ["assert f(1)"], "entry_point": "f"},
    {"id": "c", "instruction": "do", "files": {"/workspace/a": "b"}, "tests": {"test.sh": "exit 0"},
     "image": "x", "setup": "true", "timeout": 5, "network": "none", "env": {"A": "b"}},
    {"id": "d", "cases": [{"stdin": "1", "stdout": "2", "limits": {"wall": 1}}], "tolerance": 0.1},
]  # fmt: skip
ROW_WORDS = sorted(
    {word for row in ROWS for word in _words(row)} | {"link", "base64", "mode", "../x", "/etc/passwd", "language"}
)


def test_task_rows_survive_fuzzing(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        with contextlib.suppress(UsageError, TaskError):
            check_tasks(file)

    lines = st.lists(messages(ROWS, ROW_WORDS), max_size=3).map(b"\n".join)
    fuzz(lines, check)


def test_code_task_rows_survive_fuzzing() -> None:
    def check(row: Any) -> None:
        if isinstance(row, dict):
            with contextlib.suppress(TaskError):
                parse_code_task(row)
        with contextlib.suppress(UsageError):
            parse_program(row)

    programs: list[Any] = [{"source": "x", "stdin": {"base64": "AA=="}, "files": {"a": "b"}, "argv": ["a"]}]
    shaped = st.sampled_from(ROWS + programs).flatmap(lambda row: retyped(row, ROW_WORDS))
    fuzz(shaped | json_like(ROW_WORDS), check)


def _archive(form: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, kind in (("a", tarfile.REGTYPE), ("d", tarfile.DIRTYPE), ("d/" + "n" * 120, tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, 5 if kind == tarfile.REGTYPE else 0
            info.pax_headers = {"comment": "é"}
            tar.addfile(info, io.BytesIO(b"hello"))
        link = tarfile.TarInfo("l")
        link.type, link.linkname = tarfile.SYMTYPE, "a"
        tar.addfile(link)
    return out.getvalue()


ARCHIVES = [_archive(form) for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)]


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """Generate archives with changed headers and valid checksums, and arbitrarily mutated ones."""
    data = bytearray(draw(st.sampled_from(ARCHIVES)))
    for _ in range(draw(st.integers(0, 4))):
        block = draw(st.integers(0, len(data) // 512 - 1)) * 512
        field = draw(st.sampled_from([(0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (345, 155)]))
        text = draw(
            st.binary(max_size=field[1]) | st.sampled_from([b"../x", b"\x80" + b"\xff" * 11, b"x", b"7" * 12])
        )
        data[block + field[0] : block + field[0] + len(text[: field[1]])] = text[: field[1]]
        data[block + 148 : block + 156] = b" " * 8
        data[block + 148 : block + 156] = b"%06o\0 " % (sum(data[block : block + 512]) & 0o777777)
    whole = draw(mutated([bytes(data)])) if draw(st.booleans()) else bytes(data)
    return gzip.compress(whole) if draw(st.integers(0, 3)) == 0 else whole


def test_task_archives_survive_fuzzing(tmp_path: Path) -> None:
    file = tmp_path / "tasks.tar"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            place = Path(folder) / "in"
            place.mkdir()
            with contextlib.suppress(UsageError):
                unpack(file, place, most=1 << 20, entries=100)
            assert os.listdir(folder) == ["in"]

    fuzz(archives(), check)


def test_image_layer_reader_survives_fuzzing() -> None:
    def check(data: bytes) -> None:
        left = [data]
        reader = tar_stream.TarReader(lambda: left.pop() if left else b"")
        with contextlib.suppress(tar_stream.BadArchiveError):
            for count, _ in enumerate(reader.entries()):
                if count > 1000:
                    break

    fuzz(archives(), check)


# ---- the journal


def test_token_file_reader_survives_fuzzing(tmp_path: Path) -> None:
    file = tmp_path / "w-0.rtk"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        with contextlib.suppress(RookeryError), contextlib.closing(TokenReader(tmp_path)) as reader:
            for _, payload in reader.scan(file.name):
                decode_turn(payload)
        with contextlib.suppress(RookeryError):
            decode_turn(data)

    frame = msgspec.msgpack.encode({"a": [1, "x", b"y", None]})
    fuzz(mutated([FILE_HEADER, FILE_HEADER + bytes(40), frame, json.dumps({}).encode()]) | st.binary(), check)
