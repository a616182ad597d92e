"""Sampling options of the chat API, translated for endpoints that take token IDs.

With token IDs in, the inference engine renders no prompt and knows no tools. Output constraints
(`response_format`, and vLLM's older `guided_*`) become the engine's own parameter. Options that need the engine to
render are refused. Runs in runners and gateway shards; no I/O.
"""

import json
import re
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
    """A constraint on the reply's format: one of vLLM's kinds of structured outputs."""

    kind: str
    value: Any


def token_options(
    extra: Mapping[str, Any], write: Callable[[Constraint], dict[str, Any]] | None, engine: str
) -> Mapping[str, Any]:
    """Return the options of a call with token IDs. `write` encodes the format constraint for the inference engine.

    Raises `UpstreamError` (`upstream.rejected`) for an option that would have no effect.
    """
    if not extra:
        return extra
    for name in _RENDERED:
        if name in extra and not (name == "parallel_tool_calls" and _plain(extra[name]) is not False):
            raise _refused(
                f"{name} has no effect where the gateway renders the prompt (record tokens): leave it out, or "
                "record messages"
            )
    rest = {
        name: value
        for name, value in extra.items()
        if name not in ("response_format", "structured_outputs", *_GUIDED, *_RENDERED)
    }
    found = _constraints(extra)
    if len(found) > 1:
        kinds = ", ".join(one.kind for one in found)
        raise _refused(f"only one output format is allowed, got {len(found)}: {kinds}")
    if not found:
        return rest
    if write is None:
        raise _refused(
            f"the inference engine kind {engine!r} has no parameter for the output format of calls "
            "with token IDs: leave "
            "response_format out, use the kind vllm, sglang or llamacpp, or record messages"
        )
    return {**rest, **write(found[0])}


def _constraints(extra: Mapping[str, Any]) -> list[Constraint]:
    found: list[Constraint] = []
    if (form := _plain(extra.get("response_format"))) is not None:
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "json_schema":
            schema = form["json_schema"].get("schema") if isinstance(form.get("json_schema"), dict) else None
            if schema is None:
                raise _refused("response_format: json_schema.schema is missing")
            found.append(Constraint("json", schema))
        elif kind == "json_object":
            found.append(Constraint("json_object", True))
        elif kind != "text":
            raise _refused("response_format: the type is text, json_object or json_schema")
    for name, kind in _GUIDED.items():
        if (value := _plain(extra.get(name))) is not None:
            found.append(Constraint(kind, value))
    if (outputs := _plain(extra.get("structured_outputs"))) is not None:
        if not isinstance(outputs, dict) or (strange := sorted(outputs.keys() - set(_KINDS))):
            named = f" ({', '.join(strange)})" if isinstance(outputs, dict) else ""
            raise _refused(f"structured_outputs is an object with one of {', '.join(_KINDS)}{named}")
        found += [Constraint(kind, value) for kind, value in outputs.items() if value is not None]
    return found


def _plain(value: Any) -> Any:
    """Decode a value that may be a client's JSON."""
    if not isinstance(value, msgspec.Raw):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(f"cannot parse a sampling option: {error}") from None


def _refused(message: str) -> UpstreamError:
    return UpstreamError(message, cause="upstream.rejected")


def vllm_constraint(constraint: Constraint) -> dict[str, Any]:
    return {"structured_outputs": {constraint.kind: constraint.value}}


def sglang_constraint(constraint: Constraint) -> dict[str, Any]:
    kind, value = constraint
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else value
        return {"json_schema": schema if isinstance(schema, str) else json.dumps(schema)}
    if kind == "choice":
        return {"regex": _choice(value)}
    return {"ebnf" if kind == "grammar" else kind: value}


def llamacpp_constraint(constraint: Constraint) -> dict[str, Any]:
    kind, value = constraint
    if kind == "json":
        return {"json_schema": json.loads(value) if isinstance(value, str) else value}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "grammar":
        return {"grammar": value}
    raise _refused(f"llama.cpp has no parameter for the output format {kind!r}")


def _choice(values: Any) -> str:
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise _refused("choice must be a list of strings")
    return f"({'|'.join(map(re.escape, values))})"
