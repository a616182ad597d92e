"""The complete examples of the plug-in guides, installed as packages and used by the real command."""

import asyncio
import json
import re
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from tests.cli.helpers import SECONDS, rookery, start_command
from tests.docs.test_docs import ROOT, blocks

GUIDES = ROOT / "docs" / "guides"
MAX_LINES = 150
KEY = "an-admin-key"


def install(site: Path, guide: str, index: int = 0, entry_point: tuple[str, str, str] | None = None) -> str:
    """Install an example of a guide as a package with the entry point that the guide prints; return PYTHONPATH."""
    page = GUIDES / guide
    if entry_point is None:
        (toml,) = blocks(page, "toml")
        match = re.fullmatch(r'\[project\.entry-points\."([\w.]+)"\]\n([\w-]+) = "(\w+:\w+)"\n', toml)
        assert match, toml
        entry_point = (match[1], match[2], match[3])
    group, name, target = entry_point
    module = target.partition(":")[0]
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    (site / f"{module}.py").write_text(blocks(page, "python")[index])
    return str(site)


@pytest.mark.parametrize("guide", ["write-an-upstream.md", "write-a-dialect.md", "write-a-task-format.md"])
def test_examples_are_short(guide: str) -> None:
    assert all(len(block.splitlines()) < MAX_LINES for block in blocks(GUIDES / guide, "python"))


def test_a_guide_shows_the_entry_point_of_every_kind_of_plugin() -> None:
    sample = ROOT / "tests" / "plugins" / "sample_plugin" / "pyproject.toml"
    groups = tomllib.loads(sample.read_text())["project"]["entry-points"]
    shown = {
        group
        for page in GUIDES.glob("*.md")
        for block in blocks(page, "toml")
        for group in tomllib.loads(block).get("project", {}).get("entry-points", {})
    }
    assert groups.keys() - shown == set()


