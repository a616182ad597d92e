"""`open_renderer` finds renderers by name and rejects invalid settings."""

import builtins
from pathlib import Path

import msgspec
import pytest

from rookery.core import Message, UsageError
from rookery.gateway.chat_renderers import (
    RendererConfig,
    list_renderers,
    open_renderer,
    open_renderer_config,
    resolve_config,
)
from rookery.gateway.chat_renderers import tokenizer as tokenizer_module
from tests.conftest import TOKENIZERS

needs_tokenizers = pytest.mark.needs("tokenizers")
QWEN3 = str(TOKENIZERS / "qwen3")
HI = [Message("user", "Hi.")]


def test_every_family_of_the_package_is_listed() -> None:
    assert {"auto", "default", "embedded", "qwen3", "llama-3", "glm-4.5", "kimi-k2"} <= set(list_renderers())
    assert "families" not in list_renderers()


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        open_renderer("qwen9", "somewhere")
    for name in ("qwen9", "auto", "qwen3"):
        assert name in str(caught.value)


@needs_tokenizers
def test_auto_opens_the_family_of_the_tokenizers_model() -> None:
    assert open_renderer("auto", QWEN3).name == "qwen3"
    assert open_renderer("auto", str(TOKENIZERS / "llama-3")).name == "llama-3"
    assert open_renderer("auto", QWEN3, tool_parser="qwen3").name == "default"


@pytest.mark.long
@needs_tokenizers
def test_auto_uses_the_template_of_an_unknown_model_or_fails_without_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(TOKENIZERS / "qwen3" / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    with pytest.raises(UsageError):
        open_renderer("auto", str(tmp_path))
    renderer = open_renderer("auto", str(tmp_path), template="hm")
    assert renderer.name == "default"
    assert renderer.stop_token_ids == (151645,)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "a", "tokenizer_config.json": '{"chat_template": "b"}'}, "a"),
        ({"chat_template.json": '{"chat_template": "c"}'}, "c"),
        ({"tokenizer_config.json": '{"chat_template": "d"}'}, "d"),
        (
            {
                "tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "e"},'
                ' {"name": "tool_use", "template": "f"}]}'
            },
            "f",
        ),
        ({}, ""),
    ],
)
def test_template_is_found_in_every_known_file(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert tokenizer_module.read_template(tmp_path, tokenizer_module.read_config(tmp_path)) == expected


@needs_tokenizers
def test_template_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    renderer = open_renderer("default", QWEN3, template=str(path))
    assert b"".join(renderer.token_bytes(renderer.render(HI, (), None))) == b"[Hi.]"
    with pytest.raises(UsageError):
        open_renderer("default", QWEN3, template=str(tmp_path / "none.jinja"))


@needs_tokenizers
@pytest.mark.parametrize(
    ("name", "tokenizer", "options", "mentioned"),
    [
        ("qwen3", "llama-3", {}, "im_start"),
        ("qwen3", "qwen3", {"depth": 3}, "enable_thinking"),
        ("gpt-oss", "qwen3", {}, "o200k_base.tiktoken"),
        ("default", "qwen3", {"tool_parser": "x"}, "deepseek-v3, glm, hermes, qwen3"),
        ("default", "llama-3", {"tool_parser": "qwen3"}, "hermes"),
        ("default", "qwen3", {"reasoning_parser": "x"}, "think"),
        ("qwen3", "qwen3", {"tool_parser": "qwen3"}, "tool_parser"),
    ],
)
def test_invalid_combination_is_rejected_when_opened(
    name: str, tokenizer: str, options: dict, mentioned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    parsers = {key: options.pop(key) for key in ("tool_parser", "reasoning_parser") if key in options}
    with pytest.raises(UsageError, match=mentioned):
        open_renderer(name, str(TOKENIZERS / tokenizer), options=options, **parsers)


def test_missing_optional_dependency_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def import_without_renderers(name: str, *rest: object, **more: object) -> object:
        if name.partition(".")[0] == "renderers":
            raise ImportError("No module named 'renderers'")
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", import_without_renderers)
    with pytest.raises(UsageError) as caught:
        open_renderer("qwen3", QWEN3)
    for part in ("qwen3", "rookery-rl[renderers]"):
        assert part in str(caught.value)


@needs_tokenizers
def test_resolved_config_opens_the_same_renderer_in_another_process() -> None:
    config = resolve_config(RendererConfig(name="qwen3", tokenizer=QWEN3, options={"enable_thinking": False}))
    assert Path(config.tokenizer).is_absolute()
    decoded = msgspec.json.decode(msgspec.json.encode(config), type=RendererConfig)
    assert decoded == config
    prompt = open_renderer_config(decoded).render(HI, (), None)
    assert prompt == open_renderer_config(config).render(HI, (), None)
    assert b"".join(open_renderer_config(decoded).token_bytes(prompt)).endswith(b"<think>\n\n</think>\n\n")
