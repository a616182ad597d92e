"""Stand-in for vLLM 0.32: `vllm serve --enable-scale-out` with a tool parser and `VLLM_SERVER_DEV_MODE=1`.

It serves tests that need injected faults, many servers or a pause at an exact token. `tests/engines` shows that
Rookery works with vLLM itself, so this stand-in implements only the endpoints and fields that those tests use. It
refuses every other field with status 501, also those that vLLM ignores.

Behaviour:
- a pause in mode `keep` freezes sequences between two tokens. With `clear_cache`, the default, keys and values are
  computed again after `/resume` with the current weights; without it the old ones stay;
- mode `abort` ends every request with the finish reason `abort` and the tokens sampled so far. Mode `wait` first
  lets running requests finish. In every mode, requests that arrive during a pause wait for `/resume`;
- logprobs are the model's own, before the temperature;
- in a chat stream, the prompt IDs are in the first chunk, which has the role. Every later chunk has the IDs of its
  own tokens, with an empty delta if their text is not complete yet. A chat that is aborted before its first token
  has no finish reason in a stream.
"""

import secrets
import time
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from rookery.core import UsageError
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.http_server import json_response, read_body
from rookery.upstreams.embedded.openai_requests import RequestError
from rookery.upstreams.embedded.streaming import DecodedCall, DecodedDelta
from tests.engine_standins.base import Standin
from tests.engine_standins.batch import StandinJob
from tests.engine_standins.replies import DONE, Chunks, Run, StreamWriter, chat_logprobs, event, usage
from tests.engine_standins.requests import ChatFields, Invalid, SamplingFields, Unsupported, convert, read, render
from tests.engine_standins.sampling import from_fields


class Chat(ChatFields, kw_only=True, forbid_unknown_fields=True):
    request_id: str = ""


class Completion(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """A completion without streaming, IDs and logprobs: all that health checks need."""

    prompt: str
    max_tokens: int = 16
    model: str = ""


class GenerateParams(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int | None = None
    logprobs: int | None = None
    detokenize: bool = True


class Generate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    token_ids: list[int]
    sampling_params: GenerateParams
    model: str = ""
    stream: bool = False
    request_id: str = ""


class UpdateWeights(msgspec.Struct):
    update_info: dict[str, str]
    """`path`: file or directory of weights in the format of the embedded policy."""


class VLLMStandin(Standin):
    metrics = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:generation_tokens_total",
    )
    owner = "vllm"

    def routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/chat/completions", self._chat)
        router.add_post("/v1/completions", self._completions)
        router.add_post("/inference/v1/generate", self._generate)
        router.add_post("/pause", self._pause)
        router.add_post("/resume", self._resume)
        router.add_post("/update_weights", self._update_weights)
        router.add_get("/version", self._version)

    def error_response(self, error: Exception, path: str) -> tuple[int, Any]:
        param = ".".join(error.where) if isinstance(error, Invalid) else None
        if isinstance(error, Unsupported):
            status, kind = 501, "NotImplementedError"
        elif isinstance(error, Invalid | ValueError | RequestError | UsageError):
            status, kind = 400, "BadRequestError"
        else:
            status = error.status if isinstance(error, web.HTTPException) else 500
            kind = HTTPStatus(status).phrase
        message = str(error).encode("utf-8", "replace").decode()
        return status, {"error": {"message": message, "type": kind, "param": param, "code": status}}

    # --------------------------------------------------------------------------------------------- sampling

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, Chat)
        if body.top_logprobs:
            raise Unsupported("top_logprobs")
        (prompt, begun), calls = render(body)
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        self._check_room(prompt, most)
        name = f"chatcmpl-{body.request_id or secrets.token_hex(16)}"
        run = self._run(name, prompt, body, most, logprobs=body.logprobs, tools=calls, begun=begun)
        head = {"id": name, "created": int(time.time()), "model": self.upstream.model}
        if body.stream:
            return await self.stream(request, [run], ChatWriter(run, body, head))
        await self.sample([run])
        job, delta = run.job, run.decode()
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "reasoning": None}
        if delta.calls:
            message |= {"content": delta.text or None, "tool_calls": [_call(call) for call in delta.calls]}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": chat_logprobs(run, 0, len(job.tokens)),
            "finish_reason": "tool_calls" if delta.calls else job.finish,
            "stop_reason": stop_reason(job),
            "token_ids": job.tokens if body.return_token_ids else None,
        }
        reply = head | {"object": "chat.completion", "choices": [choice], "usage": usage([run])}
        return json_response(reply | {"prompt_token_ids": job.prompt if body.return_token_ids else None})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, Completion)
        name = f"cmpl-{secrets.token_hex(16)}"
        prompt = [chat.BEGIN, *chat.text_ids(body.prompt)]
        self._check_room(prompt, body.max_tokens)
        run = self._run(name, prompt, body, body.max_tokens)
        await self.sample([run])
        choice = {"index": 0, "text": run.decode().text, "logprobs": None, "finish_reason": run.job.finish}
        head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": self.upstream.model}
        return json_response(head | {"choices": [choice], "usage": usage([run])})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, Generate)
        params = body.sampling_params
        name = f"generate-tokens-{body.request_id or secrets.token_hex(16)}"
        options = {"logprobs": params.logprobs is not None, "tops": params.logprobs or 0}
        run = self._run(name, body.token_ids, params, params.max_tokens, **options)
        if body.stream:
            return await self.stream(request, [run], GenerateWriter([run]))
        await self.sample([run])
        reply = {"request_id": name, "model": self.upstream.model, "created": int(time.time())}
        choices = [generate_choice(run, 0, len(run.job.tokens), ended=True)]
        return json_response(reply | {"choices": choices, "usage": usage([run])})

    async def _body(self, request: web.Request, kind: type[Any]) -> Any:
        body = convert(read(await read_body(request)), kind)
        if body.model and body.model != self.upstream.model:
            raise web.HTTPNotFound(text=f"The model `{body.model}` does not exist.")
        return body

    def _check_room(self, prompt: list[int], most: int | None) -> None:
        """Refuse a limit of tokens that does not fit. `/inference/v1/generate` does not check this."""
        if most is not None and len(prompt) + most > (context := self.upstream.context):
            raise ValueError(
                f"This model's maximum context length is {context} tokens. However, you requested {most} output "
                f"tokens and your prompt contains {len(prompt)} input tokens."
            )

    def _run(self, name: str, prompt: list[int], fields: SamplingFields, most: int | None, **options: Any) -> Run:
        if fields.n != 1:
            raise Unsupported("n")
        vocab, context = self.engine.llama.shape.vocab_size, self.upstream.context
        params = from_fields(fields, most, top_k=fields.top_k or -1)
        params.verify(vocab)
        if not prompt or not all(0 <= token < vocab for token in prompt):
            raise ValueError("the prompt is empty or has IDs outside the vocabulary")
        if len(prompt) >= context:
            raise ValueError(
                f"The decoder prompt (length {len(prompt)}) is longer than the maximum model length of {context}."
            )
        ends = (frozenset() if fields.ignore_eos else chat.ENDS) | frozenset(fields.stop_token_ids or ())
        job = self.job(prompt, params, 0, ends=ends, calls=options.get("tools", True))
        return Run(job=job, name=name, special=not fields.skip_special_tokens, **options)

    # ---------------------------------------------------------------------------------------------- control

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"the mode is {mode!r}, not abort, wait or keep")
        clear = request.query.get("clear_cache", "true") == "true"
        await self.engine.pause(mode, clear=clear)  # type: ignore[arg-type]
        return json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.StreamResponse:
        await self.engine.resume()
        return json_response({"status": "resumed"})

    async def _update_weights(self, request: web.Request) -> web.StreamResponse:
        body = convert(read(await read_body(request)), UpdateWeights)
        await self.engine.load(body.update_info["path"])
        return json_response({"message": "Weights updated"})

    async def _version(self, _: web.Request) -> web.StreamResponse:
        return json_response({"version": "0.32.0"})


