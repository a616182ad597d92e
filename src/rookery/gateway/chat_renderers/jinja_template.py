"""Compile and run a model's Jinja chat template.

Guarantees:
- a template is untrusted code: it runs in Jinja's sandboxed environment and cannot change its arguments;
- an exception in a template is raised as `RenderError` with the template's message.

A template is compiled once and can be used from several threads.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.gateway.chat_renderers.protocol import RenderError


class ChatTemplate:
    """A compiled Jinja chat template. Call it to render a conversation to text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile a template. Raises `UsageError` if it is invalid.

        `special_tokens` maps the names that templates use, such as `eos_token`, to their text.
        """
        import jinja2
        import jinja2.ext
        import jinja2.sandbox

        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _make_generation_tag()]
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005  (transformers uses local time)
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template is invalid: {describe(error)}") from error
        self._special_tokens = dict(special_tokens or {})
        self.source = source

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """Return the text of a conversation. Raises `RenderError` if the template fails.

        With `add_generation_prompt`, the text ends where the model's reply starts. `options` are further variables
        of the template.
        """
        values = {**self._special_tokens, **options}
        try:
            text: str = self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **values
            )
        except RenderError:
            raise
        except Exception as error:  # a template can raise any exception
            raise RenderError(f"the chat template cannot render these messages: {describe(error)}") from error
        return text


def _raise_exception(message: str) -> None:
    raise RenderError(f"the chat template rejects these messages: {message}")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Encode a value as JSON, without Jinja's escaping for HTML and with keys in insertion order.

    This is how transformers renders templates, and so how models have seen JSON in training.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _make_generation_tag() -> Any:
    """Return a Jinja extension that ignores the tags `{% generation %}` and `{% endgeneration %}` around text."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):  # type: ignore[misc]  # jinja2 is an extra
        tags = {"generation"}  # noqa: RUF012  (required by jinja2)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation
