"""The `embedded` upstream: a small policy inside of this process, for a first run without a server.

Promises:
- nothing is canned: every answer is sampled from the model, token by token;
- same prompt, seed and weights, same answer, whatever else is under way;
- weights that are replaced on disk serve the calls that begin afterwards, with the version that their file says;
- cancelling a call ends its sampling and frees its place;
- the deadline covers the answer, not the waiting for a place, which is reported as `queued`.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

from rookery.core import Sampling, Truncation, UpstreamError, UsageError, floats, ints
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.batch import PLACES, Job
from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.sampler import PLAIN, Choice
from rookery.upstreams.embedded.service import Service
from rookery.upstreams.embedded.weights import TENSORS, Weights
from rookery.upstreams.protocol import (
    Delta,
    ModelReply,
    ModelRequest,
    News,
    PauseMode,
    UpstreamConfig,
    UpstreamInfo,
)

KIND: Final = "embedded"
POLICY: Final = "policy.safetensors"


class Asked(NamedTuple):
    """A request as the model sees it."""

    prompt: list[int]
    begun: str
    job: Job
    llama: Llama
    """The model that it was asked of."""


class EmbeddedUpstream:
    """`embedded`, with the policy that comes along, or `embedded:PATH`, with weights of your own."""

    def __init__(self, config: UpstreamConfig, *, key: str | None = None) -> None:  # noqa: ARG002  (no key needed)
        if len(config.urls) > 1:
            raise UsageError("the embedded policy has no replicas: name it once, as --policy embedded[:PATH]")
        if config.concurrency < 1:
            raise UsageError("an upstream needs a concurrency of at least 1")
        where = config.urls[0] if config.urls else KIND
        kind, _, path = where.partition(":")
        if kind != KIND:
            raise UsageError(f"{where!r} is no embedded policy: write embedded, or embedded:PATH with weights")
        self.config = config
        self.name = KIND
        self.tokens_in = True
        self.path = Path(path).expanduser() if path else None
        self.model = (self.path.name or str(self.path)) if self.path is not None else KIND
        self._check_sampling(config.sampling)
        self._seen = self._mark()
        weights = _fit(Weights.load(self.path)) if self.path is not None else builtin()
        self.places = min(PLACES, config.concurrency)
        self.service = Service(weights, places=self.places)
        self._places = asyncio.Semaphore(self.places)
        self._loading = asyncio.Lock()

    @property
    def version(self) -> int:
        """Of the weights that serve the next call."""
        return self.service.llama.version

    @property
    def context(self) -> int:
        return self.service.llama.context

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:  # noqa: ARG002  (there is nobody to wait for)
        if self.config.model not in ("", self.model):
            raise UpstreamError(
                f"the embedded policy serves {self.model!r}, not {self.config.model!r}", cause="upstream.rejected"
            )
        about = {"version": self.version, "parameters": self.service.llama.shape.parameters}
        return UpstreamInfo(
            url=self.config.urls[0] if self.config.urls else KIND,
            models=(self.model,),
            context=self.context,
            details=about,
        )

    async def swap(self, weights: Weights) -> None:
        """Calls that begin from now on are answered by these weights, with their version."""
        _fit(weights)
        async with self._loading:
            await asyncio.to_thread(self.service.swap, weights)

    async def freeze(self, mode: PauseMode, *, timeout: float) -> None:
        """A sequence keeps the weights that it began with: there is nothing to stop."""

    async def thaw(self, *, timeout: float) -> None:
        """As `freeze`."""

    async def complete(self, request: ModelRequest, *, timeout: float, news: News | None = None) -> ModelReply:
        await self.refresh()
        asked = self.ask(request)
        async with self.place() as queued:
            version = await self.sample(asked, timeout=timeout, llama=self.serving(asked))
        done = reply(asked, version=version, queued=queued, replica=self.model)
        if news is not None:
            await news(Delta(content=done.message.text, sampled=done.sampled, logprobs=done.logprobs))
        return done

    @asynccontextmanager
    async def place(self) -> AsyncIterator[float]:
        """One of the places, given in the order they were asked for; the seconds that it took to get."""
        queued = 0.0
        if self._places.locked():
            loop = asyncio.get_running_loop()
            since = loop.time()
            await self._places.acquire()
            queued = loop.time() - since
        else:
            await self._places.acquire()
        try:
            yield queued
        finally:
            self._places.release()

    def serving(self, asked: Asked) -> Llama:
        """The model for a request that begins now: the newest, where what was asked of another still fits it."""
        now, then = self.service.llama, asked.llama
        fits = (now.context, now.shape.vocab_size) == (then.context, then.shape.vocab_size)
        return now if fits else then

    async def sample(
        self, asked: Asked, *, timeout: float, llama: Llama, news: Callable[[Job], None] | None = None
    ) -> int:
        """Draws the answer, for who has a place; the version that drew it. `news` as in `Service.run`."""
        try:
            async with asyncio.timeout(timeout):
                return await self.service.run(asked.job, news, llama=llama)
        except TimeoutError as error:
            said = f"the embedded policy did not end its answer within {timeout:g} s"
            raise UpstreamError(said, cause="upstream.timeout") from error

    def ask(self, request: ModelRequest) -> Asked:
        """What the model is given for a request; raises what is wrong with it, in words."""
        if bool(request.messages) == bool(request.tokens):
            raise UpstreamError("a call needs either messages or tokens", cause="upstream.rejected")
        sampling = request.sampling.over(self.config.sampling)
        try:
            choice = self._check_sampling(sampling)
        except UsageError as error:
            raise UpstreamError(str(error), cause="upstream.rejected") from None
        begun = ""
        llama = self.service.llama
        if request.messages:
            prompt, begun = chat.prompt(request.messages, request.tools, request.tool_choice)
            if not request.tools or request.tool_choice == "none":
                choice = choice._replace(never=chat.CALL)
        else:
            prompt = memoryview(request.tokens).cast("i").tolist()
            words = llama.shape.vocab_size
            if not all(0 <= token < words for token in prompt):
                raise UpstreamError(f"the prompt has ids outside of 0 to {words - 1}", cause="upstream.rejected")
        if len(prompt) >= llama.context:
            raise Truncation(
                "context",
                f"the prompt is too long: it has {len(prompt)} tokens, and with its answer {llama.context} fit",
            )
        seed = sampling.seed if sampling.seed is not None else request.seed
        job = Job(
            prompt,
            most=sampling.max_tokens if sampling.max_tokens is not None else llama.context,
            seed=secrets.randbits(63) if seed is None else seed,
            choice=choice,
            ends=chat.ENDS,
            stop=tuple(text.encode("utf-8", "replace") for text in sampling.stop),
        )
        return Asked(prompt, begun, job, llama)

    async def close(self) -> None:
        """Ends what is under way. Closing twice is fine."""
        await self.service.close()

    # ------------------------------------------------------------------------------------------- pieces

    def _check_sampling(self, sampling: Sampling) -> Choice:
        if sampling.extra:
            raise UsageError(f"the embedded policy has no sampling option {', '.join(sorted(sampling.extra))}")
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        top_p = 1.0 if sampling.top_p is None else sampling.top_p
        top_k = 0 if sampling.top_k is None else max(0, sampling.top_k)
        if not 0.0 <= temperature <= 100.0 or not 0.0 < top_p <= 1.0:
            raise UsageError("a temperature is between 0 and 100, a top-p above 0 and at most 1")
        if sampling.max_tokens is not None and sampling.max_tokens < 1:
            raise UsageError("an answer needs at least one token: max_tokens is below 1")
        return PLAIN if (temperature, top_p, top_k) == (1.0, 1.0, 0) else Choice(temperature, top_p, top_k)

    def _mark(self) -> tuple[int, int, int] | None:
        """What tells one content of the weights' file from another, without reading it."""
        if self.path is None:
            return None
        try:
            found = (self.path / TENSORS if self.path.is_dir() else self.path).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    async def refresh(self) -> None:
        """Takes up weights that were replaced on disk."""
        if self.path is None or self._mark() in (None, self._seen):
            return
        async with self._loading:
            mark = self._mark()
            if mark in (None, self._seen):
                return
            try:
                weights = _fit(await asyncio.to_thread(Weights.load, self.path))
            except UsageError as error:  # they were fine when the run began: it is the machine's, not the run's
                raise UpstreamError(str(error), cause="upstream.error") from error
            if weights.version <= self.version:
                weights.version = self.version + 1  # whoever wrote them does not count
            await asyncio.to_thread(self.service.swap, weights)
            self._seen = mark


def reply(asked: Asked, *, version: int, queued: float, replica: str) -> ModelReply:
    """The answer that a finished job spells."""
    job = asked.job
    message = chat.answer(job.tokens[: job.text], asked.begun, at=len(asked.prompt))
    return ModelReply(
        message=message,
        finish="length" if job.finish == "length" else "tool_calls" if message.tool_calls else "stop",
        prompt=ints(asked.prompt),
        sampled=ints(job.tokens),
        logprobs=floats(job.logprobs),
        version=version,
        prompt_tokens=len(asked.prompt),
        sampled_tokens=len(job.tokens),
        queued=queued,
        replica=replica,
    )


def builtin() -> Weights:
    """The policy that comes along."""
    return Weights.from_bytes((files(__package__) / POLICY).read_bytes())


def _fit(weights: Weights) -> Weights:
    """The weights, where they can speak the chat format."""
    known = weights.shape.vocab_size
    if known < chat.VOCAB:
        raise UsageError(
            f"these weights know {known} ids, and the embedded chat format has {chat.VOCAB}: "
            "256 bytes and those that give a conversation its shape"
        )
    return weights
