"""How tokens are drawn."""

from typing import Any

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters; None leaves the server's default. `extra` goes into the request as it stands."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: dict[str, Any] = {}

    def over(self, below: "Sampling") -> "Sampling":
        """This sampling where it says something, `below` elsewhere."""
        if self == NOTHING:
            return below
        if below == NOTHING:
            return self
        said = {
            name: value for name in self.__struct_fields__ if (value := getattr(self, name)) not in (None, (), {})
        }
        return msgspec.structs.replace(below, **said) if said else below


NOTHING = Sampling()
