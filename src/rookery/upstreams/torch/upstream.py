"""Upstream `torch`: a transformers model that runs inside this process, on a GPU or a CPU.

The address is `hf:PATH`, where PATH is a folder in the format of transformers or a GGUF file. Runs in runner
processes and gateway shards; each process has its own copy of the model. torch is imported when the model is
loaded, before the first call.

Guarantees:
- every token carries its log probability under the model (before temperature and filters), and the policy
  version that sampled it;
- the same prompt, seed and weights give the same reply, up to the rounding of matrix products in a batch;
- the token that ended a reply is one of its sampled tokens, as with vLLM and SGLang;
- the deltas (pieces) of a streamed reply, joined, are the reply; a slow consumer does not delay other calls;
- `freeze("keep")` holds calls between two tokens until `thaw`; `freeze("abort")` ends them with the tokens so
  far;
- cancelling a call ends its sampling and frees its slot;
- the deadline covers the reply, not the wait for a slot, for the model to be loaded or for `thaw`;
- at most `MAX_QUEUE` calls wait for a slot; further ones are refused with `upstream.overloaded`.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import msgspec

from rookery.core import Finish, Message, Sampling, Span, Truncation, UpstreamError, UsageError, floats, ints
from rookery.upstreams.concurrency_gate import ConcurrencyGate
from rookery.upstreams.openai_format import parse_message
from rookery.upstreams.protocol import (
    Delta,
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    PauseMode,
    TopLogprobs,
    UpstreamConfig,
    UpstreamInfo,
)
from rookery.upstreams.structured_output import token_options
from rookery.upstreams.torch.shared_sampler import SharedSampler, parse_address
from rookery.upstreams.torch.text import TextDecoder

if TYPE_CHECKING:
    from rookery.upstreams.torch.batch import SampledSequence
    from rookery.upstreams.torch.sampler import Sampler

log = logging.getLogger("rookery.upstreams")

KIND: Final = "torch"
MAX_QUEUE: Final = 4096
"""Maximum number of calls that wait for a slot."""
_OPTIONS: Final = ("ignore_eos", "min_p", "stop_token_ids")
"""The options that `sampling.extra` may contain."""


class SamplingOptions(NamedTuple):
    """Validated sampling parameters of a call."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_ids: frozenset[int]
    ignore_eos: bool


class PreparedCall(NamedTuple):
    """A validated request: the sequence to sample, and the stop strings of its text."""

    sequence: "SampledSequence"
    stop: tuple[str, ...]


