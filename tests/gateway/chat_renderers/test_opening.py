"""Renderings by name."""

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
from rookery.gateway.chat_renderers import tokenizer as tokenizing
from tests.conftest import TOKENIZERS

needs = pytest.mark.needs("tokenizers")
QWEN3 = str(TOKENIZERS / "qwen3")
HI = [Message("user", "Hi.")]


def test_every_family_of_the_package_is_listed() -> None:
    assert {"auto", "default", "embedded", "qwen3", "llama-3", "glm-4.5", "kimi-k2"} <= set(list_renderers())
    assert "families" not in list_renderers()


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'qwen9'; known: auto, .*qwen3"):
        open_renderer("qwen9", "somewhere")


@needs
def test_auto_opens_the_family_of_the_tokenizers_model() -> None:
    assert open_renderer("auto", QWEN3).name == "qwen3"
    assert open_renderer("auto", str(TOKENIZERS / "llama-3")).name == "llama-3"
    assert open_renderer("auto", QWEN3, tool_parser="qwen3").name == "default"


@needs
def test_auto_uses_the_template_of_an_unknown_model_or_fails_without_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(TOKENIZERS / "qwen3" / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    with pytest.raises(UsageError):
        open_renderer("auto", str(tmp_path))
    found = open_renderer("auto", str(tmp_path), template="hm")
    assert found.name == "default"
    assert found.stop_token_ids == (151645,)


@pytest.mark.parametrize(
    ("files", "found"),
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
def test_template_is_found_in_every_known_file(tmp_path: Path, files: dict[str, str], found: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert tokenizing._read_template(tmp_path, tokenizing._read_config(tmp_path)) == found


@needs
def test_template_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    found = open_renderer("default", QWEN3, template=str(path))
    assert b"".join(found.token_bytes(found.render(HI, (), None))) == b"[Hi.]"
    with pytest.raises(UsageError):
        open_renderer("default", QWEN3, template=str(tmp_path / "none.jinja"))


@needs
@pytest.mark.parametrize(
    ("name", "tokenizer", "options", "said"),
    [
        ("qwen3", "llama-3", {}, "im_start"),
        ("qwen3", "qwen3", {"depth": 3}, "enable_thinking"),
        ("gpt-oss", "qwen3", {}, "o200k_base.tiktoken"),
        ("default", "qwen3", {"tool_parser": "x"}, "deepseek-v3, glm, qwen3"),
        ("default", "qwen3", {"reasoning_parser": "x"}, "think"),
        ("qwen3", "qwen3", {"tool_parser": "qwen3"}, "tool_parser"),
    ],
)
def test_invalid_combination_is_rejected_when_opened(
    name: str, tokenizer: str, options: dict, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    parsers = {key: options.pop(key) for key in ("tool_parser", "reasoning_parser") if key in options}
    with pytest.raises(UsageError, match=said):
        open_renderer(name, str(TOKENIZERS / tokenizer), options=options, **parsers)


def test_missing_optional_dependency_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.partition(".")[0] == "renderers":
            raise ImportError("No module named 'renderers'")
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"'qwen3'; known: .*pip install 'rookery-rl\[renderers\]'"):
        open_renderer("qwen3", QWEN3)


@needs
def test_resolved_config_opens_the_same_renderer_in_another_process() -> None:
    config = resolve_config(RendererConfig(name="qwen3", tokenizer=QWEN3, options={"enable_thinking": False}))
    assert Path(config.tokenizer).is_absolute()
    there = msgspec.json.decode(msgspec.json.encode(config), type=RendererConfig)
    assert there == config
    prompt = open_renderer_config(there).render(HI, (), None)
    assert prompt == open_renderer_config(config).render(HI, (), None)
    assert b"".join(open_renderer_config(there).token_bytes(prompt)).endswith(b"<think>\n\n</think>\n\n")