def test_the_architecture_page_lists_every_entry_point_group() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    listed = re.findall(r"\| `(rookery\.\w+)` \|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {*listed} == {*groups, "rookery.launchers"}  # the built-in launchers are files


class OllamaServer:
    """Serves the part of Ollama's API that the example uses, with tool calls."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if body["messages"][-1]["role"] == "tool":
            message = {"role": "assistant", "content": f"The sum is {body['messages'][-1]['content']}"}
        else:
            call = {"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        reply = {"model": body["model"], "message": message, "done": True, "done_reason": "stop"}
        return web.json_response({**reply, "prompt_eval_count": 11, "eval_count": 5})

    async def tags(self, request: web.Request) -> web.Response:
        return web.Response(body=b'{"models":[{"name":"llama3.2:latest"}]}', content_type="application/json")

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/api/chat", self.chat)
        app.router.add_get("/api/tags", self.tags)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


SUMS = '''
from rookery import Context, ToolEnvironment, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Sums(ToolEnvironment):
    toolset = [add]

    def tasks(self):
        return [{"prompt": "What is 3 + 4?"}]

    async def score(self, ctx: Context) -> float:
        return float(self.answer(ctx) == "The sum is 7")
'''


@pytest.mark.long
async def test_the_upstream_example_runs_tool_calls_against_an_ollama_server(tmp_path: Path) -> None:
    path = install(tmp_path / "site", "write-an-upstream.md")
    (tmp_path / "sums.py").write_text(SUMS)
    server = OllamaServer()
    async with server.serve() as url:
        done = await rookery(
            *("run", "sums.py", "--policy", url, "--model", "llama3.2", "--json"),
            *("--record", "plain", "--runners", "1", "--temperature", "0.5"),
            cwd=tmp_path,
            PYTHONPATH=path,
        )
    assert done.code == 0, (done.out, done.err)
    assert done.events[-1]["reward"]["mean"] == 1.0
    first, second = server.requests
    assert (first["model"], first["stream"], first["options"]["temperature"]) == ("llama3.2", False, 0.5)
    assert first["tools"][0]["function"]["name"] == "add"
    call = {"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    assert second["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]


async def test_the_upstream_example_rejects_an_incomplete_reply(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "rookery_ollama"}
    exec(blocks(GUIDES / "write-an-upstream.md", "python")[0], namespace)
    from rookery.upstreams.http_upstream import ReplyContext, ReplyFormatError

    for data in (b"{", b"[]", b'{"message": {"content": "7"}, "done": false, "done_reason": null}'):
        with pytest.raises(ReplyFormatError):
            namespace["CHAT"].decode(data, None, ReplyContext())


@pytest.mark.long
async def test_the_upstream_example_without_http_runs(tmp_path: Path) -> None:
    path = install(
        tmp_path / "site", "write-an-upstream.md", 1, ("rookery.upstreams", "echo", "rookery_echo:EchoUpstream")
    )
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Paris", "answer": "Paris"}\n')
    done = await rookery(
        *("run", "tools", "--tasks", "tasks.jsonl", "--policy", "echo:", "--record", "plain"),
        *("--runners", "1", "--json"),
        cwd=tmp_path,
        PYTHONPATH=path,
    )
    assert done.code == 0, (done.out, done.err)
    assert done.events[-1]["reward"]["mean"] == 1.0


@pytest.mark.long
async def test_the_dialect_example_serves_and_records_turns(tmp_path: Path) -> None:
    path = install(tmp_path / "site", "write-a-dialect.md")
    async with start_command(
        *("gateway", "--upstream", "embedded:", "--kind", "embedded", "--port", "0", "--record", "tokens"),
        cwd=tmp_path,
        PYTHONPATH=path,
        ROOKERY_GATEWAY_KEY=KEY,
    ) as process:
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            line = await process.stdout.readline()
        match = re.search(rb"http://127\.0\.0\.1:\d+", line)
        assert match, line
        async with ClientSession(match[0].decode()) as http:
            await use_cohere_client(http)


async def use_cohere_client(http: ClientSession) -> None:
    """Register a session, make calls as a client of Cohere's API does, and read the trajectory."""
    admin = {"Authorization": f"Bearer {KEY}"}
    async with http.post("/rollouts", json={"id": "a.1", "model": "embedded"}, headers=admin) as response:
        secret = (await response.json())["secret"]
    url, client = "/v1/rollouts/a.1/v2/chat", {"Authorization": f"Bearer {secret}"}
    question = {"role": "user", "content": "What is 3 + 4?"}
    body = {"model": "embedded", "messages": [question], "max_tokens": 12, "temperature": 0}
    async with http.post(url, json=body, headers=client) as response:
        assert response.status == 200, await response.text()
        reply = await response.json()
    assert reply["finish_reason"] in ("COMPLETE", "MAX_TOKENS")
    assert 0 < reply["usage"]["tokens"]["output_tokens"] <= 12
    answer = {"role": "assistant", "content": reply["message"]["content"]}
    body |= {"messages": [question, answer, {"role": "user", "content": "And 4 + 4?"}], "stream": True}
    async with http.post(url, json=body, headers=client) as response:
        text = await response.text()
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert events[0]["type"] == "message-start"
    assert events[-1]["type"] == "message-end"
    streamed = "".join(e["delta"]["message"]["content"]["text"] for e in events if e["type"] == "content-delta")
    async with http.post(url, json={**body, "tools": [{}]}, headers=client) as response:
        assert (response.status, "tools" in (await response.json())["message"]) == (400, True)
    async with http.post(url, json=body, headers={"Authorization": "Bearer wrong"}) as response:
        assert response.status == 401
        assert "message" in await response.json()
    async with http.get("/rollouts/a.1/trajectory", headers=admin) as response:
        trajectory = await response.json()
    assert len(trajectory["turns"]) == 2
    assert trajectory["fidelity"]["extended"] == 1  # the second turn continues the first, token for token
    assert len(trajectory["segments"]) == 1
    assert streamed in json.dumps(trajectory, ensure_ascii=False)


async def test_the_task_format_example_reads_and_converts_tasks(tmp_path: Path) -> None:
    path = install(tmp_path / "site", "write-a-task-format.md")
    task = tmp_path / "tasks" / "one"
    (task / "src").mkdir(parents=True)
    (task / "src" / "answer.txt").write_text("6\n")
    (task / "README.txt").write_text("Write 7 into answer.txt.\n")
    (task / "check.sh").write_text("grep -q 7 /workspace/answer.txt\n")
    (tmp_path / "tasks" / "two").mkdir()
    (tmp_path / "tasks" / "two" / "README.txt").write_text("")
    (tmp_path / "tasks" / "two" / "check.sh").write_text("true\n")
    listed = await rookery("tasks", "list", "tasks", "--json", cwd=tmp_path, PYTHONPATH=path)
    one, two = listed.events
    assert (one["format"], one["broken"]) == ("readme", False)
    assert (two["broken"], two["problems"][0]["field"]) == (True, "README.txt")
    done = await rookery("tasks", "convert", "tasks/one", "copy", "--to", "readme", cwd=tmp_path, PYTHONPATH=path)
    assert done.code == 0, done.err
    assert (tmp_path / "copy" / "one" / "src" / "answer.txt").read_text() == "6\n"