class TorchUpstream:
    """Upstream that samples from a transformers model in this process."""

    path_prefixes: ClassVar = ("hf", KIND)

    def __init__(self, config: UpstreamConfig, *, key: str | None = None) -> None:  # noqa: ARG002  (no key needed)
        if len(config.urls) != 1:
            raise UsageError("a torch model has no replicas: name it once, as --policy hf:PATH")
        if config.concurrency is not None and config.concurrency < 1:
            raise UsageError("the concurrency of an upstream must be at least 1")
        parse_sampling(config.sampling)
        self.config = config
        self.name = KIND
        self.accepts_tokens = True
        self.accepts_raw_json = False
        self.shared = SharedSampler(config.urls[0])
        self.model = self.shared.address.path.name
        self.sampler: Sampler | None = None
        self.gate: ConcurrencyGate | None = None
        self._load_lock = asyncio.Lock()
        self._version = 0
        """The policy version before the model is loaded."""
        self._frozen = False
        """True if the sampler has to be frozen as soon as the model is loaded."""

    @property
    def version(self) -> int:
        """The policy version of the weights. Setting it renames the version of the current weights."""
        return self._version if self.sampler is None else self.sampler.version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        if self.sampler is not None:
            self.sampler.version = version

    @classmethod
    def own_rendering(cls, config: UpstreamConfig) -> dict[str, Any]:
        """Return the tokenizer, which is in the folder of the model."""
        return {"tokenizer": str(parse_address(config.urls[0]).path)} if config.urls else {}

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:  # noqa: ARG002  (does not wait)
        if self.config.model not in ("", self.model):
            raise UpstreamError(
                f"the torch upstream serves {self.model!r}, not the requested model {self.config.model!r}",
                cause="upstream.rejected",
            )
        details = {} if self.sampler is None else msgspec.to_builtins(self.sampler.stats())
        context = self.shared.address.context if self.sampler is None else self.sampler.context
        return UpstreamInfo(url=self.config.urls[0], models=(self.model,), context=context, details=details)

    async def open(self) -> "Sampler":
        """Return the sampler, after loading the model if necessary. Raises `UpstreamError` if that fails."""
        if self.sampler is None:
            async with self._load_lock:
                if self.sampler is None:
                    if self.config.share > 1:
                        log.warning(
                            "each of %d processes loads its own copy of %s; use --runners 0 to have one copy",
                            self.config.share,
                            self.model,
                        )
                    try:
                        sampler = await asyncio.to_thread(self.shared.open)
                    except UsageError as error:
                        raise UpstreamError(str(error), cause="upstream.rejected") from error
                    if self._frozen:
                        await sampler.freeze()
                    self.gate = ConcurrencyGate(min(sampler.slots, self.config.concurrency or sampler.slots))
                    sampler.version = max(sampler.version, self._version)
                    self.sampler = sampler
        return self.sampler

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        if mode == "drain":
            return False
        self._frozen = True
        if self.sampler is not None:
            async with _deadline(timeout, "pause"):
                await self.sampler.freeze(abort=mode == "abort")
        return True

    async def thaw(self, *, timeout: float) -> None:
        self._frozen = False
        if self.sampler is not None:
            async with _deadline(timeout, "resume"):
                await self.sampler.thaw()

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        sampler, loading = await self._open_and_report(on_wait)
        call = self.prepare(request, sampler)
        async with self._slot(on_wait) as queued:
            version = sampler.version
            publisher = None if on_delta is None else DeltaPublisher(call, sampler.tokenizer, on_delta)
            notify = None if publisher is None else publisher.notify
            task = asyncio.create_task(_sample(sampler, call.sequence, timeout, notify))
            try:
                if publisher is not None:
                    await publisher.publish_until(task)
                await asyncio.wait((task,))
                task.result()
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait((task,))
        if publisher is not None:
            text = await publisher.publish_rest()
        else:
            text = TextDecoder(sampler.tokenizer, call.stop).feed(call.sequence.tokens, final=True)
        return build_reply(
            call.sequence,
            text,
            started=version,
            updated=sampler.version != version,
            queued=loading + queued,
            replica=self.model,
        )

    def prepare(self, request: ModelRequest, sampler: "Sampler") -> PreparedCall:
        """Validate a request, and convert it to a sequence.

        Raises `UpstreamError` if it is invalid, and `Truncation` if the prompt does not fit the context.
        """
        from rookery.upstreams.torch.batch import SampledSequence
        from rookery.upstreams.torch.token_sampling import TokenChoice

        if bool(request.messages) == bool(request.tokens):
            raise UpstreamError("a call needs either messages or tokens", cause="upstream.rejected")
        sampling = request.sampling
        try:
            options = parse_sampling(sampling)
        except UsageError as error:
            raise UpstreamError(str(error), cause="upstream.rejected") from None
        prompt = memoryview(request.tokens).cast("i").tolist() if request.tokens else render(request, sampler)
        if len(prompt) >= sampler.context:
            raise Truncation(
                "context",
                f"the prompt is too long: it has {len(prompt)} tokens, and with its reply {sampler.context} fit",
            )
        seed = sampling.seed if sampling.seed is not None else request.seed
        stop = tuple(text for text in sampling.stop if text)
        ends = options.stop_ids | set(request.stop_ids)
        decoder = TextDecoder(sampler.tokenizer, stop)

        def find_stop(tokens: list[int]) -> bool:
            decoder.feed(tokens)
            return decoder.stopped

        sequence = SampledSequence(
            prompt,
            max_tokens=sampling.max_tokens if sampling.max_tokens is not None else sampler.context,
            seed=secrets.randbits(63) if seed is None else seed,
            choice=TokenChoice(options.temperature, options.top_p, options.top_k, options.min_p),
            ends=ends if options.ignore_eos else ends | sampler.end_tokens,
            find_stop=find_stop if stop else None,
            alternatives=request.top_logprobs,
        )
        return PreparedCall(sequence, stop)

    async def close(self) -> None:
        """Free the model, unless something else in this process uses it; calls in flight fail then. Closing twice
        is fine."""
        await self.shared.close()

    # ---- internal

    async def _open_and_report(self, on_wait: OnWait | None) -> "tuple[Sampler, float]":
        """Return the sampler and the seconds that loading it took, which are reported to `on_wait`."""
        if self.sampler is not None:
            return self.sampler, 0.0
        since = asyncio.get_running_loop().time()
        if on_wait is not None:
            on_wait(True)
        try:
            sampler = await self.open()
        finally:
            if on_wait is not None:
                on_wait(False)
        return sampler, asyncio.get_running_loop().time() - since

    @asynccontextmanager
    async def _slot(self, on_wait: OnWait | None) -> AsyncIterator[float]:
        """Hold one of the slots during the block. Yield the seconds spent waiting for it."""
        assert self.gate is not None
        if self.gate.waiting >= MAX_QUEUE:
            raise UpstreamError(
                f"the torch upstream refuses the call: {MAX_QUEUE} calls wait already", cause="upstream.overloaded"
            )
        queued = await self.gate.acquire(on_wait)
        try:
            yield queued
        finally:
            self.gate.release()


