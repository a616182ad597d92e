"""Tools: typed Python functions that the policy may call, with JSON schemas derived from their signatures.

msgspec generates the schemas and decodes the arguments; this module only reads signatures and docstrings.
Pydantic takes 4.7 times as long to build a tool (`python -m benchmarks libraries`, 2026-11-19).
Defining a tool or reading its schema starts no process and no sandbox.
"""

import copy
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, Self, overload

import msgspec

from rookery.core import ToolSchema, UsageError
from rookery.core.errors import describe
from rookery.core.options import import_attribute
from rookery.core.plugins import load_plugin
from rookery.environments.context import Context
from rookery.environments.text import clip

GROUP: Final = "rookery.tools"
"""Entry-point group in which installed packages register tools by name."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ARGS_HEADING = re.compile(r"(args|arguments|parameters):\s*", re.IGNORECASE)
_ARGS_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_MAX_SCHEMA_SHOWN = 1_000


class InvalidArguments(Exception):  # noqa: N818  (an observation for the model, not an error of the program)
    """The arguments of a tool call do not match the tool's parameters. The message is meant for the model."""


class CallLimit(float):
    """Annotation for a parameter that receives the time limit of the call, in seconds.

    A tool with such a parameter must enforce the limit itself. The environment then cancels the call only when the
    time of the stage is over.
    """


