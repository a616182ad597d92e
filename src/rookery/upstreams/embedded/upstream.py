"""Upstream `embedded`: a small model that runs inside this process, so that a first run needs no server.

Guarantees:
- every reply is sampled from the model, token by token; no reply is prepared in advance;
- the same prompt, seed and weights give the same reply, whatever else is being sampled;
- weights that are replaced on disk are used by calls that start afterwards. Their policy version is the one that
  was set with `version`, else the one in their file or, if that is not higher than the current one, the next
  number;
- the deltas (pieces) of a streamed reply, joined, are the reply; a slow consumer does not delay other calls;
- `freeze("abort")` ends all calls with the tokens sampled so far. The other pause modes do nothing, because a
  sequence keeps the weights that it started with;
- cancelling a call ends its sampling and frees its slot;
- the deadline covers the reply, not the wait for a slot, which is reported as `queued`.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from rookery.core import Finish, Sampling, Truncation, UpstreamError, UsageError, floats, ints
from rookery.upstreams.concurrency_gate import ConcurrencyGate
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.batch import SLOTS, SamplingJob
from rookery.upstreams.embedded.inference_thread import InferenceThread
from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.sampler import PLAIN, TokenChoice
from rookery.upstreams.embedded.streaming import DecodedDelta, DeltaDecoder
from rookery.upstreams.embedded.weights import TENSORS, Weights
from rookery.upstreams.openai_format import parse_message
from rookery.upstreams.protocol import (
    CallDelta,
    Delta,
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    PauseMode,
    UpstreamConfig,
    UpstreamInfo,
)

KIND: Final = "embedded"
POLICY: Final = "policy.safetensors"
ONE_CALL: Final = "parallel_tool_calls"
"""The only option of `sampling.extra` that has an effect. If it is false, a reply has at most one tool call."""
_NO_EFFECT: Final = {"frequency_penalty": 0.0, "min_p": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Sampling options of other inference engines, with the values at which they change nothing."""


class PreparedRequest(NamedTuple):
    """A validated request, converted to token IDs and a sampling job."""

    prompt: list[int]
    reply_prefix: str
    """The start of a tool call that the prompt ends with, if the tool choice requires a call; otherwise empty."""
    job: SamplingJob
    llama: Llama
    """The model that the request was prepared for."""


