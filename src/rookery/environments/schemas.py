"""Typed Python functions become tools with JSON schemas; a model's arguments are checked against the types.

Promises:
- a function that cannot be a tool is refused when the tool is built, in words;
- making a tool, or asking for its schema, starts nothing;
- arguments either fit the function's types or are refused with `BadArguments`, whatever the model wrote;
- what is injected (the context, the call's limit) is not in the schema, and the model cannot set it.
"""

import copy
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, Self, overload

import msgspec

from rookery.core import ToolSchema, UsageError
from rookery.core.errors import describe
from rookery.environments.context import Context
from rookery.environments.results import clip

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECTION = re.compile(r"(args|arguments|parameters):\s*", re.IGNORECASE)
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_SHOWN = 1_000


class BadArguments(Exception):  # noqa: N818  (an observation for the model, not an error of ours)
    """What is wrong with a call's arguments, in words for the model."""


class CallLimit(float):
    """Annotate a parameter with it to be given the call's limit in seconds: the tool then keeps it itself."""


class Tool:
    """A function the policy may call. Calling the tool in Python calls the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float | None = None,
    ) -> None:
        if not callable(function):
            raise UsageError(f"a tool must be a function, not {function!r:.100}")
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} cannot be a tool's name: use 1 to 64 letters, digits, _ and -, with @tool(name=…)"
            )
        self.function = function
        self.timeout = _checked_timeout(self.name, timeout)
        """Seconds for one call; None: the attempt's `limits.call`."""
        self.__name__ = self.name
        self.__doc__ = function.__doc__
        self.__module__ = getattr(function, "__module__", __name__)
        self.__qualname__: str = getattr(function, "__qualname__", self.name)
        self.blocking = not _is_async(function)
        """A plain `def`: it runs in a thread of its own."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(f"the tool {self.name} yields: a tool must return its result")
        summary, about = _documented(inspect.getdoc(function) or "")
        self._read_signature(about)
        self.schema = ToolSchema(self.name, summary if description is None else description, self._schema())

    @property
    def description(self) -> str:
        return self.schema.description

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return self.schema.parameters

    @property
    def keeps_time(self) -> bool:
        """The function asked for its limit and keeps it itself."""
        return self._limit_name is not None

    def with_timeout(self, timeout: float | None) -> "Tool":
        """The same tool with another limit for one call."""
        other = _Variant.__new__(_Variant)
        other.__dict__.update(self.__dict__)
        other.timeout = _checked_timeout(self.name, timeout)
        other.base = self
        return other

    def parse(self, arguments: str) -> dict[str, Any]:
        """Keyword arguments for the function, from what the model wrote; `BadArguments` when they do not fit."""
        text = arguments if arguments.strip() else "{}"
        try:
            try:
                found = self._strict.decode(text)
            except msgspec.ValidationError:
                # Models write "3" where a number belongs; that is what they mean, and it costs no honesty.
                found = self._lenient.decode(text)
        except Exception as error:  # also what a user's type raises in its own checks
            raise BadArguments(
                f"The arguments of {self.name} are wrong: {self._problem(text, error)}.\n"
                f"They must be one JSON object of this schema: {self._shown}"
            ) from error
        values = {name: getattr(found, name) for name in self._names}
        return {name: value for name, value in values.items() if value is not msgspec.UNSET}

    def invoke(self, arguments: dict[str, Any], ctx: Context, limit: float) -> Any:
        """Calls the function with checked arguments and what it wants injected."""
        injected: dict[str, Any] = {}
        if self._context_name is not None:
            injected[self._context_name] = ctx
        if self._limit_name is not None:
            injected[self._limit_name] = CallLimit(limit)
        return self.function(**arguments, **injected)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        if instance is None or not self.method:
            return self
        bound = copy.copy(self)
        bound.function = types.MethodType(self.function, instance)
        bound.method = False
        return bound

    def __reduce__(self) -> str | tuple[Any, ...]:
        # By name, as functions travel: runner processes import it again.
        found: Any = sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is self:
            return str(self.__qualname__)
        return _remade, (self.function, self.name, self.description, self.timeout)

    def __copy__(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    def _read_signature(self, about: dict[str, str]) -> None:
        self.method = False
        self._context_name: str | None = None
        self._limit_name: str | None = None
        fields: list[Any] = []
        function = self.function
        space = getattr(inspect.unwrap(function), "__globals__", {})
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the tool {self.name} has no signature that can be read: {describe(error)}"
            ) from error
        for index, parameter in enumerate(parameters):
            name, raw = parameter.name, parameter.annotation
            if index == 0 and name == "self" and raw is parameter.empty:
                self.method = True
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise UsageError(
                    f"the tool {self.name} takes {parameter}: a model needs every argument by name and type"
                )
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise UsageError(
                    f"the tool {self.name} takes {name!r} by position only: a model names its arguments"
                )
            if name == "ctx" or _names_context(raw):
                self._context_name = name
                continue
            if raw is parameter.empty:
                raise UsageError(
                    f"the parameter {name!r} of the tool {self.name} has no type: write `{name}: str`, for example"
                )
            hint = self._hint(name, raw, space)
            if hint is CallLimit:
                self._limit_name = name
                continue
            fields.append(_field(name, hint, parameter.default, about.get(name, "")))
        self._names = tuple(field[0] for field in fields)
        try:
            self._struct = msgspec.defstruct(
                f"{self.name}_arguments", fields, kw_only=True, forbid_unknown_fields=True
            )
            self._strict = msgspec.json.Decoder(self._struct)
            self._lenient = msgspec.json.Decoder(self._struct, strict=False)
        except (TypeError, ValueError) as error:
            raise self._unsupported(error) from error

    def _hint(self, name: str, raw: Any, space: dict[str, Any]) -> Any:
        try:
            holder = types.SimpleNamespace(__annotations__={name: raw})
            return typing.get_type_hints(holder, globalns=space, include_extras=True)[name]
        except Exception as error:
            raise UsageError(
                f"the type {raw!r} of the parameter {name!r} of the tool {self.name} cannot be found: "
                f"{describe(error)}; define it at the top of the module"
            ) from error

    def _schema(self) -> dict[str, Any]:
        try:
            (top,), components = msgspec.json.schema_components([self._struct], ref_template="#/$defs/{name}")
        except (TypeError, ValueError) as error:
            raise self._unsupported(error) from error
        schema: dict[str, Any] = components.pop(top["$ref"].rpartition("/")[2])
        schema.pop("title", None)
        if components:
            schema["$defs"] = components
        self._shown = clip(msgspec.json.encode(schema).decode(), _SHOWN)
        return schema

    def _unsupported(self, error: Exception) -> UsageError:
        return UsageError(
            f"a parameter of the tool {self.name} has a type that JSON arguments cannot be read into: {error}"
        )

    def _problem(self, text: str, error: Exception) -> str:
        if not isinstance(error, msgspec.ValidationError):
            return f"they are not valid JSON ({clip(describe(error), 300)})"
        try:
            given = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError):
            return str(error)
        if not isinstance(given, dict):
            return "they must be a JSON object with the arguments by name"
        missing = [name for name in self.parameters["required"] if name not in given]
        unknown = [name for name in given if name not in self._names]
        said = [f"missing: {', '.join(missing)}"] if missing else []
        if unknown:
            said.append(f"unknown: {clip(', '.join(unknown), 300)}")
        return "; ".join(said) or clip(str(error), 500)


class _Variant(Tool):
    """A tool with another limit; it travels as the tool it was made from."""

    base: Tool

    def __reduce__(self) -> tuple[Any, ...]:
        return _variant, (self.base, self.timeout)


def _remade(function: Callable[..., Any], name: str, description: str, timeout: float | None) -> Tool:
    return Tool(function, name=name, description=description, timeout=timeout)


def _variant(base: Tool, timeout: float | None) -> Tool:
    return base.with_timeout(timeout)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, timeout: float | None = None
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Makes a tool of a typed function, sync or async: `@tool` or `@tool(name=…, description=…, timeout=…)`.

    The docstring's first paragraph is the description, its `Args:` section describes the arguments. A
    parameter annotated `Context`, or named `ctx`, is given the attempt's context.
    """
    if function is not None:
        return Tool(function)
    return lambda decorated: Tool(decorated, **options)


