"""The `embedded` upstream: a small policy inside of this process, for a first run without a server.

Promises:
- nothing is canned: every answer is sampled from the model, token by token;
- same prompt, seed and weights, same answer, whatever else is under way;
- weights that are replaced on disk serve the calls that begin afterwards, with the version that their file says,
  or the one that was named for them;
- the news of an answer, joined, are the answer; who is slow to take them keeps nobody else waiting;
- a frozen upstream ends its calls with what they have; nothing else of it has to stop, since a sequence keeps the
  weights that it began with;
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

from rookery.core import Finish, Sampling, Truncation, UpstreamError, UsageError, floats, ints
from rookery.upstreams.concurrency_gate import ConcurrencyGate
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.batch import SLOTS, SamplingJob
from rookery.upstreams.embedded.inference_thread import InferenceThread
from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.sampler import PLAIN, TokenChoice
from rookery.upstreams.embedded.streaming import Delta as Said
from rookery.upstreams.embedded.streaming import DeltaDecoder
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
"""The sampling option that is known here: false allows one tool call at most in an answer."""


class PreparedRequest(NamedTuple):
    """A request as the model sees it."""

    prompt: list[int]
    begun: str
    job: SamplingJob
    llama: Llama
    """The model that it was asked of."""


class EmbeddedUpstream:
    """`embedded`, with the policy that comes along, or `embedded:PATH`, with weights of your own."""

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
        self._seen = self._mark()
        weights = _fit(Weights.load(self.path)) if self.path is not None else builtin()
        self.places = min(SLOTS, config.concurrency or SLOTS)
        self.service = InferenceThread(weights, places=self.places)
        self._gate = ConcurrencyGate(self.places)
        self._loading = asyncio.Lock()
        self._named: int | None = None
        """The version of weights that are on disk and not taken up yet."""
        self._under_way: set[asyncio.Task[int]] = set()
        self._aborted: set[asyncio.Task[int]] = set()

    @property
    def version(self) -> int:
        """Of the weights that serve the next call."""
        return self._named if self._named is not None else self.service.llama.version

    @version.setter
    def version(self, version: int) -> None:
        if self._mark() in (None, self._seen):
            self.service.llama.version = version
        else:  # it is that of the weights that were written and wait to be taken up
            self._named = version

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

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:  # noqa: ARG002  (nobody to wait for)
        """Aborts what is under way, where that is asked for."""
        if mode == "abort":
            self._aborted |= self._under_way
            for task in self._under_way:
                task.cancel()
        return mode == "abort"

    async def thaw(self, *, timeout: float) -> None:
        """Nothing stands still."""

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        await self.refresh()
        asked = self.ask(request)
        async with self.place(on_wait) as queued:
            llama = self.serving(asked)
            version = llama.version
            telling = None if on_delta is None else DeltaPublisher(asked, on_delta)
            notify = None if telling is None else telling.notify
            task = asyncio.create_task(self.sample(asked, timeout=timeout, llama=llama, news=notify))
            self._under_way.add(task)
            try:
                if telling is not None:
                    await telling.until(task)
                await asyncio.wait((task,))
                aborted = task.cancelled() and task in self._aborted
                if not aborted:
                    task.result()
            finally:
                self._under_way.discard(task)
                self._aborted.discard(task)
                if not task.done():
                    task.cancel()
                    await asyncio.wait((task,))
        done = reply(asked, version=version, queued=queued, replica=self.model, aborted=aborted)
        if telling is not None:
            await telling.rest(done)
        return done

    @asynccontextmanager
    async def place(self, on_wait: OnWait | None = None) -> AsyncIterator[float]:
        """One of the places, given in the order they were asked for; the seconds that it took to get."""
        queued = await self._gate.acquire(on_wait)
        try:
            yield queued
        finally:
            self._gate.release()

    def serving(self, asked: PreparedRequest) -> Llama:
        """The model for a request that begins now: the newest, where what was asked of another still fits it."""
        now, then = self.service.llama, asked.llama
        fits = (now.context, now.shape.vocab_size) == (then.context, then.shape.vocab_size)
        return now if fits else then

    async def sample(
        self,
        asked: PreparedRequest,
        *,
        timeout: float,
        llama: Llama,
        news: Callable[[SamplingJob], None] | None = None,
    ) -> int:
        """Draws the answer, for who has a place; the version that drew it. `news` as in `InferenceThread.run`."""
        try:
            async with asyncio.timeout(timeout):
                return await self.service.run(asked.job, news, llama=llama)
        except TimeoutError as error:
            said = f"the embedded policy did not end its answer within {timeout:g} s"
            raise UpstreamError(said, cause="upstream.timeout") from error

    def ask(self, request: ModelRequest) -> PreparedRequest:
        """What the model is given for a request; raises what is wrong with it, in words."""
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
                choice = choice._replace(never=chat.CALL)
        else:
            prompt = memoryview(request.tokens).cast("i").tolist()
            words = llama.shape.vocab_size
            if not all(0 <= token < words for token in prompt):
                raise UpstreamError(
                    f"the prompt has token IDs outside 0 to {words - 1}", cause="upstream.rejected"
                )
        if sampling.extra.get(ONE_CALL) is False and choice.never != chat.CALL:
            marks = (token for token in reversed(prompt) if token >= chat.BEGIN)
            begun_call = next(marks, None) == chat.CALL  # a choice of a tool has begun it in the prompt
            choice = choice._replace(never=chat.CALL) if begun_call else choice._replace(once=chat.CALL)
        if len(prompt) >= llama.context:
            raise Truncation(
                "context",
                f"the prompt is too long: it has {len(prompt)} tokens, and with its answer {llama.context} fit",
            )
        seed = sampling.seed if sampling.seed is not None else request.seed
        job = SamplingJob(
            prompt,
            most=sampling.max_tokens if sampling.max_tokens is not None else llama.context,
            seed=secrets.randbits(63) if seed is None else seed,
            choice=choice,
            ends=chat.ENDS,
            stop=tuple(text.encode("utf-8", "replace") for text in sampling.stop),
        )
        return PreparedRequest(prompt, begun, job, llama)

    async def close(self) -> None:
        """Ends what is under way. Closing twice is fine."""
        await self.service.close()

    # ------------------------------------------------------------------------------------------- pieces

    def _check_sampling(self, sampling: Sampling) -> TokenChoice:
        if strange := sorted(sampling.extra.keys() - {ONE_CALL}):
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
            if self._named is not None:
                weights.version = self._named
            elif weights.version <= self.version:
                weights.version = self.version + 1  # whoever wrote them does not count
            await asyncio.to_thread(self.service.swap, weights)
            self._seen = mark
            self._named = None


class DeltaPublisher:
    """The news of one answer. What is not told yet is in the job, which is bounded as the answer is."""

    def __init__(self, asked: PreparedRequest, on_delta: OnDelta) -> None:
        job = asked.job
        self._asked = asked
        self._on_delta = on_delta
        self._deltas = DeltaDecoder(begun=asked.begun, at=len(asked.prompt), stop=job.stop)
        self._wake = asyncio.Event()
        self._told = 0
        self._prompt = ints(asked.prompt)

    def notify(self, _: object) -> None:
        self._wake.set()

    async def until(self, task: asyncio.Task[int]) -> None:
        """Tells what comes, until the last of it."""
        task.add_done_callback(self.notify)
        job = self._asked.job
        while True:
            await self._wake.wait()
            self._wake.clear()
            if task.done() or job.finish:
                return
            count = min(len(job.tokens), len(job.logprobs))
            if count > self._told:
                await self._tell(self._deltas.more(job.tokens, count), job.tokens, job.logprobs, count)

    async def rest(self, done: ModelReply) -> None:
        """What is left of the whole answer."""
        job = self._asked.job
        count = len(done.sampled) // 4
        text = min(job.text, count) if job.finish else count
        said = self._deltas.end(job.tokens[:count], text)
        if said or count > self._told or self._prompt:
            await self._tell(said, job.tokens, job.logprobs, count)

    async def _tell(self, said: Said, tokens: list[int], logprobs: list[float], count: int) -> None:
        first, self._told = self._told, count
        prompt, self._prompt = self._prompt, b""
        calls = tuple(CallDelta(call.index, call.id, call.name, call.arguments) for call in said.calls)
        sampled, chances = ints(tokens[first:count]), floats(logprobs[first:count])
        await self._on_delta(Delta(said.text, "", calls, sampled=sampled, logprobs=chances, prompt=prompt))


def reply(
    asked: PreparedRequest, *, version: int, queued: float, replica: str, aborted: bool = False
) -> ModelReply:
    """The answer that a finished job spells, or one that was taken out of its hands."""
    job = asked.job
    count, text = len(job.tokens), job.text
    finish: Finish = "length" if job.finish == "length" else "stop"
    if aborted and not job.finish:
        finish = "abort"
        count = min(len(job.tokens), len(job.logprobs))
        if count and job.tokens[count - 1] in job.ends:
            count -= 1  # it was just drawn, and has not ended the sequence yet: it will be drawn again
        text = count
    message = chat.answer(job.tokens[:text], asked.begun, at=len(asked.prompt))
    if finish == "stop" and message.tool_calls:
        finish = "tool_calls"
    return ModelReply(
        message=message,
        finish=finish,
        prompt=ints(asked.prompt),
        sampled=ints(job.tokens[:count]),
        logprobs=floats(job.logprobs[:count]),
        version=version,
        prompt_tokens=len(asked.prompt),
        sampled_tokens=count,
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
            f"the vocabulary of these weights has {known} tokens, but the embedded chat format needs {chat.VOCAB}"
        )
    return weights
