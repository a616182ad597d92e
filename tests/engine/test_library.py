"""The synchronous engine, and an engine in another process."""

import asyncio
import json
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine, Sampling, SandboxSpec, SyncEngine
from rookery.core import Group, RookeryError, Task, UsageError, label
from rookery.engine import EngineConfig, remote_engine
from rookery.engine.control_server import HELLO_BYTES, KEY, SOCKET
from tests.engine.conftest import ENV, QUICK, build_engine, run_groups
from tests.servers import ModelServer
from tests.waiting import wait_until


def row(n: int, **data: Any) -> dict[str, Any]:
    return {"id": f"t{n}", "prompt": f"q{n}", "data": data}


def seeds(groups: list[Group]) -> dict[str, list[int]]:
    assert len({group.task.id for group in groups}) == len(groups), "a group was returned twice"
    return {group.task.id: [rollout.seed for rollout in group.rollouts] for group in groups}


# ---- the synchronous engine


def build_sync_engine(url: str, tmp_path: Path, **options: Any) -> SyncEngine:
    return SyncEngine(ENV, policy=url, out=tmp_path / "sync", runners=0, retry=QUICK, **options)


class Threads:
    """Finds threads that did not exist before."""

    def __init__(self) -> None:
        self.before = set(threading.enumerate())

    @property
    def new(self) -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread not in self.before}


async def test_sync_engine_returns_the_same_groups_and_leaves_no_thread(
    model: ModelServer, tmp_path: Path
) -> None:
    tasks = [row(n, score={"0": "half"}) for n in range(6)]
    expected = await run_groups(model, tmp_path, tasks, k=2)

    def work() -> list[Group]:
        threads = Threads()
        with build_sync_engine(model.url, tmp_path) as engine:
            groups = list(engine.groups(tasks, k=2))
            assert "rookery-engine" in threads.new
            with engine.paused():
                assert engine.status()["paused"]
            assert not engine.status()["paused"]
            assert engine.folder is not None
        assert threads.new == set()
        with pytest.raises(UsageError, match="with SyncEngine"):
            engine.groups(tasks)
        return groups

    groups = sorted(await asyncio.to_thread(work), key=lambda group: group.index)
    assert seeds(groups) == seeds(expected)
    assert [group.rewards for group in groups] == [group.rewards for group in expected]
    assert [rollout.segments for group in groups for rollout in group.rollouts] == [
        rollout.segments for group in expected for rollout in group.rollouts
    ]


@pytest.mark.long
@pytest.mark.parametrize("how", ["raise", "drop the iterator", "keep the iterator", "never begin"])
async def test_leaving_the_sync_engine_early_ends_rollouts_and_thread(
    model: ModelServer, tmp_path: Path, how: str
) -> None:
    kept: list[Any] = []
    tasks = [row(n, **({} if n == 0 else {"run": "hang-in-policy"})) for n in range(9)]

    def block() -> None:
        with build_sync_engine(model.url, tmp_path, concurrency=4) as engine:
            groups = engine.groups(tasks)
            kept.append(groups)
            if how == "never begin":
                return
            assert next(groups).task.id == "t0"
            if how == "raise":
                raise ZeroDivisionError
            if how == "drop the iterator":
                kept.clear()
                del groups

    def work() -> None:
        threads = Threads()
        with pytest.raises(ZeroDivisionError) if how == "raise" else nullcontext():
            block()
        assert threads.new == set()
        kept.clear()  # closing an iterator of a closed engine has no effect

    await asyncio.to_thread(work)
    await wait_until(wait_until_idle(model))


def wait_until_idle(model: ModelServer) -> Any:
    async def check() -> bool:
        return model.in_flight == 0

    return check


async def test_sync_engine_that_cannot_start_leaves_no_thread(tmp_path: Path) -> None:
    def work() -> None:
        threads = Threads()
        with pytest.raises(RookeryError), build_sync_engine("http://127.0.0.1:1", tmp_path):
            raise AssertionError("never open")
        assert threads.new == set()

    await asyncio.to_thread(work)


# ---- an engine in another process

CLIENT = """
import asyncio, json, sys
from rookery import Engine

def say(**what): print(json.dumps(what), flush=True)
def read_command(): return sys.stdin.readline().strip()

async def main():
    async with await Engine.connect(sys.argv[1]) as engine:
        say(run=engine.run)
        while command := await asyncio.to_thread(read_command):
            what = json.loads(command)
            try:
                match what.pop("do"):
                    case "groups":
                        groups = [group async for group in engine.groups(**what)]
                        say(groups=[[g.task.id, g.rewards, [r.seed for r in g.rollouts],
                                     [s.trained for r in g.rollouts for s in r.segments]] for g in groups])
                    case "open":
                        stream = engine.groups(**what)
                        asyncio.ensure_future(anext(stream))
                        say(opened=True)
                    case "pause":
                        pause = engine.paused()
                        await pause.__aenter__()
                        say(paused=(await engine.status())["paused"])
                    case "resume":
                        await pause.__aexit__(None, None, None)
                        say(paused=(await engine.status())["paused"])
                    case "state":
                        state = await engine.state_dict()
                        say(state=[state["rookery"], state["seed"], len(state["streams"])])
            except Exception as error:
                say(error=str(error), kind=type(error).__name__)

asyncio.run(main())
"""


