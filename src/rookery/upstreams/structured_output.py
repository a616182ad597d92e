"""Translate sampling options of the chat API for endpoints that take token IDs instead of messages.

If the prompt is token IDs, the inference engine applies no chat template and knows no tools. Constraints on the
output (`response_format`, and vLLM's older `guided_*`) become the inference engine's own parameter. Options that
only affect the chat template or the parsing of tool calls are refused. Runs in runner processes and gateway
shards; no I/O.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from rookery.core import UpstreamError

_GUIDED: Final = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"} | {
    "guided_grammar": "grammar"
}
_RENDERED: Final = ("chat_template_kwargs", "parallel_tool_calls", "reasoning_effort")
_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")


class Constraint(NamedTuple):
    """A constraint on the format of a reply. `kind` is one of vLLM's kinds of structured outputs, such as
    `json`."""

    kind: str
    value: Any


def token_options(
    extra: Mapping[str, Any], write: Callable[[Constraint], dict[str, Any]] | None, engine: str
) -> Mapping[str, Any]:
    """Return the options in `sampling.extra` of a call with token IDs, translated for one kind of inference
    engine.

    `write` converts a constraint on the output to request fields; None if this kind has no field for it. `engine`
    is the name of the kind, for messages. Raises `UpstreamError` (`upstream.rejected`) for an option that would
    have no effect.
    """
    if not extra:
        return extra
    for name in _RENDERED:
        if name in extra and not (name == "parallel_tool_calls" and _plain(extra[name]) is not False):
            raise refuse_option(
                f"the sampling option {name} has no effect with --record tokens, because the gateway renders the "
                "prompt; remove the option, or use --record messages"
            )
    rest = {
        name: value
        for name, value in extra.items()
        if name not in ("response_format", "structured_outputs", *_GUIDED, *_RENDERED)
    }
    found = _constraints(extra)
    if len(found) > 1:
        kinds = ", ".join(one.kind for one in found)
        raise refuse_option(
            f"the sampling options set {len(found)} constraints on the output format ({kinds}); set only one"
        )
    if not found:
        return rest
    if write is None:
        raise refuse_option(
            f"the upstream kind {engine!r} has no parameter for the output format of calls with token IDs; remove "
            "response_format, or use --record messages"
        )
    return {**rest, **write(found[0])}


def _constraints(extra: Mapping[str, Any]) -> list[Constraint]:
    found: list[Constraint] = []
    if (form := _plain(extra.get("response_format"))) is not None:
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "json_schema":
            schema = form["json_schema"].get("schema") if isinstance(form.get("json_schema"), dict) else None
            if schema is None:
                raise refuse_option("response_format has no json_schema.schema; add the JSON Schema of the reply")
            found.append(Constraint("json", schema))
        elif kind == "json_object":
            found.append(Constraint("json_object", True))
        elif kind != "text":
            raise refuse_option(
                f"response_format has the type {str(kind)[:40]!r}; use text, json_object or json_schema"
            )
    for name, kind in _GUIDED.items():
        if (value := _plain(extra.get(name))) is not None:
            found.append(Constraint(kind, value))
    if (outputs := _plain(extra.get("structured_outputs"))) is not None:
        if not isinstance(outputs, dict) or (strange := sorted(outputs.keys() - set(_KINDS))):
            named = f", not {', '.join(strange)}" if isinstance(outputs, dict) else ""
            raise refuse_option(f"structured_outputs must be an object with one of {', '.join(_KINDS)}{named}")
        found += [Constraint(kind, value) for kind, value in outputs.items() if value is not None]
    return found


def _plain(value: Any) -> Any:
    """Return the value of an option, decoded if it is the JSON that an HTTP client sent."""
    if not isinstance(value, msgspec.Raw):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refuse_option(f"a sampling option in the request is not valid JSON: {error}") from None


def refuse_option(message: str) -> UpstreamError:
    """Return the error for a sampling option that the inference engine cannot apply."""
    return UpstreamError(message, cause="upstream.rejected")