class DeltaPublisher:
    """Pass the deltas (pieces) of one reply to `on_delta` while it is sampled.

    If `on_delta` is slow, tokens wait in the sequence, which holds no more than the reply.
    """

    def __init__(self, call: PreparedCall, tokenizer: Any, on_delta: OnDelta) -> None:
        self._sequence = call.sequence
        self._decoder = TextDecoder(tokenizer, call.stop)
        self._on_delta = on_delta
        self._wake = asyncio.Event()
        self._published = 0
        self._text: list[str] = []

    def notify(self, _: object) -> None:
        self._wake.set()

    async def publish_until(self, task: "asyncio.Task[None]") -> None:
        """Pass deltas to `on_delta` until the sampling task ends."""
        task.add_done_callback(self.notify)
        while True:
            await self._wake.wait()
            self._wake.clear()
            if task.done() or self._sequence.finish:
                return
            await self._publish(len(self._sequence.logprobs), final=False)

    async def publish_rest(self) -> str:
        """Pass the rest of the finished reply to `on_delta`, and return the text of the whole reply."""
        await self._publish(len(self._sequence.logprobs), final=True)
        return "".join(self._text)

    async def _publish(self, count: int, *, final: bool) -> None:
        sequence, first = self._sequence, self._published
        text = self._decoder.feed(sequence.tokens[:count], final=final)
        if count == first and not text and first:
            return
        self._text.append(text)
        self._published = count
        # One delta for each policy version.
        starts = [at for at, _ in sequence.versions if first < at < count]
        for start, end in zip([first, *starts], [*starts, count], strict=True):
            last = end == count
            await self._on_delta(
                Delta(
                    text if last else "",
                    sampled=ints(sequence.tokens[start:end]),
                    logprobs=floats(sequence.logprobs[start:end]),
                    prompt=b"" if start else ints(sequence.prompt),
                    tops=_tops(sequence, start, end),
                    first=1,
                    version=_version_at(sequence, start),
                )
            )


async def _sample(sampler: "Sampler", sequence: "SampledSequence", timeout: float, notify: Any) -> None:
    """Sample a sequence to its end. Raises `UpstreamError` if it takes longer than `timeout` seconds.

    The time during which the sampler is frozen does not count.
    """
    loop = asyncio.get_running_loop()
    began, frozen = loop.time(), sampler.frozen_seconds()
    task = asyncio.create_task(sampler.run(sequence, notify))
    try:
        left = timeout
        while not task.done() and left > 0:
            await asyncio.wait((task,), timeout=left)
            left = timeout - (loop.time() - began) + (sampler.frozen_seconds() - frozen)
        if not task.done():
            raise UpstreamError(
                f"the torch model did not end its reply within {timeout:g} s", cause="upstream.timeout"
            )
        task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