class Client:
    """A client process that executes one command per line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            line = await self.process.stdout.readline()
        assert line, "the client ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def do(self, what: str, **options: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **options}).encode() + b"\n")
        return await self.receive()


@asynccontextmanager
async def client(url: str | Path) -> AsyncIterator[Client]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CLIENT,
        str(url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    try:
        yield Client(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(60):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@pytest.mark.long
async def test_client_process_gets_groups_and_state_and_can_pause(model: ModelServer, tmp_path: Path) -> None:
    tasks = [row(n, **({"score": {"0": "half"}} if n % 2 else {})) for n in range(8)]
    here = await run_groups(model, tmp_path, tasks, k=2)
    async with build_engine(model, tmp_path, listen="tcp://127.0.0.1:0", seed=0) as engine:
        assert engine.folder is not None
        assert (engine.folder / SOCKET).stat().st_mode & 0o077 == 0
        assert (engine.folder / KEY).stat().st_mode & 0o077 == 0
        assert (engine.folder / KEY).read_text() in engine.control_url
        async with client(engine.folder) as near, client(engine.control_url) as remote:
            for each, name in ((near, "main"), (remote, "remote-program")):
                assert (await each.receive())["run"] == str(engine.folder)
                got = await each.do("groups", tasks=tasks, k=2, name=name)
                assert sorted(got["groups"])[1][1:2] == [[0.5, 1.0]]
                assert all(trained == [2, 2] for *_, trained in got["groups"])
                if name == "main":
                    assert {task: drawn for task, _, drawn, _ in got["groups"]} == seeds(here)
                kept = await each.do("groups", tasks=tasks, k=2, name=f"{name} 2", want=3, keep="informative")
                assert sorted(task for task, *_ in kept["groups"]) == ["t1", "t3", "t5"]
                assert await each.do("pause") == {"paused": True}
                assert (await engine.status())["paused"]
                assert await each.do("resume") == {"paused": False}
                assert (await each.do("state"))["state"][:2] == [1, 0]
                wrong = await each.do("groups", tasks=tasks, keep="shiny")
                assert wrong["kind"] == "UsageError"
                assert "'shiny'" in wrong["error"]
                assert (await each.do("groups", nonsense=1))["kind"] == "RookeryError"


@pytest.mark.long
async def test_killed_client_ends_its_streams_and_its_pause(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, concurrency=3) as engine:
        assert engine.folder is not None
        async with client(engine.folder) as gone:
            await gone.receive()
            await gone.do("open", tasks=[row(n, run="hang-in-policy") for n in range(9)])
            await model.wait_for_requests(3)
            gone.process.send_signal(signal.SIGKILL)
            await gone.process.wait()
        await model.wait_for_disconnects(3)

        async def empty() -> bool:
            return (await engine.status())["in_flight"] == 0

        await wait_until(empty)
        async with client(engine.folder) as gone:
            await gone.receive()
            assert await gone.do("pause") == {"paused": True}
            stream = engine.groups([row(20)])
            gone.process.send_signal(signal.SIGKILL)
            await gone.process.wait()
        async with asyncio.timeout(60):
            groups = [group async for group in stream]
        assert [label(group.rollouts[0].outcome) for group in groups] == ["completed"]
        assert not (await engine.status())["paused"]


async def test_tcp_client_must_send_the_key_first(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, listen="tcp://127.0.0.1:0") as engine:
        url = engine.control_url
        address = url.rpartition("@")[2]
        for wrong in (f"tcp://{address}", f"tcp://wrong@{address}"):
            with pytest.raises(UsageError, match=r"control\.key"):
                await Engine.connect(wrong)
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((HELLO_BYTES + 1).to_bytes(4, "little"))
        async with asyncio.timeout(60):
            assert await reader.read() == b"", "a large frame of an unauthenticated client is refused at once"
        writer.close()
        async with await Engine.connect(url) as remote:
            assert (await remote.status())["paused"] is False
    with pytest.raises(UsageError, match=f"tcp://{address}") as caught:
        await Engine.connect(url)
    assert url not in str(caught.value)


async def test_connecting_to_something_else_fails_within_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "CONNECT_SECONDS", 0.2)
    for url in (str(tmp_path), f"unix:{tmp_path / 'no' / SOCKET}", "tcp://127.0.0.1:none", "tcp://"):
        with pytest.raises(UsageError, match=re.escape(url)):
            await Engine.connect(url)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(UsageError, match=r"\b0\.2\b"):
            await Engine.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}")


async def test_calls_of_clients_fail_when_the_engine_ends(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        assert engine.folder is not None
        remote = await Engine.connect(engine.folder)
        stream = remote.groups([row(0, run="hang-in-policy")])
        waiting = asyncio.ensure_future(anext(stream))
        await model.wait_for_requests(1)
    for call in (waiting, remote.status()):
        with pytest.raises(RookeryError) as caught:
            await call
        assert type(caught.value) is RookeryError
    await remote.close()


async def test_pauses_of_one_client_nest(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        assert engine.folder is not None
        async with await Engine.connect(engine.folder) as remote:
            async with remote.paused():
                async with remote.paused():
                    pass
                assert (await remote.status())["paused"]
            assert not (await remote.status())["paused"]
            with pytest.raises(UsageError, match="function"):
                await anext(remote.groups([row(0)], keep=lambda group: True))


async def test_tasks_can_be_texts_rows_or_task_objects(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        groups = [group async for group in engine.groups(["one", {"prompt": "two"}, Task(id="three")])]
    assert sorted(group.task.text for group in groups) == ["", "one", "two"]


@pytest.mark.long
@pytest.mark.parametrize(
    "start",
    ["asyncio.run(main())", "with SyncEngine(play, policy=URL, out=OUT, runners=1) as e: print(list(e.groups()))"],
    ids=["async", "sync"],
)
async def test_script_without_main_guard_is_refused_and_starts_no_nested_runners(
    model: ModelServer, tmp_path: Path, start: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import asyncio
from rookery import Engine, SyncEngine, environment

URL, OUT = {model.url!r}, {str(tmp_path / "runs")!r}

@environment(tasks=["a"])
async def play(ctx):
    return 1.0

async def main():
    async with Engine(play, policy=URL, out=OUT, runners=1) as engine:
        print([group.rewards async for group in engine.groups()])

{start}
"""
    )
    run = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(run.communicate(), 60)
    assert run.returncode == 1
    assert b'if __name__ == "__main__"' in errors
    assert len(list((tmp_path / "runs").glob("2*"))) == 1
    guarded = script.read_text().replace(start, f'if __name__ == "__main__":\n    {start}')
    script.write_text(guarded)
    run = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(run.communicate(), 60)
    assert run.returncode == 0, output
    assert b"1.0" in output


