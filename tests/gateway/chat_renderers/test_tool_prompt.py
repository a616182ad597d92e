"""Chat templates that ignore tools are detected at the start, and rejected unless a tool prompt is configured."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine, Environment, ToolEnvironment, tool
from rookery.core import Failed, Message, ToolCall, UsageError, label
from rookery.gateway.chat_renderers import open_renderer
from rookery.gateway.chat_renderers.family_renderer import FamilyRenderer
from rookery.gateway.config import resolve_rendering
from rookery.upstreams import UpstreamConfig
from tests.cli.sandbox_kit import run_cli
from tests.conftest import TOKENIZERS
from tests.gateway.chat_renderers.kit import TOOLS, open_family
from tests.servers import Answer, ModelServer

pytestmark = pytest.mark.needs("tokenizers")

WITHOUT_TOOLS = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWER = Answer("ok", ids=[5, 151645], logprobs=[-1.0, -1.0])
QUESTION = (Message("user", "Weather?"),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a real tokenizer directory whose chat template ignores tools."""
    directory = tmp_path_factory.mktemp("tokenizers") / "plain"
    directory.mkdir()
    shutil.copy(TOKENIZERS / "qwen3" / "tokenizer.json", directory)
    config = json.loads((TOKENIZERS / "qwen3" / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": WITHOUT_TOOLS}))
    return directory


def open_default_renderer(folder: Path, **settings: Any) -> FamilyRenderer:
    from rookery.gateway.chat_renderers import RendererConfig, open_renderer_config

    renderer = open_renderer_config(RendererConfig(name="default", tokenizer=str(folder), **settings))
    assert isinstance(renderer, FamilyRenderer)
    return renderer


def render_text(renderer: FamilyRenderer, tools: Any = TOOLS, messages: Any = QUESTION) -> str:
    return renderer.tokenizer.decode(memoryview(renderer.render(messages, tools, None)).cast("i").tolist())


@pytest.mark.long
def test_template_that_ignores_tools_is_detected(folder: Path) -> None:
    renderer = open_default_renderer(folder)
    assert (renderer.drops_tools, renderer.rejects_tools) == (True, True)


@pytest.mark.parametrize("name", ["qwen3", "llama-3", "gemma4"])
def test_templates_and_families_with_tools_are_accepted(name: str) -> None:
    assert not open_family(name, name).drops_tools
    template_renderer = open_renderer("default", str(TOKENIZERS / name))
    assert isinstance(template_renderer, FamilyRenderer)
    assert not template_renderer.drops_tools


def test_tools_are_dropped_if_allowed(folder: Path) -> None:
    renderer = open_default_renderer(folder, allow_no_tools=True)
    assert (renderer.drops_tools, renderer.rejects_tools) == (True, False)
    assert renderer.render(QUESTION, TOOLS, None) == renderer.render(QUESTION, (), None)


def test_tool_prompt_describes_the_tools_in_the_system_message(folder: Path) -> None:
    renderer = open_default_renderer(folder, tool_prompt="default")
    assert not renderer.drops_tools
    prompt = render_text(renderer)
    assert prompt.startswith("<|im_start|>system\n")
    assert all(f'"name": "{one.name}"' in prompt for one in TOOLS)
    assert render_text(renderer, ()) == "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
    with_system = render_text(renderer, TOOLS, (Message("system", "Be brief."), *QUESTION))
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert with_system.count("<|im_start|>system") == 1


def test_tool_prompt_writes_earlier_calls_as_it_asked_for_them(folder: Path) -> None:
    call = ToolCall("c", "weather", '{"city": "Åre"}')
    prompt = render_text(
        open_default_renderer(folder, tool_prompt="default"),
        TOOLS,
        (*QUESTION, Message("assistant", None, (call,)), *QUESTION),
    )
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Åre"}}\n</tool_call>' in prompt


def test_tool_prompt_is_read_from_a_file_and_needs_the_placeholder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Call these:\n{tools}\n")
    assert "Call these:" in render_text(open_default_renderer(folder, tool_prompt=str(tmp_path / "prompt.txt")))
    (tmp_path / "wrong.txt").write_text("Call these:\n")
    for wrong in ("wrong.txt", "nowhere.txt"):
        with pytest.raises(UsageError):
            open_default_renderer(folder, tool_prompt=str(tmp_path / wrong))


def test_resolved_config_reports_dropped_tools(folder: Path) -> None:
    policy = UpstreamConfig(kind="vllm", urls=("http://127.0.0.1:1",))
    settings: dict[str, Any] = {"name": "default", "tokenizer": str(folder)}
    assert resolve_rendering("tokens", settings, policy)[1]
    assert not resolve_rendering("tokens", {**settings, "tool_prompt": "default"}, policy)[1]
    assert not resolve_rendering("tokens", {"name": "default", "tokenizer": str(TOKENIZERS / "qwen3")}, policy)[1]


class DeclaringEnvironment(ToolEnvironment):
    @tool
    async def add(self, a: int, b: int) -> int:
        """Adds."""
        return a + b


class UndeclaringEnvironment(Environment):
    """Environment that passes tools to the model without declaring them."""

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat(ctx.task.prompt, tools=TOOLS)

    async def score(self, ctx: Context) -> float:
        return 1.0


def build_engine(
    env: Environment, folder: Path, out: Path, url: str = "http://127.0.0.1:1", **options: Any
) -> Engine:
    policy = UpstreamConfig(urls=(url,))
    rendering = {"name": "default", "tokenizer": str(folder), **options.pop("rendering", {})}
    return Engine(env, policy=policy, record="tokens", rendering=rendering, runners=0, out=out / "runs", **options)


def test_engine_with_declared_tools_is_refused_at_construction(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        build_engine(DeclaringEnvironment(), folder, tmp_path)
    build_engine(DeclaringEnvironment(), folder, tmp_path, allow_no_tools=True)
    build_engine(DeclaringEnvironment(), folder, tmp_path, rendering={"tool_prompt": "default"})
    build_engine(DeclaringEnvironment(), TOKENIZERS / "qwen3", tmp_path)


async def test_undeclared_tools_are_warned_of_at_the_start_and_refused_in_calls(
    folder: Path, tmp_path: Path
) -> None:
    for allowed in (False, True):
        events: list[str] = []
        async with ModelServer(ANSWER) as server:
            directory = build_engine(
                UndeclaringEnvironment(), folder, tmp_path, server.url, allow_no_tools=allowed
            )
            directory.on_event = lambda kind, _: events.append(kind)  # noqa: B023  (called before the next iteration)
            async with directory:
                assert events == ["template.no_tools"]
                (group,) = [group async for group in directory.groups([{"prompt": "x"}], k=1)]
        outcome = group.rollouts[0].outcome
        if allowed:
            assert label(outcome) == "completed", outcome
        else:
            assert isinstance(outcome, Failed)
            assert (outcome.fault, "--allow-no-tools" in outcome.detail) == ("bug", True)


@pytest.mark.long
async def test_run_is_refused_with_exit_code_2_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "from rookery import ToolEnvironment, tool\n\n\n"
        "class Sums(ToolEnvironment):\n"
        "    def tasks(self):\n"
        '        return [{"prompt": "1 + 2?", "answer": 3}]\n\n'
        "    @tool\n"
        "    async def add(self, a: int, b: int) -> int:\n"
        '        """Adds."""\n'
        "        return a + b\n"
    )
    async with ModelServer(ANSWER) as server:
        args = ("run", "env.py", "--policy", server.url, "--runners", "1")
        args = (*args, "--tokenizer", str(folder), "--renderer", "default", "--max-tokens", "4")
        refused, allowed, helped = [
            await asyncio.to_thread(lambda more=more: run_cli(*args, *more, cwd=tmp_path))  # type: ignore[misc]
            for more in ((), ("--allow-no-tools",), ("--tool-prompt", "default"))
        ]
    assert refused.code == 2, refused
    assert "--allow-no-tools" in refused.err
    assert allowed.code == 0, allowed
    assert "template.no_tools" in allowed.err
    assert helped.code == 0, helped
    assert "template.no_tools" not in helped.err