def parse_sampling(sampling: Sampling) -> SamplingOptions:
    """Validate sampling parameters. Raises `UsageError`."""
    extra = dict(token_options(sampling.extra, None, KIND))
    if strange := sorted(extra.keys() - set(_OPTIONS)):
        raise UsageError(
            f"the torch upstream has no sampling option {', '.join(strange)}; it has {', '.join(_OPTIONS)}"
        )
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    min_p = extra.get("min_p", 0.0)
    stop_ids = extra.get("stop_token_ids", ())
    ignore_eos = extra.get("ignore_eos", False)
    if not 0.0 <= temperature <= 100.0 or not 0.0 < top_p <= 1.0:
        raise UsageError("temperature must be from 0 to 100, and top_p above 0 and at most 1")
    if isinstance(min_p, bool) or not isinstance(min_p, int | float) or not 0.0 <= min_p <= 1.0:
        raise UsageError("min_p must be a number from 0 to 1")
    if not isinstance(stop_ids, list | tuple) or not all(type(token) is int for token in stop_ids):
        raise UsageError("stop_token_ids must be a list of token IDs")
    if not isinstance(ignore_eos, bool):
        raise UsageError("ignore_eos must be true or false")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise UsageError("max_tokens must be at least 1")
    top_k = max(0, sampling.top_k or 0)
    return SamplingOptions(temperature, top_p, top_k, float(min_p), frozenset(stop_ids), ignore_eos)


def render(request: ModelRequest, sampler: "Sampler") -> list[int]:
    """Return the prompt of a request with messages, rendered with the tokenizer's chat template."""
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in (request.tools.schemas if request.tool_choice != "none" else ())
    ]
    try:
        messages = [_encode_message(parse_message(message)) for message in request.messages]
        text = sampler.tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        return list(sampler.tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # templates raise anything
        raise UpstreamError(
            f"the messages cannot be rendered with the model's chat template: {error}", cause="upstream.rejected"
        ) from error


def _encode_message(message: Message) -> dict[str, Any]:
    encoded: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        encoded["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _parse_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        encoded["tool_call_id"] = message.tool_call_id
    return encoded


def _parse_arguments(arguments: str) -> Any:
    """Return the arguments of a tool call as an object, which chat templates expect, or unchanged if they are not
    JSON."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments


def build_reply(
    sequence: "SampledSequence", text: str, *, started: int, updated: bool, queued: float, replica: str
) -> ModelReply:
    """Return the reply of a sequence that has ended.

    `started` is the policy version when the call started, and `updated` says whether it has changed since. Then a
    single span is reported, too, because the wrapper that pauses calls would otherwise guess which tokens the new
    version sampled.
    """
    count = len(sequence.tokens)
    starts = [*sequence.versions, (count, 0)]
    spans = tuple(Span(start, end, version) for (start, version), (end, _) in pairwise(starts))
    finish: Finish = sequence.finish or "abort"
    return ModelReply(
        message=Message("assistant", text),
        finish=finish,
        prompt=ints(sequence.prompt),
        sampled=ints(sequence.tokens),
        logprobs=floats(sequence.logprobs),
        version=min((span.version for span in spans), default=started),
        prompt_tokens=len(sequence.prompt),
        sampled_tokens=count,
        queued=queued,
        replica=replica,
        spans=spans if updated or len(spans) > 1 else (),
        tops=_tops(sequence, 0, count),
    )


def _tops(sequence: "SampledSequence", start: int, end: int) -> TopLogprobs:
    return tuple(tuple(row) for row in sequence.tops[start:end])


def _version_at(sequence: "SampledSequence", index: int) -> int | None:
    return next((version for at, version in reversed(sequence.versions) if at <= index), None)


@asynccontextmanager
async def _deadline(timeout: float, action: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError as error:
        raise UpstreamError(
            f"the torch sampler did not {action} within {timeout:g} s", cause="upstream.timeout"
        ) from error