class Tool:
    """A function that the policy may call.

    Usually made with the decorator `tool`. Calling a `Tool` object from Python calls the wrapped function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float | None = None,
        sandbox: bool = False,
    ) -> None:
        if not callable(function):
            raise UsageError(f"a tool must be a function, not {function!r:.100}")
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} is not a valid tool name: pass @tool(name=…) with 1 to 64 letters, digits, _ or -"
            )
        self.function = function
        self.timeout = _check_timeout(self.name, timeout)
        """Time limit of one call in seconds. None means the rollout's `limits.call`."""
        self.sandbox = sandbox
        """True if calls use the attempt's sandbox, so that a run must be able to create sandboxes."""
        self.__name__ = self.name
        self.__doc__ = function.__doc__
        self.__module__ = getattr(function, "__module__", __name__)
        self.__qualname__: str = getattr(function, "__qualname__", self.name)
        self.blocking = not _is_async(function)
        """True if the function is a plain `def`, which runs in a thread."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(f"the tool {self.name} is a generator: a tool must return its result")
        summary, parameter_docs = _parse_docstring(inspect.getdoc(function) or "")
        self._read_signature(parameter_docs)
        self.schema = ToolSchema(
            self.name, summary if description is None else description, self._make_json_schema()
        )

    @property
    def description(self) -> str:
        return self.schema.description

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.schema.parameters

    @property
    def enforces_limit(self) -> bool:
        """True if the function has a `CallLimit` parameter and enforces the time limit itself."""
        return self._limit_name is not None

    def with_timeout(self, timeout: float | None) -> "Tool":
        """Return the same tool with another time limit per call."""
        other = _ToolWithTimeout.__new__(_ToolWithTimeout)
        other.__dict__.update(self.__dict__)
        other.timeout = _check_timeout(self.name, timeout)
        other.base = self
        return other

    def parse(self, arguments: str) -> dict[str, Any]:
        """Convert JSON from the model to keyword arguments; raise `InvalidArguments` if it violates the schema."""
        text = arguments if arguments.strip() else "{}"
        try:
            try:
                parsed = self._strict_decoder.decode(text)
            except msgspec.ValidationError:
                # Models often write "3" for a number; the meaning is clear.
                parsed = self._lenient_decoder.decode(text)
        except Exception as error:  # user-defined types may raise anything
            raise InvalidArguments(
                f"The arguments of {self.name} are wrong: {self._explain(text, error)}.\n"
                f"They must be one JSON object of this schema: {self._schema_text}"
            ) from error
        values = {name: getattr(parsed, name) for name in self._argument_names}
        return {name: value for name, value in values.items() if value is not msgspec.UNSET}

    def invoke(self, arguments: dict[str, Any], ctx: Context, limit: float) -> Any:
        """Call the function with parsed arguments and return its result, which may be an awaitable.

        `ctx` and `limit`, the time limit in seconds, are passed if the function has parameters for them.
        """
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
        # Pickle by qualified name, as for functions: runner processes import the tool again.
        target: Any = sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            target = getattr(target, part, None)
        if target is self:
            return str(self.__qualname__)
        return _rebuild_tool, (self.function, self.name, self.description, self.timeout, self.sandbox)

    def __copy__(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    def _read_signature(self, parameter_docs: dict[str, str]) -> None:
        self.method = False
        self._context_name: str | None = None
        self._limit_name: str | None = None
        fields: list[Any] = []
        function = self.function
        namespace = getattr(inspect.unwrap(function), "__globals__", {})
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise UsageError(f"the signature of the tool {self.name} cannot be read: {describe(error)}") from error
        for index, parameter in enumerate(parameters):
            name, annotation = parameter.name, parameter.annotation
            if index == 0 and name == "self" and annotation is parameter.empty:
                self.method = True
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise UsageError(
                    f"the tool {self.name} takes {parameter}: declare every argument by name and type instead"
                )
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise UsageError(
                    f"the parameter {name!r} of the tool {self.name} is positional-only, but models use names"
                )
            if name == "ctx" or _is_context(annotation):
                self._context_name = name
                continue
            if annotation is parameter.empty:
                raise UsageError(
                    f"the parameter {name!r} of the tool {self.name} has no type: write `{name}: str`, for example"
                )
            hint = self._resolve_hint(name, annotation, namespace)
            if hint is CallLimit:
                self._limit_name = name
                continue
            fields.append(_make_field(name, hint, parameter.default, parameter_docs.get(name, "")))
        self._argument_names = tuple(field[0] for field in fields)
        try:
            self._struct = msgspec.defstruct(
                f"{self.name}_arguments", fields, kw_only=True, forbid_unknown_fields=True
            )
            self._strict_decoder = msgspec.json.Decoder(self._struct)
            self._lenient_decoder = msgspec.json.Decoder(self._struct, strict=False)
        except (TypeError, ValueError) as error:
            raise self._unsupported_type(error) from error

    def _resolve_hint(self, name: str, annotation: Any, namespace: dict[str, Any]) -> Any:
        try:
            holder = types.SimpleNamespace(__annotations__={name: annotation})
            return typing.get_type_hints(holder, globalns=namespace, include_extras=True)[name]
        except Exception as error:
            raise UsageError(
                f"the type {annotation!r} of the parameter {name!r} of the tool {self.name} cannot be resolved: "
                f"{describe(error)}; define it at the top level of the module"
            ) from error

    def _make_json_schema(self) -> dict[str, Any]:
        try:
            (top,), components = msgspec.json.schema_components([self._struct], ref_template="#/$defs/{name}")
        except (TypeError, ValueError) as error:
            raise self._unsupported_type(error) from error
        schema: dict[str, Any] = components.pop(top["$ref"].rpartition("/")[2])
        schema.pop("title", None)
        if components:
            schema["$defs"] = components
        self._schema_text = clip(msgspec.json.encode(schema).decode(), _MAX_SCHEMA_SHOWN)
        return schema

    def _unsupported_type(self, error: Exception) -> UsageError:
        return UsageError(
            f"a parameter of the tool {self.name} has a type that JSON arguments cannot be converted to: {error}"
        )

    def _explain(self, text: str, error: Exception) -> str:
        """Return a phrase for the model that says why `text` does not match the tool's parameters."""
        if not isinstance(error, msgspec.ValidationError):
            return f"they are not valid JSON ({clip(describe(error), 300)})"
        try:
            arguments = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError):
            return str(error)
        if not isinstance(arguments, dict):
            return "they must be a JSON object with the arguments by name"
        missing = [name for name in self.parameters["required"] if name not in arguments]
        unknown = [name for name in arguments if name not in self._argument_names]
        problems = [f"missing: {', '.join(missing)}"] if missing else []
        if unknown:
            problems.append(f"unknown: {clip(', '.join(unknown), 300)}")
        return "; ".join(problems) or clip(str(error), 500)


