"""Sampling parameters of model calls."""

from typing import Any

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters. None leaves the server's default. `extra` is added to the request unchanged."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: dict[str, Any] = {}

    def over(self, below: "Sampling") -> "Sampling":
        """Return these parameters, with `below` for those that are not set."""
        if self == NOTHING:
            return below
        if below == NOTHING:
            return self
        values = {
            name: value for name in self.__struct_fields__ if (value := getattr(self, name)) not in (None, (), {})
        }
        return msgspec.structs.replace(below, **values) if values else below


NOTHING = Sampling()