def test_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"concurency\b.*breaker, .*cluster, concurrency, .*'concurrency'"):
        Engine(ENV, policy="embedded", concurency=3)
    with pytest.raises(UsageError, match="environment"):
        Engine(ENV, policy="embedded", environment="other")


def test_struct_options_are_accepted_as_dictionaries() -> None:
    engine = Engine(
        ENV,
        policy="embedded",
        sandbox={"provider": "subprocess", "memory": 1 << 30},
        limits={"run": 8, "turns": 3},
        sampling={"temperature": 0.5},
        retry={"attempts": 2},
    )
    assert engine.sandbox.memory == 1 << 30
    assert engine.config.limits.run == 8
    assert engine.config.limits.turns == 3
    assert engine.config.sampling.temperature == 0.5
    assert engine.config.retry.attempts == 2


@pytest.mark.parametrize(
    "option",
    [
        {"sandbox": {"memry": 1}},
        {"limits": {"scor": 1}},
        {"limits": {"run": "long"}},
        {"limits": 8},
        {"sampling": {"temprature": 1}},
        {"retry": 3},
    ],
)
def test_wrong_fields_of_struct_options_are_refused_at_construction(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Engine(ENV, policy="embedded", **option)


@pytest.mark.parametrize(
    "option",
    [
        {"record": "token"},
        {"log_format": "xml"},
        {"runners": "2"},
        {"concurrency": 1.5},
        {"breaker": "0.5"},
        {"top_logprobs": "5"},
        {"wait_for_upstream": "60"},
        {"block_limit": "30"},
        {"seed": "x"},
        {"sampling": Sampling(temperature="hot")},  # type: ignore[arg-type]
        {"sandbox": SandboxSpec(network="modle")},  # type: ignore[arg-type]
        {"sandbox": SandboxSpec(env={"A": 1})},  # type: ignore[dict-item]
        {"roles": {"judge": "embedded"}},
        {"prices": {"m": 3}},
        {"cache": Path("cache")},
        {"rendering": {"tokenizer": Path("tokenizer")}},
    ],
    ids=str,
)
def test_values_of_the_wrong_type_are_refused_at_construction(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="judge|" + next(iter(option))):
        Engine(ENV, policy="embedded", **option)


@pytest.mark.parametrize("name", ["memory", "cpus", "pids", "disk", "wall", "cpu_seconds", "output"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), "1g"])
def test_limits_of_a_sandbox_must_be_numbers_above_zero(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SandboxSpec(**{name: value})  # type: ignore[arg-type]


def test_arguments_beside_a_configuration_are_refused() -> None:
    with pytest.raises(UsageError, match="`config`"):
        Engine(ENV, config=EngineConfig(environment=ENV), runners=3)
