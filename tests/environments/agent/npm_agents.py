"""Claude Code and Codex, unmodified, from npm: `make test-agents`. Not part of `make test`.

Their traffic to the gateway is recorded. `make test-agents RECORD=1` saves it, without the agents' own prose, as
fixtures of the ordinary tests in `tests/gateway/dialects/recorded`.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rookery.core import Rollout, Turn, label
from rookery.environments.agent import AgentEnvironment, Launcher, find_launcher
from rookery.gateway.gateway_session import SANDBOX_KEY
from rookery.journal import RunReader
from tests.cli.sandbox_kit import local_sandboxes
from tests.environments.agent.helpers import (
    Step,
    agents_directory,
    assert_trainable,
    get_agents_dir,
    require_agent,
    run_rollouts,
    scripted_engine,
    scripted_model,
)
from tests.environments.agent.recording import Recording, record_traffic
from tests.environments.agent.task_directories import StepDirectory, harbor_task, model_that_calls, stdio_server
from tests.gateway.dialects.recordings import (
    ABOUT,
    ANSWER,
    DONE,
    MORE,
    PART,
    PART_DONE,
    QUESTION,
    SUMMARY,
    THOUGHTS,
    TITLE,
)
from tests.servers import Answer, ModelServer, Request

__all__ = ["local_sandboxes"]
pytestmark = [pytest.mark.usefixtures("local_sandboxes"), pytest.mark.timeout(600)]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "claude-code": ("Bash", {"command": ANSWER, "description": ABOUT}),
    "codex": ("exec_command", {"cmd": ANSWER}),
}
NO_OP_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "claude-code": ("Bash", {"command": "true", "description": ABOUT}),
    "codex": ("exec_command", {"cmd": "true"}),
}
NO_EXTRA_TRAFFIC = "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"
"""Variable set by the launcher. Without it, Claude Code makes calls besides its turns."""
ReplyFunction = Callable[[Request], Answer]


@dataclass
class TokenisingModel:
    """A scripted model with reasoning. Each message has three token IDs derived from its content.

    A history that differs from what was sampled therefore has different token IDs.
    """

    reply: ReplyFunction
    long_text: str = "\0"
    """A reply that contains this text has a hundred more tokens."""
    sampled: Counter[int] = field(default_factory=Counter)
    _numbers: Any = field(default_factory=itertools.count)

    def __call__(self, request: Request) -> Answer:
        answer, number = self.reply(request), next(self._numbers)
        body = answer.completion(chat=True)
        (choice,) = body["choices"]
        sampled_message = choice["message"]
        for index, call in enumerate(sampled_message.get("tool_calls", ())):
            call["id"] = f"call_{number}_{index}"
        tools: list[dict[str, Any]] = [{"role": "tools", "content": request.body.get("tools")}]
        prompt = [token for message in tools + request.body["messages"] for token in self._ids(message)]
        sampled = self._ids(sampled_message)
        self.sampled.update(sampled)
        choice |= {"token_ids": sampled, "logprobs": {"content": [{"token": "t", "logprob": -1.0}] * len(sampled)}}
        sampled_message["reasoning_content"] = THOUGHTS[number]
        body |= {
            "prompt_token_ids": prompt,
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)},
        }
        return Answer(body=body)

    def _ids(self, message: dict[str, Any]) -> list[int]:
        calls = [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        text = json.dumps([message["role"], message.get("content") or "", calls, message.get("tool_call_id")])
        count = 103 if self.long_text in text and message["role"] == "assistant" else 3
        return [
            int.from_bytes(blake2b(f"{index}{text}".encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF
            for index in range(count)
        ]


@dataclass
class AgentRun:
    """A rollout, its turns and its traffic."""

    rollout: Rollout
    turns: list[Turn]
    traffic: Recording

    @property
    def parents(self) -> list[int | None]:
        return [turn.parent for turn in self.turns]


@asynccontextmanager
async def run_agent(
    name: str, model: TokenisingModel, folder: Path, launcher: Launcher | None = None, args: Sequence[str] = ()
) -> AsyncIterator[AgentRun]:
    """Run an agent and check that it succeeds and that every sampled token is trained once."""
    require_agent(name)
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment(launcher or name, args=args)
        async with (
            ModelServer(model) as server,
            record_traffic() as traffic,
            scripted_engine(server, env, folder) as engine,
        ):
            (rollout,) = await run_rollouts(engine, [{"prompt": QUESTION, "answer": 42}])
    assert label(rollout.outcome) == "completed", (rollout.outcome, rollout.info)
    assert rollout.reward == 1.0, rollout.info
    assert rollout.usage.sampled_tokens == model.sampled.total()
    trained: Counter[int] = Counter()
    for segment in rollout.segments:
        ids = memoryview(segment.tokens).cast("i").tolist()
        trained.update(itertools.compress(ids, segment.mask))
    assert trained == model.sampled
    with RunReader(folder / "runs" / "latest") as reader:
        turns = reader.turns(rollout)
    assert sorted(index for segment in rollout.segments for index in segment.turns) == [
        turn.index for turn in turns
    ]
    yield AgentRun(rollout, turns, traffic)


def contains_user_text(request: Request, text: str) -> bool:
    """Return whether a user message of the request contains the text."""
    return text in json.dumps([one["content"] for one in request.body["messages"] if one["role"] == "user"])


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_agent_streams_two_turns_with_a_tool_call(name: str, tmp_path: Path) -> None:
    async with run_agent(name, TokenisingModel(scripted_model(CALLS[name], DONE)), tmp_path) as run:
        assert run.parents == [None, 0]
        assert all(exchange.json["stream"] for exchange in run.traffic.posts)
        assert DONE in run.rollout.info["agents"][0]["stdout"]
        run.traffic.save(name, "tool")


async def test_sub_agent_of_claude_code_is_recorded_as_a_tree(
    tmp_path: Path,
) -> None:
    sub_task = {"description": ABOUT, "prompt": PART, "subagent_type": "general-purpose"}
    main_replies = scripted_model(("Agent", {**sub_task, "run_in_background": False}), CALLS["claude-code"], DONE)
    sub_replies = scripted_model(NO_OP_CALLS["claude-code"], PART_DONE)
    model = TokenisingModel(
        lambda request: (sub_replies if contains_user_text(request, PART) else main_replies)(request)
    )
    async with run_agent("claude-code", model, tmp_path) as run:
        assert run.parents == [None, None, 1, 0, 3]
        assert sorted(segment.trained for segment in run.rollout.segments) == [6, 9]
        run.traffic.save("claude-code", "sub_agent")


async def test_sub_agent_of_codex_is_recorded_as_a_tree(tmp_path: Path) -> None:
    spawn = ("multi_agent_v1__spawn_agent", {"message": PART})
    wait: Step = ("multi_agent_v1__wait_agent", {})
    main_replies = scripted_model(spawn, wait, CALLS["codex"], DONE)
    sub_replies = scripted_model(NO_OP_CALLS["codex"], PART_DONE)

    def reply(request: Request) -> Answer:
        if contains_user_text(request, PART):
            return sub_replies(request)
        answer = main_replies(request)
        if answer.calls and answer.calls[0][0] == wait[0]:
            (agent,) = re.findall(
                r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", request.body["messages"][-1]["content"]
            )
            answer.calls = ((wait[0], json.dumps({"targets": [agent], "timeout_ms": 60_000})),)
        return answer

    async with run_agent("codex", TokenisingModel(reply), tmp_path) as run:
        # The sub-agent's turns may come between any of the others.
        assert Counter(run.parents)[None] == 2
        assert sorted(segment.trained for segment in run.rollout.segments) == [6, 12]
        run.traffic.save("codex", "sub_agent")


async def test_compaction_of_claude_code_is_a_branch_followed_by_a_new_root(tmp_path: Path) -> None:
    launcher = find_launcher("claude-code")
    command = " ".join(launcher.command)
    script = f"{command} && echo /compact | {command} --continue && echo '{MORE}' | {command} --continue"
    first_replies = scripted_model(CALLS["claude-code"], DONE)

    def reply(request: Request) -> Answer:
        if contains_user_text(request, MORE):
            return Answer(DONE)
        return (
            Answer(f"<summary>\n{SUMMARY}\n</summary>")
            if contains_user_text(request, "<summary>")
            else first_replies(request)
        )

    modified = replace(launcher, command=("bash", "-c", script))
    async with run_agent("claude-code", TokenisingModel(reply), tmp_path, modified) as run:
        assert SUMMARY in json.dumps(run.traffic.posts[-1].json["messages"][0])
        # The last reply before the compaction is not part of the summarised history.
        assert run.parents == [None, 0, 0, None]
        assert sorted(segment.trained for segment in run.rollout.segments) == [3, 3, 6]
        run.traffic.save("claude-code", "compaction")


async def test_compaction_of_codex_and_the_following_turns_are_new_roots(tmp_path: Path) -> None:
    first_replies, after = scripted_model(CALLS["codex"]), scripted_model(NO_OP_CALLS["codex"], DONE)

    def reply(request: Request) -> Answer:
        if contains_user_text(request, SUMMARY):
            return after(request)
        # Codex offers no tools while it summarises.
        return first_replies(request) if request.body.get("tools") else Answer(SUMMARY)

    model = TokenisingModel(reply, long_text="answer.txt")
    limit = ("-c", "model_auto_compact_token_limit=100")
    async with run_agent("codex", model, tmp_path, args=limit) as run:
        assert SUMMARY in json.dumps(run.traffic.posts[-1].json["input"])
        assert run.parents == [None, None, None, 2]
        assert sorted(segment.trained for segment in run.rollout.segments) == [3, 6, 103]
        run.traffic.save("codex", "compaction")


async def test_claude_code_at_a_terminal_requests_a_title_in_a_separate_call(tmp_path: Path) -> None:
    launcher = find_launcher("claude-code")
    settings_files = {
        "claude/.claude.json": {
            "hasCompletedOnboarding": True,
            "customApiKeyResponses": {"approved": [SANDBOX_KEY]},
            "projects": {"/work": {"hasTrustDialogAccepted": True}},
        },
        "claude/settings.json": {"skipDangerousModePermissionPrompt": True},
    }
    modified = replace(
        launcher,
        command=(
            *("{python}", "-I", "{driver}", "{prompt_file}"),
            *(part for part in launcher.command if part != "--print"),
        ),
        environment={name: value for name, value in launcher.environment.items() if name != NO_EXTRA_TRAFFIC},
        driver_text=(Path(__file__).parent / "terminal_driver.py").read_text(encoding="utf-8"),
        files={
            f"{{home}}/{name}": re.sub(r"([{}])", r"\1\1", json.dumps(text))
            for name, text in settings_files.items()
        },
    )
    turns = scripted_model(CALLS["claude-code"], DONE)

    def reply(request: Request) -> Answer:
        return Answer(json.dumps({"title": TITLE})) if "response_format" in request.body else turns(request)

    async with run_agent("claude-code", TokenisingModel(reply), tmp_path, modified) as run:
        assert Counter(run.parents)[None] == 2
        assert sorted(segment.trained for segment in run.rollout.segments) == [3, 6]
        run.traffic.save("claude-code", "terminal")


async def test_calls_of_claude_code_besides_its_turns_are_not_recorded(tmp_path: Path) -> None:
    launcher = find_launcher("claude-code")
    command = " ".join(launcher.command)
    modified = replace(
        launcher,
        command=("bash", "-c", f"{command} && echo /context | {command} --continue"),
        environment={name: value for name, value in launcher.environment.items() if name != NO_EXTRA_TRAFFIC},
    )
    model = TokenisingModel(scripted_model(CALLS["claude-code"], DONE))
    async with run_agent("claude-code", model, tmp_path, modified) as run:
        assert run.parents == [None, 0]
        counts = [exchange for exchange in run.traffic.posts if "/count_tokens" in exchange.path]
        assert len(counts) == len(run.traffic.posts) - 2 > 0
        assert {exchange.status for exchange in counts} == {200}
        assert any(exchange.method == "HEAD" for exchange in run.traffic.exchanges)
        run.traffic.save("claude-code", "beside")


MCP_SERVER = (Path(__file__).parents[1] / "swe" / "mcp_server.py").read_text(encoding="utf-8")
"""Uses the standard library only, because the sandboxes of these agents have no packages."""
MCP_TOOLS = {
    "claude-code": ("mcp__my_vault__whoami", ("Bash", "command")),
    "codex": ("mcp__my_vault__whoami", ("exec_command", "cmd")),
}


@pytest.mark.parametrize("name", sorted(MCP_TOOLS))
async def test_agent_calls_a_tool_of_the_tasks_mcp_server(name: str, tmp_path: Path) -> None:
    require_agent(name)
    step = StepDirectory(
        "Ask the vault who it is.",
        check="grep -q '/workspace of the task' heard.txt",
        files={"server.py": MCP_SERVER},
    )
    task = harbor_task(tmp_path, step, settings=stdio_server("python3", "/workspace/server.py", name="my vault"))
    with agents_directory(get_agents_dir()):
        env = AgentEnvironment(name)
        async with (
            ModelServer(model_that_calls(*MCP_TOOLS[name])) as server,
            scripted_engine(server, env, tmp_path) as engine,
        ):
            (rollout,) = await run_rollouts(engine, [task])
    offered = [json.dumps(request.body.get("tools"))[:20_000] for request in list(server.requests)[:1]]
    assert rollout.reward == 1.0, (json.dumps(rollout.info, indent=1), offered)
    assert_trainable(rollout, 3)
