"""Claude Code and Codex, unmodified, from npm: `make test-agents`. Not a part of `make test`.

What they say to the gateway is listened to. `make test-agents RECORD=1` keeps it, without their words, as
`tests/gateway/dialects/recorded`, for the ordinary tests.
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
from tests.environments.agent.kit import (
    Step,
    agents_at,
    all_of,
    get_agents_dir,
    real_agent,
    scripted,
    scripted_engine,
)
from tests.environments.agent.recording import Recording, recording
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
NOTHING: dict[str, tuple[str, dict[str, Any]]] = {
    "claude-code": ("Bash", {"command": "true", "description": ABOUT}),
    "codex": ("exec_command", {"cmd": "true"}),
}
SPARE = "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"
"""Its launcher sets it; without it there are calls beside the turns."""
Plays = Callable[[Request], Answer]


@dataclass
class Engine:
    """Plays a script as an engine that thinks. Its ids are its tools and messages, three for each: a history that
    is not as it was sampled has other ids."""

    play: Plays
    heavy: str = "\0"
    """What makes an answer long: a hundred ids more."""
    sampled: Counter[int] = field(default_factory=Counter)
    _asked: Any = field(default_factory=itertools.count)

    def __call__(self, request: Request) -> Answer:
        answer, number = self.play(request), next(self._asked)
        body = answer.completion(chat=True)
        (choice,) = body["choices"]
        message = choice["message"]
        for at, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call_{number}_{at}"
        before: list[dict[str, Any]] = [{"role": "tools", "content": request.body.get("tools")}]
        prompt = [each for one in before + request.body["messages"] for each in self._ids(one)]
        sampled = self._ids(message)
        self.sampled.update(sampled)
        choice |= {"token_ids": sampled, "logprobs": {"content": [{"token": "t", "logprob": -1.0}] * len(sampled)}}
        message["reasoning_content"] = THOUGHTS[number]
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
        count = 103 if self.heavy in text and message["role"] == "assistant" else 3
        return [
            int.from_bytes(blake2b(f"{at}{text}".encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF
            for at in range(count)
        ]


@dataclass
class Played:
    """A rollout, and what was said in it."""

    rollout: Rollout
    turns: list[Turn]
    heard: Recording

    @property
    def parents(self) -> list[int | None]:
        return [turn.parent for turn in self.turns]


@asynccontextmanager
async def played(
    name: str, engine: Engine, folder: Path, launcher: Launcher | None = None, args: Sequence[str] = ()
) -> AsyncIterator[Played]:
    """Completed and right, with every token that was sampled trained once."""
    real_agent(name)
    with agents_at(get_agents_dir()):
        env = AgentEnvironment(launcher or name, args=args)
        async with (
            ModelServer(engine) as server,
            recording() as heard,
            scripted_engine(server, env, folder) as made,
        ):
            (found,) = await all_of(made, [{"prompt": QUESTION, "answer": 42}])
    assert label(found.outcome) == "completed", (found.outcome, found.info)
    assert found.reward == 1.0, found.info
    assert found.usage.sampled_tokens == engine.sampled.total()
    trained: Counter[int] = Counter()
    for segment in found.segments:
        ids = memoryview(segment.tokens).cast("i").tolist()
        trained.update(itertools.compress(ids, segment.mask))
    assert trained == engine.sampled
    with RunReader(folder / "runs" / "latest") as reader:
        turns = reader.turns(found)
    assert sorted(index for segment in found.segments for index in segment.turns) == [turn.index for turn in turns]
    yield Played(found, turns, heard)


def said(request: Request, text: str) -> bool:
    """Whether a user said so."""
    return text in json.dumps([one["content"] for one in request.body["messages"] if one["role"] == "user"])


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_it_streams_two_turns_with_a_real_tool_call(name: str, tmp_path: Path) -> None:
    async with played(name, Engine(scripted(CALLS[name], DONE)), tmp_path) as found:
        assert found.parents == [None, 0]
        assert all(one.json["stream"] for one in found.heard.posts)
        assert DONE in found.rollout.info["agents"][0]["stdout"]
        found.heard.written(name, "tool")


async def test_claude_codes_sub_agent_gives_a_tree_whose_every_sampled_token_is_trained_once(
    tmp_path: Path,
) -> None:
    sub_task = {"description": ABOUT, "prompt": PART, "subagent_type": "general-purpose"}
    of_main = scripted(("Agent", {**sub_task, "run_in_background": False}), CALLS["claude-code"], DONE)
    of_sub = scripted(NOTHING["claude-code"], PART_DONE)
    engine = Engine(lambda request: (of_sub if said(request, PART) else of_main)(request))
    async with played("claude-code", engine, tmp_path) as found:
        assert found.parents == [None, None, 1, 0, 3]
        assert sorted(segment.trained for segment in found.rollout.segments) == [6, 9]
        found.heard.written("claude-code", "sub_agent")


async def test_codexs_sub_agent_gives_a_tree_whose_every_sampled_token_is_trained_once(tmp_path: Path) -> None:
    spawn = ("multi_agent_v1__spawn_agent", {"message": PART})
    wait: Step = ("multi_agent_v1__wait_agent", {})
    of_main = scripted(spawn, wait, CALLS["codex"], DONE)
    of_sub = scripted(NOTHING["codex"], PART_DONE)

    def play(request: Request) -> Answer:
        if said(request, PART):
            return of_sub(request)
        answer = of_main(request)
        if answer.calls and answer.calls[0][0] == wait[0]:
            (agent,) = re.findall(
                r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", request.body["messages"][-1]["content"]
            )
            answer.calls = ((wait[0], json.dumps({"targets": [agent], "timeout_ms": 60_000})),)
        return answer

    async with played("codex", Engine(play), tmp_path) as found:
        # The sub-agent's turns come between any of the others.
        assert Counter(found.parents)[None] == 2
        assert sorted(segment.trained for segment in found.rollout.segments) == [6, 12]
        found.heard.written("codex", "sub_agent")


async def test_claude_codes_compaction_is_a_branch_and_what_follows_a_new_root(tmp_path: Path) -> None:
    launcher = find_launcher("claude-code")
    start = " ".join(launcher.command)
    script = f"{start} && echo /compact | {start} --continue && echo '{MORE}' | {start} --continue"
    before = scripted(CALLS["claude-code"], DONE)

    def play(request: Request) -> Answer:
        if said(request, MORE):
            return Answer(DONE)
        return Answer(f"<summary>\n{SUMMARY}\n</summary>") if said(request, "<summary>") else before(request)

    launched = replace(launcher, command=("bash", "-c", script))
    async with played("claude-code", Engine(play), tmp_path, launched) as found:
        assert SUMMARY in json.dumps(found.heard.posts[-1].json["messages"][0])
        # The last answer before it stays as it is, and is no part of what is summed up.
        assert found.parents == [None, 0, 0, None]
        assert sorted(segment.trained for segment in found.rollout.segments) == [3, 3, 6]
        found.heard.written("claude-code", "compaction")


async def test_codexs_compaction_and_what_follows_are_new_roots(tmp_path: Path) -> None:
    before, after = scripted(CALLS["codex"]), scripted(NOTHING["codex"], DONE)

    def play(request: Request) -> Answer:
        if said(request, SUMMARY):
            return after(request)
        # Codex offers no tools while it sums up.
        return before(request) if request.body.get("tools") else Answer(SUMMARY)

    engine = Engine(play, heavy="answer.txt")
    limit = ("-c", "model_auto_compact_token_limit=100")
    async with played("codex", engine, tmp_path, args=limit) as found:
        assert SUMMARY in json.dumps(found.heard.posts[-1].json["input"])
        assert found.parents == [None, None, None, 2]
        assert sorted(segment.trained for segment in found.rollout.segments) == [3, 6, 103]
        found.heard.written("codex", "compaction")


async def test_claude_code_at_a_terminal_asks_for_a_title_beside_its_conversation(tmp_path: Path) -> None:
    launcher = find_launcher("claude-code")
    before = {
        "claude/.claude.json": {
            "hasCompletedOnboarding": True,
            "customApiKeyResponses": {"approved": [SANDBOX_KEY]},
            "projects": {"/work": {"hasTrustDialogAccepted": True}},
        },
        "claude/settings.json": {"skipDangerousModePermissionPrompt": True},
    }
    launched = replace(
        launcher,
        command=(
            *("{python}", "-I", "{driver}", "{prompt_file}"),
            *(part for part in launcher.command if part != "--print"),
        ),
        environment={name: value for name, value in launcher.environment.items() if name != SPARE},
        driver_text=(Path(__file__).parent / "at_a_terminal.py").read_text(encoding="utf-8"),
        files={f"{{home}}/{name}": re.sub(r"([{}])", r"\1\1", json.dumps(text)) for name, text in before.items()},
    )
    turns = scripted(CALLS["claude-code"], DONE)

    def play(request: Request) -> Answer:
        return Answer(json.dumps({"title": TITLE})) if "response_format" in request.body else turns(request)

    async with played("claude-code", Engine(play), tmp_path, launched) as found:
        assert Counter(found.parents)[None] == 2
        assert sorted(segment.trained for segment in found.rollout.segments) == [3, 6]
        found.heard.written("claude-code", "terminal")


async def test_claude_codes_calls_beside_its_turns_are_answered_and_record_nothing(tmp_path: Path) -> None:
    launcher = find_launcher("claude-code")
    start = " ".join(launcher.command)
    launched = replace(
        launcher,
        command=("bash", "-c", f"{start} && echo /context | {start} --continue"),
        environment={name: value for name, value in launcher.environment.items() if name != SPARE},
    )
    engine = Engine(scripted(CALLS["claude-code"], DONE))
    async with played("claude-code", engine, tmp_path, launched) as found:
        assert found.parents == [None, 0]
        counted = [one for one in found.heard.posts if "/count_tokens" in one.path]
        assert len(counted) == len(found.heard.posts) - 2 > 0
        assert {one.status for one in counted} == {200}
        assert any(one.method == "HEAD" for one in found.heard.heard)
        found.heard.written("claude-code", "beside")
