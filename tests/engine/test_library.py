"""The library's other doors: the synchronous twin, and an engine in another process."""

import asyncio
import json
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine, SyncEngine
from rookery.core import Group, RookeryError, Task, UsageError, label
from rookery.engine import EngineConfig, remote_engine
from rookery.engine.control_server import HELLO_BYTES, KEY, SOCKET
from tests.engine.conftest import ENV, QUICK, engine, gather
from tests.servers import ModelServer


def row(n: int, **data: Any) -> dict[str, Any]:
    return {"id": f"t{n}", "prompt": f"q{n}", "data": data}


def seeds(groups: list[Group]) -> dict[str, list[int]]:
    assert len({group.task.id for group in groups}) == len(groups), "a group was handed out twice"
    return {group.task.id: [rollout.seed for rollout in group.rollouts] for group in groups}


async def until(condition: Any) -> None:
    """Bounded: something another process or the engine does in its own time."""
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.005)


# ---- the synchronous twin


def sync(url: str, tmp_path: Path, **options: Any) -> SyncEngine:
    return SyncEngine(ENV, policy=url, out=tmp_path / "sync", runners=0, retry=QUICK, **options)


class Threads:
    """Which threads are there that were not there before."""

    def __init__(self) -> None:
        self.before = set(threading.enumerate())

    @property
    def new(self) -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread not in self.before}


async def test_the_synchronous_twin_gives_the_same_and_leaves_no_thread(
    model: ModelServer, tmp_path: Path
) -> None:
    tasks = [row(n, score={"0": "half"}) for n in range(6)]
    expected = await gather(model, tmp_path, tasks, k=2)

    def work() -> list[Group]:
        threads = Threads()
        with sync(model.url, tmp_path) as made:
            groups = list(made.groups(tasks, k=2))
            assert "rookery-engine" in threads.new
            with made.paused():
                assert made.status()["paused"]
            assert not made.status()["paused"]
            assert made.folder is not None
        assert threads.new == set()
        with pytest.raises(UsageError, match="not open"):
            made.groups(tasks)
        return groups

    groups = sorted(await asyncio.to_thread(work), key=lambda group: group.index)
    assert seeds(groups) == seeds(expected)
    assert [group.rewards for group in groups] == [group.rewards for group in expected]
    assert [rollout.segments for group in groups for rollout in group.rollouts] == [
        rollout.segments for group in expected for rollout in group.rollouts
    ]


@pytest.mark.parametrize("how", ["raise", "drop the iterator", "keep the iterator", "never begin"])
async def test_leaving_the_block_early_ends_everything_and_the_thread(
    model: ModelServer, tmp_path: Path, how: str
) -> None:
    kept: list[Any] = []
    tasks = [row(n, **({} if n == 0 else {"run": "hang-in-policy"})) for n in range(9)]

    def block() -> None:
        with sync(model.url, tmp_path, concurrency=4) as made:
            groups = made.groups(tasks)
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
        kept.clear()  # closing an iterator of a closed engine is nothing

    await asyncio.to_thread(work)
    await until(idle(model))


def idle(model: ModelServer) -> Any:
    async def check() -> bool:
        return model.in_flight == 0

    return check


async def test_a_synchronous_engine_that_cannot_start_leaves_no_thread(tmp_path: Path) -> None:
    def work() -> None:
        threads = Threads()
        with pytest.raises(RookeryError), sync("http://127.0.0.1:1", tmp_path):
            raise AssertionError("never open")
        assert threads.new == set()

    await asyncio.to_thread(work)


# ---- an engine in another process

CLIENT = """
import asyncio, json, sys
from rookery import Engine

def say(**what): print(json.dumps(what), flush=True)
def told(): return sys.stdin.readline().strip()

async def main():
    async with await Engine.connect(sys.argv[1]) as engine:
        say(run=engine.run)
        while command := await asyncio.to_thread(told):
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
    """Another process, told line by line what to do."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            line = await self.process.stdout.readline()
        assert line, "the client ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def do(self, what: str, **options: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **options}).encode() + b"\n")
        return await self.heard()


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


async def test_another_process_gets_groups_pauses_and_state(model: ModelServer, tmp_path: Path) -> None:
    tasks = [row(n, **({"score": {"0": "half"}} if n % 2 else {})) for n in range(8)]
    here = await gather(model, tmp_path, tasks, k=2)
    async with engine(model, tmp_path, listen="tcp://127.0.0.1:0", seed=0) as made:
        assert made.folder is not None
        assert made._control is not None
        assert (made.folder / SOCKET).stat().st_mode & 0o077 == 0
        assert (made.folder / KEY).stat().st_mode & 0o077 == 0
        assert (made.folder / KEY).read_text() in made._control.url
        async with client(made.folder) as near, client(made._control.url) as far:
            for each, name in ((near, "main"), (far, "far")):
                assert (await each.heard())["run"] == str(made.folder)
                got = await each.do("groups", tasks=tasks, k=2, name=name)
                assert sorted(got["groups"])[1][1:2] == [[0.5, 1.0]]
                assert all(trained == [2, 2] for *_, trained in got["groups"])
                if name == "main":
                    assert {task: drawn for task, _, drawn, _ in got["groups"]} == seeds(here)
                kept = await each.do("groups", tasks=tasks, k=2, name=f"{name} 2", want=3, keep="informative")
                assert sorted(task for task, *_ in kept["groups"]) == ["t1", "t3", "t5"]
                assert await each.do("pause") == {"paused": True}
                assert (await made.status())["paused"]
                assert await each.do("resume") == {"paused": False}
                assert (await each.do("state"))["state"][:2] == [1, 0]
                wrong = await each.do("groups", tasks=tasks, keep="shiny")
                assert wrong["kind"] == "UsageError"
                assert "unknown filter" in wrong["error"]
                assert (await each.do("groups", nonsense=1))["kind"] == "RookeryError"


