"""Convert options that users give as dictionaries into structs, with errors that name the option and the field."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rookery.core.errors import UsageError, suggestion

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
        raise UsageError(f"{name}: {error}") from None