class _ToolWithTimeout(Tool):
    """Copy of a tool with another time limit. It is pickled as the original tool and the limit."""

    base: Tool

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_with_timeout, (self.base, self.timeout)


def _rebuild_tool(
    function: Callable[..., Any], name: str, description: str, timeout: float | None, sandbox: bool
) -> Tool:
    return Tool(function, name=name, description=description, timeout=timeout, sandbox=sandbox)


def _rebuild_with_timeout(base: Tool, timeout: float | None) -> Tool:
    return base.with_timeout(timeout)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    sandbox: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Decorator that makes a `Tool`, which the policy may call, from a typed function or coroutine function.

        @tool
        async def read_file(path: str, ctx: Context) -> bytes:
            \"\"\"Read a file of the sandbox.

            Args:
                path: The file's path.
            \"\"\"
            return await (await ctx.sandbox()).read(path)

    The first paragraph of the docstring becomes the tool's description, and the `Args:` section describes the
    parameters. A parameter annotated `Context`, or named `ctx`, receives the attempt's context and is not part of
    the schema. Options: `@tool(name=…, description=…, timeout=…, sandbox=True)`. With `sandbox`, a run checks
    before it starts that it can create sandboxes.
    """
    if function is not None:
        return Tool(function)
    return lambda decorated: Tool(decorated, **options)


def find_tool(name: str, known: Sequence[str] = ()) -> Tool:
    """Return the tool registered as `name` in the entry-point group `rookery.tools`, or imported by that name.

    To import a function or tool, `name` is `module:function`. Raise `UsageError` if there is no such tool. The
    error message lists the registered names and `known`, further names that the caller accepts.
    """
    target: Any
    if ":" in name:
        target = import_attribute(name, "tool")
    else:
        target = load_plugin(GROUP, name, "tool", more=known, hint="; or name a function as module:function")
    return target if isinstance(target, Tool) else Tool(target)


def _check_timeout(name: str, timeout: float | None) -> float | None:
    if timeout is not None and not 0 < timeout < math.inf:
        raise UsageError(f"the timeout of the tool {name} must be a finite number above 0, not {timeout!r}")
    return timeout


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(type(function), "__call__", None)  # noqa: B004  (the method itself is needed)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _is_context(annotation: Any) -> bool:
    if isinstance(annotation, str):  # may be imported for type checkers only
        return annotation.strip().strip("\"'").rpartition(".")[2] == "Context"
    return isinstance(annotation, type) and issubclass(annotation, Context)


def _make_field(name: str, hint: Any, default: Any, description: str) -> tuple[Any, ...]:
    if default is None:
        hint = typing.Optional[hint]  # noqa: UP045  (`x: int = None` implies it; `|` fails on string hints)
    if description and not any(
        isinstance(meta, msgspec.Meta) and meta.description for meta in getattr(hint, "__metadata__", ())
    ):
        hint = typing.Annotated[hint, msgspec.Meta(description=description)]
    if default is inspect.Parameter.empty:
        return name, hint
    if default is None or isinstance(default, bool | int | str | Enum) or _is_finite_float(default):
        return name, hint, default
    # Other values may be mutable or impossible to encode: leave it to Python to apply the default.
    return name, hint, msgspec.field(default_factory=_unset)


def _is_finite_float(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _unset() -> Any:
    return msgspec.UNSET


def _parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the descriptions of its `Args:` section by parameter name."""
    lines = doc.splitlines()
    headings = [index for index, line in enumerate(lines) if _ARGS_HEADING.fullmatch(line)]
    before = lines[: headings[0]] if headings else lines
    summary = " ".join("\n".join(before).split("\n\n")[0].split())
    descriptions: dict[str, str] = {}
    indent, name = 0, ""
    for line in lines[headings[0] + 1 :] if headings else ():
        if line.strip() and not line[0].isspace():
            break
        depth = len(line) - len(line.lstrip())
        entry = _ARGS_ENTRY.fullmatch(line.strip())
        if entry and (not name or depth <= indent):
            indent, name = depth, entry[1]
            descriptions[name] = entry[2].strip()
        elif name and line.strip():
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return summary, descriptions