async def test_a_client_that_is_killed_takes_its_streams_and_its_pause_with_it(
    model: ModelServer, tmp_path: Path
) -> None:
    async with engine(model, tmp_path, concurrency=3) as made:
        assert made.folder is not None
        async with client(made.folder) as gone:
            await gone.heard()
            await gone.do("open", tasks=[row(n, run="hang-in-policy") for n in range(9)])
            await model.wait_for_requests(3)
            gone.process.send_signal(signal.SIGKILL)
            await gone.process.wait()
        await model.wait_for_disconnects(3)

        async def empty() -> bool:
            return (await made.status())["in_flight"] == 0

        await until(empty)
        async with client(made.folder) as gone:
            await gone.heard()
            assert await gone.do("pause") == {"paused": True}
            stream = made.groups([row(20)])
            gone.process.send_signal(signal.SIGKILL)
            await gone.process.wait()
        async with asyncio.timeout(20):
            groups = [group async for group in stream]
        assert [label(group.rollouts[0].outcome) for group in groups] == ["completed"]
        assert not (await made.status())["paused"]


async def test_over_tcp_nothing_is_answered_before_the_key_was_shown(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path, listen="tcp://127.0.0.1:0") as made:
        assert made._control is not None
        url = made._control.url
        address = url.rpartition("@")[2]
        for wrong in (f"tcp://{address}", f"tcp://wrong@{address}"):
            with pytest.raises(UsageError, match="key is wrong or missing"):
                await Engine.connect(wrong)
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((HELLO_BYTES + 1).to_bytes(4, "little"))
        async with asyncio.timeout(60):
            assert await reader.read() == b"", "a large frame of a stranger is not waited for"
        writer.close()
        async with await Engine.connect(url) as far:
            assert (await far.status())["paused"] is False
    with pytest.raises(UsageError, match=f"no engine answers at tcp://{address}") as caught:
        await Engine.connect(url)
    assert url not in str(caught.value)


async def test_what_is_no_engine_is_said_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "CONNECT_SECONDS", 0.2)
    for url in (str(tmp_path), f"unix:{tmp_path / 'no' / SOCKET}", "tcp://127.0.0.1:none", "tcp://"):
        with pytest.raises(UsageError, match="no engine answers"):
            await Engine.connect(url)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(UsageError, match=r"within 0\.2 seconds"):
            await Engine.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}")


async def test_an_engine_that_goes_away_ends_its_clients_calls_in_words(
    model: ModelServer, tmp_path: Path
) -> None:
    async with engine(model, tmp_path) as made:
        assert made.folder is not None
        far = await Engine.connect(made.folder)
        stream = far.groups([row(0, run="hang-in-policy")])
        waiting = asyncio.ensure_future(anext(stream))
        await model.wait_for_requests(1)
    with pytest.raises(RookeryError, match="closed the connection"):
        await waiting
    with pytest.raises(RookeryError, match="closed the connection"):
        await far.status()
    await far.close()


async def test_pauses_of_one_client_nest(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path) as made:
        assert made.folder is not None
        async with await Engine.connect(made.folder) as far:
            async with far.paused():
                async with far.paused():
                    pass
                assert (await far.status())["paused"]
            assert not (await far.status())["paused"]
            with pytest.raises(UsageError, match="plain data"):
                await anext(far.groups([row(0)], keep=lambda group: True))


async def test_tasks_may_be_texts_rows_or_tasks(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path) as made:
        groups = [group async for group in made.groups(["one", {"prompt": "two"}, Task(id="three")])]
    assert sorted(group.task.text for group in groups) == ["", "one", "two"]


@pytest.mark.long
@pytest.mark.parametrize(
    "start",
    ["asyncio.run(main())", "with SyncEngine(play, policy=URL, out=OUT, runners=1) as e: print(list(e.groups()))"],
    ids=["async", "sync"],
)
async def test_a_script_without_a_guard_is_told_so_and_starts_no_runners_of_runners(
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
    said, _ = await asyncio.wait_for(run.communicate(), 60)
    assert run.returncode == 0, said
    assert b"1.0" in said


def test_an_unknown_option_is_named_with_the_known_ones_and_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"concurency .*breaker, concurrency, .*did you mean 'concurrency'\?"):
        Engine(ENV, policy="embedded", concurency=3)
    with pytest.raises(UsageError, match="environment"):
        Engine(ENV, policy="embedded", environment="other")


def test_options_with_fields_are_accepted_as_dictionaries() -> None:
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
def test_wrong_fields_of_options_are_refused_at_construction(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Engine(ENV, policy="embedded", **option)


def test_settings_beside_a_configuration_are_refused() -> None:
    with pytest.raises(UsageError, match="not from both"):
        Engine(ENV, config=EngineConfig(environment=ENV), runners=3)
