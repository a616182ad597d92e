"""A model's own chat template, run by jinja2 as the model's authors expect it to be run.

Promises:
- a template is compiled once and may be used from several threads;
- a template is foreign code: it runs in jinja2's sandbox and cannot change what it is given;
- what a template refuses, or cannot do, raises `Unrenderable` in the template's own words.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.gateway.renderings.protocol import Unrenderable


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, specials: Mapping[str, str] | None = None) -> None:
        """`specials` are the names that templates know special tokens by, as `eos_token`."""
        import jinja2
        import jinja2.ext
        import jinja2.sandbox

        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _generation()]
        )
        env.filters["tojson"] = _json
        env.globals["raise_exception"] = _refuse
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005  (as models saw it)
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template cannot be read: {describe(error)}") from error
        self._specials = dict(specials or {})
        self.source = source

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answer: bool = True,
        **options: Any,
    ) -> str:
        """The text of a conversation; `answer`: up to where the model's answer begins."""
        values = {**self._specials, **options}
        try:
            text: str = self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=answer, **values
            )
        except Unrenderable:
            raise
        except Exception as error:  # a template may fail in any way that Python can
            raise Unrenderable(f"the chat template cannot render these messages: {describe(error)}") from error
        return text


def _refuse(message: str) -> None:
    raise Unrenderable(f"the chat template refuses these messages: {message}")


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As models saw it in training: not escaped for HTML, keys in their own order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _generation() -> Any:
    """Reads `{% generation %}…{% endgeneration %}`, which marks an answer's text, as its text."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):  # type: ignore[misc]  # jinja2 is an extra
        tags = {"generation"}  # noqa: RUF012  (jinja2's own form)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation
