"""Checks of adapters: the trainer's version, and whether rollouts fit what the trainer assumes about them.

A trainer computes log probabilities with its own tokenizer, context length, temperature, top-p and top-k. If the
policy samples with other values, training still runs and the loss may fall, but the gradient is wrong.

Guarantees:
- A version of the trainer outside the tested range is named in a warning, with the range.
- Sampling parameters are sent explicitly, so that defaults of a model or server (such as a
  `generation_config.json` with top-p 0.95) do not replace them. Parameters that differ from the trainer's raise
  `UsageError`.
- Settings of the trainer that change between two calls raise `UsageError`.
- A token ID outside the vocabulary of the trainer's tokenizer, and a sequence longer than the trainer takes, raise
  `UsageError`, unless the adapter clips it. So does a tokenizer that decodes the first plain reply to another text
  than was recorded.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rookery.core import Group, Limits, Rollout, Sampling, Truncated, Turn, UsageError
from rookery.journal import TokenReader, load_turns
from rookery.training.rows import Row, keep_one_row, split_by_rollout

log = logging.getLogger("rookery.adapters")

MIN_COMPARED = 3
"""Number of characters that a reply must have for a comparison of its text."""
OWN_PARAMETERS = frozenset({"logprobs", "n", "skip_special_tokens", "include_stop_str_in_output"})
"""Sampling parameters of trainers that Rookery's upstreams set themselves."""
_NAMED = ("temperature", "top_p", "top_k", "max_tokens", "seed")


def check_version(package: str, oldest: str, before: str) -> str:
    """Return the installed version of a package; log a warning unless it is at least `oldest` and below `before`.

    Return an empty string if the package is not installed.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        return ""
    if not parse_release(oldest) <= parse_release(found) < parse_release(before):
        log.warning(
            "%s %s is installed, but the adapter was tested with versions from %s to before %s only: compare "
            "rewards and lengths in its log with those of `rookery show`",
            package,
            found,
            oldest,
            before,
        )
    return found


def parse_release(text: str) -> tuple[int, ...]:
    matched = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, matched[0].split("."))) if matched else ()


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise `UsageError` unless `value` is one of `choices`. `name` is the name of the option."""
    if value not in choices:
        raise UsageError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}")


def parse_sampling(params: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters that a trainer sends with a request, without those in `OWN_PARAMETERS`.

    Parameters that `Sampling` has no field for are passed to the inference engine. Invalid values raise
    `msgspec.ValidationError`.
    """
    given = {name: value for name, value in params.items() if value is not None and name not in OWN_PARAMETERS}
    stop = given.pop("stop", ())
    known = {name: given.pop(name) for name in _NAMED if name in given}
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    return msgspec.convert({**known, "stop": stop, "extra": given}, Sampling)


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Assumptions of a trainer about the rollouts that it trains on."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Number of tokens to sample from; -1 for all."""
    max_tokens: int | None = None
    """Maximum number of tokens of one model call."""
    context: int | None = None
    """Number of tokens of the longest sequence that the trainer takes."""
    clips: bool = False
    """True if the adapter clips longer sequences to `context` tokens. Otherwise they raise `UsageError`."""
    extra: dict[str, Any] = {}
    """Other sampling parameters of the trainer, which are passed to the inference engine."""

    def __post_init__(self) -> None:
        if self.top_k <= 0 and self.top_k != -1:  # trainers write "all tokens" as 0 or -1
            msgspec.structs.force_setattr(self, "top_k", -1)

    @property
    def key(self) -> bytes:
        """The settings as bytes, for adapters that have an engine for each of the trainer's settings."""
        return msgspec.msgpack.encode(self)

    def settle_sampling(self, wanted: Sampling | dict[str, Any] | None) -> Sampling:
        """Return explicit sampling parameters for the engine: those of the trainer, and others of `wanted`.

        Raise `UsageError` if `wanted` contradicts the trainer.
        """
        wanted = msgspec.convert(wanted, Sampling) if isinstance(wanted, dict) else wanted or Sampling()
        for name in ("temperature", "top_p", "top_k"):
            asked, assumed = getattr(wanted, name), getattr(self, name)
            if name == "top_k" and asked is not None and asked <= 0:
                asked = -1
            if asked is not None and not math.isclose(asked, assumed):
                raise UsageError(
                    f"the policy would sample with {name} {asked:g}, but the trainer computes with {assumed:g}: "
                    "use the same for both"
                )
        explicit = Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            extra=self.extra,
        )
        return wanted.over(explicit)

    def settle_limits(self, wanted: Limits | dict[str, Any] | None) -> Limits:
        """Return the limits for the engine, with the trainer's context length if `wanted` has none.

        Raise `UsageError` if the context length of `wanted` is longer than the trainer takes.
        """
        limits = _parse_limits(wanted)
        if self.context is None:
            return limits
        if limits.context is not None and limits.context > self.context:
            raise UsageError(
                f"limits.context is {limits.context} tokens, but the trainer takes sequences of up to "
                f"{self.context}: reduce the limit, or raise the maximum length in the trainer"
            )
        return limits.over(Limits(context=self.context))

    def accept_longer_context(
        self, wanted: Limits | dict[str, Any] | None, warn: Callable[[str], None]
    ) -> "TrainerSettings":
        """Return the settings with the context length of `wanted` if that is longer, after a warning.

        For a trainer without a limit of its own, whose `context` is derived from the configuration of its model.
        """
        context = _parse_limits(wanted).context
        if self.context is None or context is None or context <= self.context:
            return self
        warn(
            f"limits.context is {context} tokens, but the configuration of the trainer's model names a maximum of "
            f"{self.context}: check that the model was made for longer sequences"
        )
        return msgspec.structs.replace(self, context=context)


