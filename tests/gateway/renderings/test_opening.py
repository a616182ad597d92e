"""Renderings by name."""

import builtins
from pathlib import Path

import msgspec
import pytest

from rookery.core import Message, UsageError
from rookery.gateway.renderings import RenderingConfig, open_config, open_rendering, renderings, settle
from rookery.gateway.renderings import tokenizer as tokenizing
from tests.conftest import TOKENIZERS

needs = pytest.mark.needs("tokenizers")
QWEN3 = str(TOKENIZERS / "qwen3")
HI = [Message("user", "Hi.")]


def test_every_family_of_the_package_can_be_named() -> None:
    assert {"auto", "default", "embedded", "qwen3", "llama-3", "glm-4.5", "kimi-k2"} <= set(renderings())
    assert "families" not in renderings()


def test_an_unknown_name_says_what_is_known() -> None:
    with pytest.raises(UsageError, match=r"no rendering 'qwen9'; known: auto, .*qwen3"):
        open_rendering("qwen9", "somewhere")


@needs
def test_auto_is_the_family_of_the_model_that_the_tokenizer_is_of() -> None:
    assert open_rendering("auto", QWEN3).name == "qwen3"
    assert open_rendering("auto", str(TOKENIZERS / "llama-3")).name == "llama-3"
    assert open_rendering("auto", QWEN3, tool_parser="qwen3").name == "default"


@needs
def test_auto_of_an_unknown_model_is_its_own_template_and_without_one_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(TOKENIZERS / "qwen3" / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    with pytest.raises(UsageError, match="name the family, or give a template"):
        open_rendering("auto", str(tmp_path))
    found = open_rendering("auto", str(tmp_path), template="hm")
    assert found.name == "default"
    assert found.stop == (151645,)


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
def test_a_template_is_found_wherever_models_keep_it(tmp_path: Path, files: dict[str, str], found: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert tokenizing._template(tmp_path, tokenizing._config(tmp_path)) == found


@needs
def test_a_template_may_be_given(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    found = open_rendering("default", QWEN3, template=str(path))
    assert b"".join(found.spelled(found.render(HI, (), None))) == b"[Hi.]"
    with pytest.raises(UsageError, match="cannot be read"):
        open_rendering("default", QWEN3, template=str(tmp_path / "none.jinja"))


@needs
@pytest.mark.parametrize(
    ("name", "tokenizer", "options", "said"),
    [
        ("qwen3", "llama-3", {}, "does not fit the family 'qwen3'.*im_start"),
        ("qwen3", "qwen3", {"depth": 3}, r"cannot have these options \(it knows enable_thinking"),
        ("gpt-oss", "qwen3", {}, "o200k_base.tiktoken"),
        ("default", "qwen3", {"tool_parser": "x"}, "no tool_parser 'x'; known: deepseek-v3, glm, qwen3"),
        ("default", "qwen3", {"reasoning_parser": "x"}, "no reasoning_parser 'x'; known: think"),
        ("qwen3", "qwen3", {"tool_parser": "qwen3"}, "has its own parsers"),
    ],
)
def test_what_cannot_be_is_said_when_it_is_opened(
    name: str, tokenizer: str, options: dict, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    parsers = {key: options.pop(key) for key in ("tool_parser", "reasoning_parser") if key in options}
    with pytest.raises(UsageError, match=said):
        open_rendering(name, str(TOKENIZERS / tokenizer), options=options, **parsers)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.partition(".")[0] == "renderers":
            raise ImportError("No module named 'renderers'")
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"no rendering 'qwen3'; known: .*pip install 'rookery-rl\[renderers\]'"):
        open_rendering("qwen3", QWEN3)


@needs
def test_a_config_travels_and_opens_the_same() -> None:
    config = settle(RenderingConfig(name="qwen3", tokenizer=QWEN3, options={"enable_thinking": False}))
    assert Path(config.tokenizer).is_absolute()
    there = msgspec.json.decode(msgspec.json.encode(config), type=RenderingConfig)
    assert there == config
    prompt = open_config(there).render(HI, (), None)
    assert prompt == open_config(config).render(HI, (), None)
    assert b"".join(open_config(there).spelled(prompt)).endswith(b"<think>\n\n</think>\n\n")