class EmbeddedUpstream:
    """Upstream that runs a model in this process.

    The address `embedded` selects the bundled weights, `embedded:PATH` the weights at PATH.
    """

    path_prefixes: ClassVar = (KIND,)

    def __init__(self, config: UpstreamConfig, *, key: str | None = None) -> None:  # noqa: ARG002  (no key needed)
        if len(config.urls) > 1:
            raise UsageError("the embedded policy has no replicas: name it once, as --policy embedded[:PATH]")
        if config.concurrency is not None and config.concurrency < 1:
            raise UsageError("the concurrency of an upstream must be at least 1")
        where = config.urls[0] if config.urls else KIND
        kind, _, path = where.partition(":")
        if kind != KIND:
            raise UsageError(
                f"{where!r} is not the embedded policy: use embedded, or embedded:PATH for other weights"
            )
        self.config = config
        self.name = KIND
        self.accepts_tokens = True
        self.accepts_raw_json = False
        self.path = Path(path).expanduser() if path else None
        self.model = (self.path.name or str(self.path)) if self.path is not None else KIND
        self._check_sampling(config.sampling)
        self._loaded_stamp = self._weights_stamp()
        weights = _check_vocabulary(Weights.load(self.path)) if self.path is not None else load_builtin_weights()
        self.slots = min(SLOTS, config.concurrency or SLOTS)
        self.service = InferenceThread(Llama(weights), slots=self.slots)
        self._gate = ConcurrencyGate(self.slots)
        self._load_lock = asyncio.Lock()
        self._pending_version: int | None = None
        """The policy version of new weights that are on disk and not loaded yet; None if there are none."""
        self._in_flight: set[asyncio.Task[int]] = set()
        self._aborted: set[asyncio.Task[int]] = set()

    @property
    def version(self) -> int:
        """The policy version of the weights that serve the next call.

        Setting it names the version of weights that were just written to disk, or else of the loaded weights.
        """
        return self._pending_version if self._pending_version is not None else self.service.llama.version

    @version.setter
    def version(self, version: int) -> None:
        if self._weights_stamp() in (None, self._loaded_stamp):
            self.service.llama.version = version
        else:  # new weights were written and will be loaded before the next call
            self._pending_version = version

    @property
    def in_flight(self) -> int:
        """The number of calls that are sampling or queued."""
        return len(self._in_flight)

    @property
    def context(self) -> int:
        return self.service.llama.context

    @classmethod
    def own_rendering(cls, config: UpstreamConfig) -> dict[str, Any]:  # noqa: ARG003  (the same for all weights)
        return {"name": KIND}

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:  # noqa: ARG002  (does not wait)
        if self.config.model not in ("", self.model):
            raise UpstreamError(
                f"the embedded policy serves {self.model!r}, not the requested model {self.config.model!r}",
                cause="upstream.rejected",
            )
        about = {"version": self.version, "parameters": self.service.llama.shape.parameters}
        return UpstreamInfo(
            url=self.config.urls[0] if self.config.urls else KIND,
            models=(self.model,),
            context=self.context,
            details=about,
        )

    async def swap(self, weights: Weights) -> None:
        """Use these weights, and their policy version, for calls that start from now on. Calls in flight keep
        theirs."""
        _check_vocabulary(weights)
        async with self._load_lock:
            await asyncio.to_thread(self.service.swap, weights)

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:  # noqa: ARG002  (does not wait)
        """If the mode is `abort`, end the calls in flight with the tokens sampled so far and return True; else
        return False."""
        if mode == "abort":
            self._aborted |= self._in_flight
            for task in self._in_flight:
                task.cancel()
        return mode == "abort"

    async def thaw(self, *, timeout: float) -> None:
        """Do nothing, because `freeze` does not stop later calls."""

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        await self.refresh()
        prepared = self.prepare(request)
        async with self.slot(on_wait) as queued:
            llama = self.choose_llama(prepared)
            version = llama.version
            publisher = None if on_delta is None else DeltaPublisher(prepared, on_delta)
            notify = None if publisher is None else publisher.notify
            task = asyncio.create_task(self.sample(prepared, timeout=timeout, llama=llama, on_tokens=notify))
            self._in_flight.add(task)
            try:
                if publisher is not None:
                    await publisher.publish_until(task)
                await asyncio.wait((task,))
                aborted = task.cancelled() and task in self._aborted
                if not aborted:
                    task.result()
            finally:
                self._in_flight.discard(task)
                self._aborted.discard(task)
                if not task.done():
                    task.cancel()
                    await asyncio.wait((task,))
        done = build_reply(prepared, version=version, queued=queued, replica=self.model, aborted=aborted)
        if publisher is not None:
            await publisher.publish_rest(done)
        return done

    @asynccontextmanager
    async def slot(self, on_wait: OnWait | None = None) -> AsyncIterator[float]:
        """Hold one of the slots for concurrent sequences during the block. Yield the seconds spent waiting for it.

        Slots are granted in the order of the requests.
        """
        queued = await self._gate.acquire(on_wait)
        try:
            yield queued
        finally:
            self._gate.release()

    def choose_llama(self, prepared: PreparedRequest) -> Llama:
        """Return the model for a request that starts now.

        This is the newest one, unless its context or vocabulary differs from that for which the request was
        prepared.
        """
        now, then = self.service.llama, prepared.llama
        fits = (now.context, now.shape.vocab_size) == (then.context, then.shape.vocab_size)
        return now if fits else then

    async def sample(
        self,
        prepared: PreparedRequest,
        *,
        timeout: float,
        llama: Llama,
        on_tokens: Callable[[SamplingJob], None] | None = None,
    ) -> int:
        """Sample the reply with the model `llama`, and return the policy version that sampled it.

        The caller must hold a slot. `on_tokens` is called with the job on this event loop when there are new
        tokens.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self.service.run(prepared.job, on_tokens, llama=llama)
        except TimeoutError as error:
            message = f"the embedded policy did not end its answer within {timeout:g} s"
            raise UpstreamError(message, cause="upstream.timeout") from error

    def prepare(self, request: ModelRequest) -> PreparedRequest:
        """Validate a request, and convert it to token IDs and sampling parameters.

        Raises `UpstreamError` if it is invalid, and `Truncation` if the prompt does not fit the context.
        """
        if bool(request.messages) == bool(request.tokens):
            raise UpstreamError("a call needs either messages or tokens", cause="upstream.rejected")
        sampling = request.sampling
        try:
            choice = self._check_sampling(sampling)
        except UsageError as error:
            raise UpstreamError(str(error), cause="upstream.rejected") from None
        begun = ""
        llama = self.service.llama
        if request.messages:
            try:
                messages = [parse_message(message) for message in request.messages]
            except ValueError as error:
                raise UpstreamError(str(error), cause="upstream.rejected") from None
            tools = list(request.tools.schemas)
            prompt, begun = chat.prompt(messages, tools, request.tool_choice)
            if not request.tools or request.tool_choice == "none":
                choice = choice._replace(banned_id=chat.CALL)
        else:
            prompt = memoryview(request.tokens).cast("i").tolist()
            words = llama.shape.vocab_size
            if not all(0 <= token < words for token in prompt):
                raise UpstreamError(
                    f"the prompt has token IDs outside 0 to {words - 1}", cause="upstream.rejected"
                )
        if sampling.extra.get(ONE_CALL) is False and choice.banned_id != chat.CALL:
            marks = (token for token in reversed(prompt) if token >= chat.BEGIN)
            begun_call = next(marks, None) == chat.CALL  # the tool choice put it into the prompt
            choice = (
                choice._replace(banned_id=chat.CALL) if begun_call else choice._replace(single_use_id=chat.CALL)
            )
        if len(prompt) >= llama.context:
            raise Truncation(
                "context",
                f"the prompt is too long: it has {len(prompt)} tokens, and with its answer {llama.context} fit",
            )
        seed = sampling.seed if sampling.seed is not None else request.seed
        job = SamplingJob(
            prompt,
            max_tokens=sampling.max_tokens if sampling.max_tokens is not None else llama.context,
            seed=secrets.randbits(63) if seed is None else seed,
            choice=choice,
            ends=chat.ENDS,
            stop=tuple(text.encode("utf-8", "replace") for text in sampling.stop),
            alternatives=request.top_logprobs,
        )
        return PreparedRequest(prompt, begun, job, llama)

    async def close(self) -> None:
        """End the inference thread; calls in flight fail. Closing twice is fine."""
        await self.service.close()

    # ---- internal

    def _check_sampling(self, sampling: Sampling) -> TokenChoice:
        named = sampling.extra.items()
        if strange := sorted(name for name, value in named if name != ONE_CALL and _NO_EFFECT.get(name) != value):
            raise UsageError(f"the embedded policy has no sampling option {', '.join(strange)}")
        parallel = sampling.extra.get(ONE_CALL)
        if parallel is not None and not isinstance(parallel, bool):
            raise UsageError(f"{ONE_CALL} must be true or false")
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        top_p = 1.0 if sampling.top_p is None else sampling.top_p
        top_k = 0 if sampling.top_k is None else max(0, sampling.top_k)
        if not 0.0 <= temperature <= 100.0 or not 0.0 < top_p <= 1.0:
            raise UsageError("temperature must be from 0 to 100, and top_p above 0 and at most 1")
        if sampling.max_tokens is not None and sampling.max_tokens < 1:
            raise UsageError("max_tokens must be at least 1")
        return PLAIN if (temperature, top_p, top_k) == (1.0, 1.0, 0) else TokenChoice(temperature, top_p, top_k)

    def _weights_stamp(self) -> tuple[int, int, int] | None:
        """Return modification time, inode and size of the weights file, which change when it is replaced.

        None for the bundled weights, and if the file does not exist.
        """
        if self.path is None:
            return None
        try:
            found = (self.path / TENSORS if self.path.is_dir() else self.path).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    async def refresh(self) -> None:
        """Load the weights file if it was replaced since it was loaded. Raises `UpstreamError` if it is
        invalid."""
        if self.path is None or self._weights_stamp() in (None, self._loaded_stamp):
            return
        async with self._load_lock:
            stamp = self._weights_stamp()
            if stamp in (None, self._loaded_stamp):
                return
            try:
                weights = _check_vocabulary(await asyncio.to_thread(Weights.load, self.path))
            except (
                UsageError
            ) as error:  # they were valid at the start of the run, so this is an infrastructure failure
                raise UpstreamError(str(error), cause="upstream.error") from error
            if self._pending_version is not None:
                weights.version = self._pending_version
            elif weights.version <= self.version:
                weights.version = self.version + 1  # their writer does not number them
            await asyncio.to_thread(self.service.swap, weights)
            self._loaded_stamp = stamp
            self._pending_version = None


class DeltaPublisher:
    """Pass the deltas (pieces) of one reply to `on_delta` while it is sampled.

    If `on_delta` is slow, tokens wait in the job, which holds no more than the reply.
    """

    def __init__(self, prepared: PreparedRequest, on_delta: OnDelta) -> None:
        job = prepared.job
        self._prepared = prepared
        self._on_delta = on_delta
        self._deltas = DeltaDecoder(
            prefix=prepared.reply_prefix, prompt_length=len(prepared.prompt), stop=job.stop
        )
        self._wake = asyncio.Event()
        self._published = 0
        self._prompt = ints(prepared.prompt)

    def notify(self, _: object) -> None:
        self._wake.set()

    async def publish_until(self, task: asyncio.Task[int]) -> None:
        """Pass deltas to `on_delta` until the sampling task or the sequence ends."""
        task.add_done_callback(self.notify)
        job = self._prepared.job
        while True:
            await self._wake.wait()
            self._wake.clear()
            if task.done() or job.finish:
                return
            count = min(len(job.tokens), len(job.logprobs))
            if count > self._published:
                await self._publish(self._deltas.feed(job.tokens, count), job.tokens, job.logprobs, count)

    async def publish_rest(self, done: ModelReply) -> None:
        """Pass the rest of the finished reply `done` to `on_delta`."""
        job = self._prepared.job
        count = len(done.sampled) // 4
        text = min(job.text_tokens, count) if job.finish else count
        decoded = self._deltas.finish(job.tokens[:count], text)
        if decoded or count > self._published or self._prompt:
            await self._publish(decoded, job.tokens, job.logprobs, count)

    async def _publish(self, decoded: DecodedDelta, tokens: list[int], logprobs: list[float], count: int) -> None:
        first, self._published = self._published, count
        prompt, self._prompt = self._prompt, b""
        calls = tuple(CallDelta(call.index, call.id, call.name, call.arguments) for call in decoded.calls)
        sampled, chances = ints(tokens[first:count]), floats(logprobs[first:count])
        await self._on_delta(Delta(decoded.text, "", calls, sampled=sampled, logprobs=chances, prompt=prompt))


def build_reply(
    prepared: PreparedRequest, *, version: int, queued: float, replica: str, aborted: bool = False
) -> ModelReply:
    """Return the reply of a sequence that has ended or, if `aborted`, was ended early by `freeze`."""
    job = prepared.job
    count, text = len(job.tokens), job.text_tokens
    finish: Finish = "length" if job.finish == "length" else "stop"
    if aborted and not job.finish:
        finish = "abort"
        count = min(len(job.tokens), len(job.logprobs))
        if count and job.tokens[count - 1] in job.ends:
            count -= 1  # it has not ended the sequence yet, and will be sampled again
        text = count
    message = chat.answer(job.tokens[:text], prepared.reply_prefix, at=len(prepared.prompt))
    if finish == "stop" and message.tool_calls:
        finish = "tool_calls"
    return ModelReply(
        message=message,
        finish=finish,
        prompt=ints(prepared.prompt),
        sampled=ints(job.tokens[:count]),
        logprobs=floats(job.logprobs[:count]),
        tops=tuple(job.tops[:count]),
        version=version,
        prompt_tokens=len(prepared.prompt),
        sampled_tokens=count,
        queued=queued,
        replica=replica,
    )


def load_builtin_weights() -> Weights:
    """Load the weights of the small policy that is part of this package."""
    return Weights.from_bytes((files(__package__) / POLICY).read_bytes())


def _check_vocabulary(weights: Weights) -> Weights:
    """Return the weights. Raise `UsageError` if their vocabulary is too small for the chat format."""
    known = weights.shape.vocab_size
    if known < chat.VOCAB:
        raise UsageError(
            f"the vocabulary of these weights has {known} tokens, but the embedded chat format needs {chat.VOCAB}"
        )
    return weights