def _checked_timeout(name: str, timeout: float | None) -> float | None:
    if timeout is not None and not 0 < timeout < math.inf:
        raise UsageError(f"the timeout of the tool {name} must be a finite number above 0, not {timeout!r}")
    return timeout


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(type(function), "__call__", None)  # noqa: B004  (the method itself is asked for)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _names_context(raw: Any) -> bool:
    if isinstance(raw, str):  # perhaps imported for type checkers only
        return raw.strip().strip("\"'").rpartition(".")[2] == "Context"
    return isinstance(raw, type) and issubclass(raw, Context)


def _field(name: str, hint: Any, default: Any, about: str) -> tuple[Any, ...]:
    if default is None:
        hint = typing.Optional[hint]  # noqa: UP045  (`x: int = None` means it; `|` fails on string hints)
    if about and not any(
        isinstance(meta, msgspec.Meta) and meta.description for meta in getattr(hint, "__metadata__", ())
    ):
        hint = typing.Annotated[hint, msgspec.Meta(description=about)]
    if default is inspect.Parameter.empty:
        return name, hint
    if default is None or isinstance(default, bool | int | str | Enum) or _finite(default):
        return name, hint, default
    # Anything else may be mutable or unencodable: Python's own default applies when the argument is absent.
    return name, hint, msgspec.field(default_factory=_unset)


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _unset() -> Any:
    return msgspec.UNSET


def _documented(doc: str) -> tuple[str, dict[str, str]]:
    """The first paragraph, and what the `Args:` section says about each argument."""
    lines = doc.splitlines()
    starts = [index for index, line in enumerate(lines) if _SECTION.fullmatch(line)]
    first = lines[: starts[0]] if starts else lines
    summary = " ".join("\n".join(first).split("\n\n")[0].split())
    about: dict[str, str] = {}
    indent, name = 0, ""
    for line in lines[starts[0] + 1 :] if starts else ():
        if line.strip() and not line[0].isspace():
            break
        depth = len(line) - len(line.lstrip())
        entry = _ARGUMENT.fullmatch(line.strip())
        if entry and (not name or depth <= indent):
            indent, name = depth, entry[1]
            about[name] = entry[2].strip()
        elif name and line.strip():
            about[name] = f"{about[name]} {line.strip()}".strip()
    return summary, about
