"""`rookery run` as a process: upstream kinds, replicas and record modes."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Turn
from rookery.journal import RunReader
from rookery.trajectories import build_segments
from tests.cli.helpers import rookery, runs, start_command, wait_for_end
from tests.conftest import TOKENIZERS
from tests.engine_standins import SRC, StandinServer, standin_process
from tests.waiting import wait_until

pytestmark = pytest.mark.long

RUN = ("run", "arithmetic", "-n", "4", "-k", "2", "--runners", "1")
HERE = {"PYTHONPATH": f"{SRC}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def turns_of(folder: Path) -> list[list[Turn]]:
    """Return the recorded turns by rollout."""
    with RunReader(folder) as reader:
        return [list(reader.turns(rollout)) for rollout in reader.iter_rollouts()]


def read_requests(server: StandinServer) -> list[dict[str, Any]]:
    assert server.log is not None
    return [json.loads(line) for line in server.log.read_text().splitlines()] if server.log.exists() else []


def sampling(server: StandinServer) -> list[dict[str, Any]]:
    """Return the requests that sample, without the probes of one token to a server that seems to hang."""
    requests = [
        each for each in read_requests(server) if "generate" in each["path"] or "completions" in each["path"]
    ]
    return [each for each in requests if each["body"].get("max_tokens") != 1]


def parse_dry_run(out: str) -> dict[str, tuple[str, str]]:
    """Parse the output of a dry run: value and origin by name."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines() if re.match(r"\S+\s{2,}\S", line)]
    return {row[0]: (row[1], row[2]) for row in rows if len(row) >= 3}


# ---- modes


@pytest.mark.parametrize("record", ["tokens", "messages", "plain"])
async def test_embedded_policy_supports_all_record_modes_without_a_tokenizer(record: str, tmp_path: Path) -> None:
    done = await rookery(*RUN, "--policy", "embedded", "--record", record, cwd=tmp_path, **HERE)
    assert done.code == 0, done.err
    (folder,) = runs(tmp_path)
    rollouts = turns_of(folder)
    assert len(rollouts) == 8
    for turns in rollouts:
        assert turns
        assert all(bool(turn.sampled) == (record != "plain") for turn in turns)
        trained = [index for segment in build_segments(turns) for index in segment.turns]
        assert sorted(trained) == ([turn.index for turn in turns] if record != "plain" else [])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("record", ["tokens", "messages"])
async def test_run_uses_the_api_of_the_upstream_kind(kind: Any, record: str, tmp_path: Path) -> None:
    more = ("--renderer", "embedded") if record == "tokens" else ("--record", record)
    async with standin_process(kind, weights=None) as server:
        done = await rookery(*RUN, "--policy", server.root, "--upstream-kind", kind, *more, cwd=tmp_path, **HERE)
        paths = {each["path"] for each in sampling(server)}
    assert done.code == 0, done.err
    own = {"vllm": "/inference/v1/generate", "sglang": "/generate"}[kind]
    assert paths == {own if record == "tokens" else "/v1/chat/completions"}
    assert all(turn.sampled for turns in turns_of(runs(tmp_path)[0]) for turn in turns)


# ---- replicas


async def test_repeated_policies_are_replicas_that_all_get_calls(tmp_path: Path) -> None:
    async with standin_process("vllm", weights=None) as one, standin_process("vllm", weights=None) as two:
        done = await rookery(
            *("run", "arithmetic", "-n", "8", "-k", "2", "--runners", "2", "-c", "16"),
            *("--policy", one.root, "--policy", two.root, "--upstream-kind", "vllm", "--renderer", "embedded"),
            cwd=tmp_path,
            **HERE,
        )
        work = [len(sampling(one)), len(sampling(two))]
    assert done.code == 0, done.err
    assert min(work) > 0


async def test_killed_replica_costs_no_rollout(tmp_path: Path) -> None:
    async with standin_process("vllm", weights=None) as one, standin_process("vllm", weights=None) as two:
        command = (
            *("run", "arithmetic", "-n", "20", "-k", "2", "--runners", "2", "-c", "16", "--json"),
            *("--policy", one.root, "--policy", two.root, "--upstream-kind", "vllm", "--renderer", "embedded"),
        )
        async with start_command(*command, cwd=tmp_path, **HERE) as process:
            await wait_until(lambda: len(sampling(one)) >= 5)
            one.kill()
            done = await wait_for_end(process)
        assert sampling(two)
    assert done.code == 0, (done.out[-2000:], done.err)
    assert done.events[-1]["event"] == "finished"
    rollouts = turns_of(runs(tmp_path)[0])
    assert len(rollouts) == 40
    assert all(turn.sampled for turns in rollouts for turn in turns)