# ------------------------------------------------------------------------------------------------- replies


def stop_reason(job: StandinJob) -> int | str | None:
    """Return the stop string or ID that ended a sequence; None for the end-of-sequence token."""
    if isinstance(job.matched, bytes):
        return job.matched.decode("utf-8", "replace")
    return None if job.matched == chat.END else job.matched


def _call(call: DecodedCall) -> dict[str, Any]:
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatWriter(StreamWriter[Run]):
    """Write the events of a chat stream."""

    def __init__(self, run: Run, body: Chat, head: dict[str, Any]) -> None:
        super().__init__([run])
        self._body = body
        self._head = head | {"object": "chat.completion.chunk"}
        self._begun = self._called = False

    def chunks(self, number: int, first: int, ready: int, ended: bool, delta: DecodedDelta) -> Chunks:
        run, job = self._runs[0], self._runs[0].job
        chunks = []
        if not self._begun:
            self._begun = True
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            ids = job.prompt if self._body.return_token_ids else None
            chunks.append(self._head | {"choices": [role | {"logprobs": None}], "prompt_token_ids": ids})
        if not ready:  # aborted before it began
            return chunks
        message: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.calls:
            message["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.calls]
            self._called = True
        choice: dict[str, Any] = {
            "index": 0,
            "delta": message,
            "logprobs": chat_logprobs(run, first, ready),
            "finish_reason": None,
            "token_ids": job.tokens[first:ready] if self._body.return_token_ids else None,
        }
        if ended:
            called = self._called and job.finish == "stop"
            choice |= {"finish_reason": "tool_calls" if called else job.finish, "stop_reason": stop_reason(job)}
        elif not (message or choice["logprobs"] or choice["token_ids"]):
            return chunks
        return [*chunks, self._head | {"choices": [choice]}]

    def end(self) -> list[bytes]:
        last = self._head | {"choices": [], "usage": usage(self._runs)}
        return [event(last), DONE] if self._body.with_usage else [DONE]


class GenerateWriter(StreamWriter[Run]):
    """Write the events of a stream of `/inference/v1/generate`."""

    def chunks(self, number: int, first: int, ready: int, ended: bool, delta: DecodedDelta) -> Chunks:
        run = self._runs[0]
        return [{"request_id": run.name, "choices": [generate_choice(run, first, ready, ended=ended)]}]


def generate_choice(run: Run, first: int, ready: int, *, ended: bool) -> dict[str, Any]:
    job = run.job
    return {
        "index": 0,
        "logprobs": {"content": [_generate_logprob(run, at) for at in range(first, ready)]}
        if run.logprobs
        else None,
        "finish_reason": job.finish if ended else None,
        "stop_reason": stop_reason(job) if ended else None,
        "token_ids": job.tokens[first:ready],
    }


def _generate_logprob(run: Run, at: int) -> dict[str, Any]:
    """Return the logprob of a token. The token itself is the first of its alternatives, and counts as one."""
    token, logprob = run.job.tokens[at], run.job.logprobs[at]
    others = [pair for pair in run.job.tops[at] if pair[0] != token] if run.tops else []
    tops = [(token, logprob), *others][: max(run.tops, 1)]
    alternatives = [{"token_id": other, "logprob": value, "rank": None} for other, value in tops]
    return {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": alternatives}
