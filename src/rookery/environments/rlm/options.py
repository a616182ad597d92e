"""The options of the `rlm` environment. Invalid values raise `UsageError` when the environment is constructed."""

import math
from typing import Any, Literal

import msgspec

from rookery.core import UsageError
from rookery.core.limits import whole

MIN_CELL_MEMORY = 64 << 20
MAX_CELL_MEMORY = 1 << 50
KINDS = ("needle", "aggregate", "join")


class RlmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All options of an `RlmEnvironment`. A sub-call is a call of a sub-model from code in a REPL."""

    repl: Literal["python", "bash"] = "python"
    """Language of the REPL in which the models work."""
    style: Literal["tags", "tool"] = "tags"
    """The way a model writes a cell: in `<code>` tags, or as a call of the tool `repl`."""
    train_sub: bool = True
    """True if the policy answers sub-calls and is trained on them. If not, the model of the role `sub` does."""
    max_depth: int = 1
    """Maximum depth of sub-calls below the root model. From 2 on, sub-models may have their own REPL."""
    max_calls: int = 500
    """Maximum number of sub-calls of one rollout, at all levels together."""
    max_tokens: int | None = None
    """Maximum number of sampled tokens of one rollout, including the root model's. `limits.tokens` applies too."""
    max_seconds: float | None = None
    """Time limit of the run stage in seconds. None means the run's default."""
    max_turns: int = 32
    """Maximum number of turns of the root model."""
    sub_max_tokens: int = 1024
    """Maximum number of sampled tokens of one model call below the root."""
    sub_timeout: float = 120.0
    """Time limit of one model call below the root, in seconds."""
    sub_turns: int = 16
    """Maximum number of model calls of one sub-model that has tools or a REPL."""
    concurrency: int = 16
    """Maximum number of model calls below the root that run at the same time."""
    children: int = 4
    """Maximum number of sub-models with a REPL that run at the same time, at each depth."""
    cell_seconds: float = 30.0
    """Time limit of one cell in seconds, not counting sub-calls and tools."""
    cell_memory: int = 1 << 30
    """Memory limit of one cell in bytes."""
    max_output: int = 8192
    """Maximum characters of a cell's output that the model sees. Longer output is cut in the middle."""
    end_on_timeout: bool = False
    """True if a cell that exceeds its time limit ends the rollout as Truncated(time)."""
    context_tokens: int | None = None
    """Context length of the model in tokens. None means the rollout's `limits.context`."""
    compaction: Literal["none", "drop", "summary"] = "none"
    """The way the history is shortened near the context length: not at all, by dropping old results, or a
    summary."""
    preview: int = 0
    """Number of characters from the start of the task's context (text, data or files) that the prompt shows."""
    kinds: tuple[str, ...] = KINDS
    """Kinds of the built-in tasks. The options `megabytes`, `size` and `seed` also concern built-in tasks only."""
    megabytes: tuple[float, ...] = (1.0,)
    """Sizes in megabytes of the generated contexts (texts or files) of the built-in tasks."""
    size: int = 30
    """Number of built-in tasks."""
    seed: int = 0
    """Seed from which the built-in tasks are generated."""

    def __post_init__(self) -> None:
        for name, minimum, maximum in (
            ("max_depth", 0, 16),
            ("max_calls", 0, 1_000_000),
            ("max_tokens", 1, 1 << 40),
            ("max_turns", 1, 1_000_000),
            ("sub_max_tokens", 1, 1 << 30),
            ("sub_turns", 1, 10_000),
            ("concurrency", 1, 1024),
            ("children", 1, 64),
            ("cell_memory", MIN_CELL_MEMORY, MAX_CELL_MEMORY),
            ("max_output", 16, 1 << 20),
            ("context_tokens", 64, 1 << 30),
            ("preview", 0, 4096),
            ("size", 1, 100_000),
        ):
            value = getattr(self, name)
            if value is not None and not minimum <= value <= maximum:
                raise UsageError(f"{name} must be from {minimum:,} to {maximum:,}, not {value!r:.40}")
        for name in ("max_seconds", "sub_timeout", "cell_seconds"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and 0 < value <= 1e7):
                raise UsageError(f"{name} must be a number of seconds above 0 and up to 1e7, not {value!r:.40}")
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise UsageError(f"kinds must be some of {', '.join(KINDS)}, not {self.kinds!r:.80}")
        if not self.megabytes or not all(0.01 <= size <= 1024 for size in self.megabytes):
            raise UsageError(f"megabytes must be sizes from 0.01 to 1024, not {self.megabytes!r:.80}")


def parse_options(options: dict[str, Any]) -> RlmOptions:
    """Convert keyword arguments of `RlmEnvironment` to options; raise `UsageError` if an option is invalid."""
    values = {
        name: _as_list(value) if name in ("kinds", "megabytes") else value for name, value in options.items()
    }
    if "cell_memory" in values:
        values["cell_memory"] = whole(values["cell_memory"])
    unknown = sorted(set(values) - set(RlmOptions.__struct_fields__))
    if unknown:
        raise UsageError(
            f"rlm has no option {', '.join(unknown)}; its options are {', '.join(RlmOptions.__struct_fields__)}"
        )
    try:
        return msgspec.convert(values, RlmOptions)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        raise UsageError(f"rlm: {error}") from None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int | float) else value
