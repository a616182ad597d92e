"""Convert options that users write into what they stand for, with errors that name the option.

A dictionary becomes a struct, and a name such as `module:attribute` becomes the object that it names.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rookery.core.errors import UsageError, describe, suggestion

S = TypeVar("S", bound=msgspec.Struct)


def struct_option(name: str, value: S | Mapping[str, Any] | None, kind: type[S]) -> S:
    """Return the option `name` as an instance of `kind`.

    A dictionary of fields is converted, and None gives an instance with default values. Raises `UsageError` for an
    unknown field, for a field of the wrong type, and for a value that is neither an instance, a dictionary nor
    None.
    """
    if isinstance(value, kind):
        return value
    if value is None:
        return kind()
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a {kind.__name__} or a dictionary of its fields, not {value!r:.80}")
    known = kind.__struct_fields__
    for key in value:
        if key not in known:
            fields = ", ".join(sorted(known))
            raise UsageError(f"{name} has no field {key} (its fields are {fields}){suggestion(str(key), known)}")
    try:
        return msgspec.convert(dict(value), kind)
    except (msgspec.ValidationError, ValueError) as error:
        text = str(error)
        raise UsageError(text if text.startswith(f"{name}.") else f"{name}: {text}") from None


def import_attribute(name: str, kind: str) -> Any:
    """Return the object that `name` names, such as `graders:brief`. `kind` says what it is, for messages.

    Modules in the working directory are found, too. Raise `UsageError` if the object cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"{name!r:.80} does not name a {kind}: write module:function")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # console scripts start without the working directory in sys.path
    try:
        target: Any = import_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{module}, the module of the {kind} {name!r}, cannot be imported: {describe(error)}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise UsageError(f"{module} has no attribute {attribute!r}, so the {kind} {name!r} does not exist")
        target = getattr(target, part)
    return target