# ---- invalid options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--policy", "http://127.0.0.1:9", "--record", "tokens"), "--tokenizer"),
        (("--policy", "http://127.0.0.1:9", "--upstream-kind", "vllm", "--record", "tokens"), "--tokenizer"),
        (("--policy", "http://127.0.0.1:9", "--tokenizer", "/nowhere/x"), "'/nowhere/x'"),
        (("--policy", "http://127.0.0.1:9", "--renderer", "qwen9"), "'qwen9'"),
        (("--policy", "http://127.0.0.1:9", "--renderer", "qwen3"), "tokenizer"),
        (("--policy", "http://127.0.0.1:9", "--record", "plain", "--renderer", "qwen3"), "plain"),
        (("--policy", "embedded", "--renderer", "qwen3"), "tokenizer"),
        (("--policy", "embedded", "--policy", "embedded"), "embedded[:PATH]"),
        (("--policy", "http://127.0.0.1:9", "--upstream-kind", "embedded"), "http://127.0.0.1:9"),
        (("--policy", "embedded", "--upstream-kind", "vllm"), "'embedded'"),
    ],
)
async def test_invalid_record_options_are_refused_before_the_start(
    options: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    done = await rookery(*RUN, *options, cwd=tmp_path, **HERE)
    done.assert_refused(named)
    assert runs(tmp_path) == []
    dry = await rookery(*RUN, *options, "--dry-run", cwd=tmp_path, **HERE)
    assert dry.code == 2
    assert named in dry.err


@pytest.mark.parametrize(("option", "value"), [("--record", "everything"), ("--upstream-kind", "gpt")])
async def test_invalid_choice_is_refused_with_the_valid_ones(option: str, value: str, tmp_path: Path) -> None:
    done = await rookery(*RUN, "--policy", "embedded", option, value, cwd=tmp_path, **HERE)
    assert done.code == 2
    assert repr(value) in done.err
    assert {"--record": "plain", "--upstream-kind": "sglang"}[option] in done.err


# ---- the dry run


async def test_dry_run_shows_upstream_kind_and_record_mode(tmp_path: Path) -> None:
    done = await rookery(*RUN, "--policy", "embedded", "--dry-run", cwd=tmp_path, **HERE)
    rows = parse_dry_run(done.out)
    assert done.code == 0
    assert rows["upstream-kind"] == ("embedded", "command line")
    assert rows["record"] == ("messages", "default")
    done = await rookery(*RUN, "--policy", "embedded", "--record", "tokens", "--dry-run", cwd=tmp_path, **HERE)
    rows = parse_dry_run(done.out)
    assert (rows["record"], rows["renderer"]) == (("tokens", "command line"), ("embedded", "default"))


async def test_upstream_kind_and_record_mode_can_come_from_file_and_variables(tmp_path: Path) -> None:
    (tmp_path / "rookery.toml").write_text(
        '[run]\npolicy = ["http://127.0.0.1:9", "http://127.0.0.1:10"]\nupstream-kind = "sglang"\n'
        'renderer = "embedded"\n'
    )
    done = await rookery(*RUN, "--dry-run", cwd=tmp_path, ROOKERY_RECORD="tokens", **HERE)
    rows = parse_dry_run(done.out)
    assert done.code == 0, done.err
    assert rows["policy"] == ("http://127.0.0.1:9 http://127.0.0.1:10", "rookery.toml")
    assert rows["upstream-kind"] == ("sglang", "rookery.toml")
    assert rows["record"] == ("tokens", "$ROOKERY_RECORD")
    assert rows["renderer"] == ("embedded", "rookery.toml")


@pytest.mark.needs("tokenizers")
async def test_tokenizer_implies_record_tokens(tmp_path: Path) -> None:
    done = await rookery(
        *RUN,
        *("--policy", "http://127.0.0.1:9", "--upstream-kind", "vllm", "--tokenizer", TOKENIZERS / "qwen3"),
        "--dry-run",
        cwd=tmp_path,
        **HERE,
        ROOKERY_CACHE=str(TOKENIZERS.parent / "cache"),
    )
    rows = parse_dry_run(done.out)
    assert done.code == 0, done.err
    assert (rows["record"][0], rows["renderer"][0]) == ("tokens", "auto")
    assert rows["tokenizer"][1] == "command line"


# ---- resume


async def test_resume_keeps_upstream_kind_replicas_and_record_mode(tmp_path: Path) -> None:
    async with standin_process("vllm", weights=None) as one, standin_process("vllm", weights=None) as two:
        command = (
            *("run", "arithmetic", "-n", "10", "-k", "2", "--runners", "1", "-c", "4"),
            *("--policy", one.root, "--policy", two.root, "--upstream-kind", "vllm", "--renderer", "embedded"),
        )
        async with start_command(*command, cwd=tmp_path, **HERE) as process:
            await wait_until(lambda: len(sampling(one)) + len(sampling(two)) >= 10)
            process.send_signal(signal.SIGKILL)
            assert (await wait_for_end(process)).code == -signal.SIGKILL
        (folder,) = runs(tmp_path)
        with RunReader(folder) as reader:
            config = reader.config()
        done = await rookery("resume", folder, cwd=tmp_path, **HERE)
        assert done.code == 0, done.err
        paths = {each["path"] for server in (one, two) for each in sampling(server)}
        urls = [one.root, two.root]
    assert config["upstreams"]["policy"]["kind"] == "vllm"
    assert config["upstreams"]["policy"]["urls"] == urls
    assert config["rendering"] == {"name": "embedded"}
    assert paths == {"/inference/v1/generate"}
    rollouts = turns_of(folder)
    assert len(rollouts) == 20
    assert all(turn.sampled for turns in rollouts for turn in turns)


# ---- the gateway


async def test_gateway_with_the_embedded_policy_needs_no_tokenizer(tmp_path: Path) -> None:
    command = ("gateway", "--upstream", "embedded", "--record", "tokens", "--port", "0")
    async with start_command(*command, cwd=tmp_path, **HERE) as process:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        assert re.search(r"http://127\.0\.0\.1:\d+\b.*\btokens\b", line), line
        process.send_signal(signal.SIGINT)
        assert (await wait_for_end(process)).code == 0


async def test_gateway_that_cannot_record_tokens_is_refused_at_the_start(tmp_path: Path) -> None:
    command = ("gateway", "--upstream", "http://127.0.0.1:9", "--record", "tokens", "--port", "0")
    (await rookery(*command, cwd=tmp_path, **HERE)).assert_refused("--tokenizer")
    (await rookery(*command, "--renderer", "qwen9", cwd=tmp_path, **HERE)).assert_refused("'qwen9'")