def _parse_limits(wanted: Limits | dict[str, Any] | None) -> Limits:
    return msgspec.convert(wanted, Limits) if isinstance(wanted, dict) else wanted or Limits()


def get_model_context(config: Any) -> int | None:
    """Return the maximum sequence length of a model from its transformers configuration; None if it is not known.

    It is that of the text model if there are several, extended by the scaling of rotary position embeddings. It is
    not known if the model was scaled from an unknown length or by an unknown factor.
    """
    config = getattr(config, "text_config", None) or config
    length: int | None = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # Some models have parameters for each type of layer.
    for part in [part for part in scaling.values() if isinstance(part, Mapping)] or [scaling]:
        if length and part.get("rope_type", part.get("type", "default")) != "default":
            scaled = (part.get("factor") or 0) * (part.get("original_max_position_embeddings") or 0)
            length = max(length, int(scaled)) if scaled else None
    return length if length and length > 0 else None


def keep_one_segment(rows: Sequence[Row], segments: str, trainer: str, advice: str) -> list[Row]:
    """Return one row per rollout, for a trainer that takes one sequence: the one with the most trained tokens.

    With `segments="error"`, raise `UsageError` for a rollout with several. `advice` says what helps.
    """
    for part in split_by_rollout(rows):
        if segments == "error" and len(part) > 1:
            raise UsageError(
                f"rollout {part[0].rollout} of task {part[0].task} has {len(part)} segments, but {trainer} takes "
                f"one sequence per rollout: {advice}, or segments='most'"
            )
    return keep_one_row(rows)


class TokenDecoder(Protocol):
    """The part of a transformers tokenizer that is compared."""

    def __len__(self) -> int: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str: ...


class RolloutChecks:
    """Compares the rollouts that an adapter passes on with what its trainer assumes."""

    def __init__(self, trainer: str, settings: TrainerSettings, tokenizer: TokenDecoder | None = None) -> None:
        self.trainer = trainer
        self.settings = settings
        self._tokenizer = tokenizer
        self._compared = tokenizer is None

    def check_unchanged(self, now: TrainerSettings) -> None:
        """Raise `UsageError` if a setting of the trainer has changed since the start."""
        for name in self.settings.__struct_fields__:
            before, after = getattr(self.settings, name), getattr(now, name)
            if before != after:
                raise UsageError(
                    f"{self.trainer} changed {name} from {before} to {after} after the engine was opened: "
                    "rollouts are still sampled with the former value; set it before training starts"
                )

    def check_groups(self, groups: Iterable[Group], folder: Path | None) -> None:
        """Raise `UsageError` if the tokens of these groups do not fit the trainer.

        The first reply with text is also decoded and compared. `folder` is the directory of the run.
        """
        for group in groups:
            for rollout in group.rollouts:
                if rollout.valid:
                    self._check_tokens(rollout)
                    if not self._compared and folder is not None:
                        with TokenReader(folder / "tokens") as reader:
                            self._compared = any(map(self._compare_text, load_turns(rollout, reader)))

    def _check_tokens(self, rollout: Rollout) -> None:
        context = self.settings.context
        # Its last reply may be too long; see `clip_rows`.
        clipped = self.settings.clips or rollout.outcome == Truncated("context")
        for segment in rollout.segments:
            if context is not None and len(segment) > context and not clipped:
                raise UsageError(
                    f"rollout {rollout.id} has a sequence of {len(segment)} tokens, but {self.trainer} takes up "
                    f"to {context}: set limits.context to {context}, or raise the maximum length in the trainer"
                )
            if self._tokenizer is not None and segment.tokens:
                largest = max(memoryview(segment.tokens).cast("i"))
                if largest >= len(self._tokenizer):
                    raise UsageError(
                        f"rollout {rollout.id} has the token ID {largest}, but the tokenizer of {self.trainer} "
                        f"has {len(self._tokenizer)} tokens: the policy has another tokenizer"
                    )

    def _compare_text(self, turn: Turn) -> bool:
        """Return whether a turn could be compared. Raise `UsageError` if the tokenizer decodes it differently."""
        recorded = turn.response.text.strip()
        plain = not turn.response.tool_calls and not turn.response.reasoning and "\ufffd" not in recorded
        if turn.role != "policy" or not turn.sampled or not plain or len(recorded) < MIN_COMPARED:
            return False
        assert self._tokenizer is not None
        decoded = self._tokenizer.decode(memoryview(turn.sampled).cast("i").tolist(), skip_special_tokens=True)
        if recorded not in decoded:
            raise UsageError(
                f"the tokenizer of {self.trainer} decodes the reply {recorded[:60]!r} as {decoded[:60]!r}: the "
                "policy has another tokenizer"
            )
        return True
