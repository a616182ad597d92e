"""Stand-in for vLLM's server at commit a014e35: `vllm serve` with a tool parser and `VLLM_SERVER_DEV_MODE=1`.

From `entrypoints/openai/*/api_router.py`, `entrypoints/scale_out/token_in_token_out`, `v1/engine/core.py` and
`entrypoints/serve/{dev,tokenize,instrumentator,exception_handling}`.

Behaviour:
- a pause in mode `keep` freezes sequences between two tokens. With `clear_cache`, the default, keys and values
  are computed again after `/resume` with the current weights; without it the old ones stay;
- mode `abort` ends every request with the finish reason `abort` and the tokens sampled so far. Mode `wait` first
  lets running requests finish. In every mode, requests that arrive during a pause wait for `/resume`;
- a request is aborted by its ID: the prefix `chatcmpl-`, `cmpl-` (with the suffix `-0`) or `generate-tokens-`, and
  the `X-Request-Id`;
- an error is `{"error": {"message", "type", "param", "code"}}`, with the status as its code.
"""

import secrets
import time
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from rookery.core import RookeryError, UsageError
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.http_server import json_response, read_body
from rookery.upstreams.embedded.openai_requests import RequestError
from rookery.upstreams.embedded.sampler import TokenChoice
from tests.engine_standins import vllm_requests as bodies
from tests.engine_standins.base import Refusal, Standin, Stream
from tests.engine_standins.logits import Shaping
from tests.engine_standins.validation import Invalid, conversation, convert, find_unknown_fields, read
from tests.engine_standins.vllm_control import add_control
from tests.engine_standins.vllm_logprobs import ReplyOptions
from tests.engine_standins.vllm_params import SamplingParams, Unsupported, VLLMError
from tests.engine_standins.vllm_responses import (
    DONE,
    StreamWriter,
    chat_answer,
    completion_answer,
    encode,
    generate_answer,
)

SEEDS: Final = 63
_WHOLE: Final = {"chat": chat_answer, "completion": completion_answer, "generate": generate_answer}


def error(status: int, message: str, *, kind: str, param: str | None = None) -> Refusal:
    text = message.encode("utf-8", "replace").decode()
    return Refusal(status, {"error": {"message": text, "type": kind, "param": param, "code": status}})


class VLLMStandin(Standin):
    def routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/chat/completions", self._chat)
        router.add_post("/v1/completions", self._completions)
        router.add_post("/inference/v1/generate", self._generate)
        add_control(self, router)

    def error_response(self, error_: Exception, path: str) -> tuple[int, Any]:
        refusal = self._refusal(error_)
        return refusal.status, refusal.body

    def _refusal(self, raised: Exception) -> Refusal:
        if isinstance(raised, VLLMError):
            return error(400, str(raised), kind="BadRequestError", param=raised.parameter)
        if isinstance(raised, Invalid):
            where = ".".join(raised.where)
            words = f"1 validation error:\n  {raised.listed()}"
            return error(400, words, kind="Bad Request", param=where)
        if isinstance(raised, Unsupported):
            return error(501, str(raised), kind="NotImplementedError")
        if isinstance(raised, RequestError):
            return error(raised.status, str(raised), kind="BadRequestError", param=raised.param)
        if isinstance(raised, web.HTTPException):
            return error(raised.status, HTTPStatus(raised.status).phrase, kind=HTTPStatus(raised.status).phrase)
        if isinstance(raised, UsageError):
            return error(400, str(raised), kind="BadRequestError")
        words = str(raised) if isinstance(raised, RookeryError) else f"{type(raised).__name__}; the log says more"
        return error(500, words, kind="InternalServerError")

    # --------------------------------------------------------------------------------------------- sampling

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        fields = await self.body(request)
        bodies.before_chat(fields)
        body = convert(fields, bodies.ChatRequest)
        bodies.check_stops(body)
        self.note_ignored(request.path, fields, bodies.ChatRequest)
        self.check_model(body.model)
        if body.chat_template is not None or (body.chat_template_kwargs or {}).get("chat_template") is not None:
            raise VLLMError("a chat template of the request's own is not trusted here")
        for name in ("echo", "continue_final_message", "use_beam_search", "return_prompt_text"):
            if getattr(body, name):
                raise Unsupported(name)
        if not body.add_generation_prompt or body.add_special_tokens:
            raise Unsupported("add_generation_prompt")
        bodies.check_formats(body)
        messages, tools = conversation(body.messages, body.tools)
        choice: str | None = None
        if isinstance(body.tool_choice, bodies.NamedTool):
            choice = body.tool_choice.function.name
        elif tools:
            choice = body.tool_choice
        prompt, begun = chat.prompt(messages, tools, choice)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        called = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        prompt = self.fit(prompt, limit, called, body)
        calls = bool(tools) and choice != "none"
        params = bodies.sampling(
            body,
            n=1 if body.n is None else body.n,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        jobs = self.jobs([prompt], params, limit, calls=calls)
        reply_options = ReplyOptions(
            "chat",
            f"chatcmpl-{self.request_id(request, body.request_id)}",
            self.upstream.model,
            int(time.time()),
            jobs,
            n=params.n,
            begun=begun,
            logprobs=params.logprobs if body.top_logprobs is not None else None,
            as_ids=bool(body.return_tokens_as_token_ids),
            token_ids=bool(body.return_token_ids),
            tools=calls,
            named=isinstance(body.tool_choice, bodies.NamedTool),
            required=choice == "required",
            parallel=body.parallel_tool_calls is not False,
            special=not body.skip_special_tokens,
            hidden=not body.include_reasoning,
        )
        return await self._answer(
            request,
            reply_options,
            [reply_options.name] * len(jobs),
            body.stream,
            body.stream_options,
            body.stream_interval,
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        fields = await self.body(request)
        bodies.before_completion(fields)
        body = convert(fields, bodies.CompletionRequest)
        bodies.check_stops(body)
        self.note_ignored(request.path, fields, bodies.CompletionRequest)
        self.check_model(body.model)
        for name in ("echo", "use_beam_search", "prompt_embeds"):
            if getattr(body, name):
                raise Unsupported(name)
        bodies.check_formats(body)
        start = [chat.BEGIN] if body.add_special_tokens else []
        prompts = [
            self.fit(
                [*start, *chat.text_ids(prompt)] if isinstance(prompt, str) else prompt,
                body.max_tokens,
                "max_tokens",
                body,
            )
            for prompt in bodies.prompts(body)
        ]
        params = bodies.sampling(body, n=body.n, logprobs=body.logprobs)
        jobs = self.jobs(prompts, params, body.max_tokens, calls=True)
        name = f"cmpl-{self.request_id(request, body.request_id)}"
        reply_options = ReplyOptions(
            "completion",
            name,
            self.upstream.model,
            int(time.time()),
            jobs,
            n=params.n,
            logprobs=params.logprobs,
            as_ids=bool(body.return_tokens_as_token_ids),
            token_ids=bool(body.return_token_ids),
            special=not body.skip_special_tokens,
        )
        names = [f"{name}-{number // params.n}" for number in range(len(jobs))]
        return await self._answer(
            request, reply_options, names, body.stream, body.stream_options, body.stream_interval
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        fields = await self.body(request)
        body = convert(fields, bodies.GenerateRequest)
        if any(token < 0 for token in body.token_ids):
            raise Invalid("value_error", ("body", "token_ids"), "an id is not below 0", body.token_ids)
        if body.features and body.content_parts:
            raise Invalid("value_error", ("body",), "features and content_parts exclude each other", None)
        if body.features or body.content_parts:
            raise Unsupported("features")
        self.note_ignored(request.path, fields, bodies.GenerateRequest)
        self.check_model(body.model)
        params = convert(body.sampling_params, SamplingParams, "sampling_params")
        self.note_ignored_fields(request.path, find_unknown_fields(body.sampling_params, SamplingParams))
        if params.n > self.upstream.slots:
            raise VLLMError(f"sampling_params.n can be at most {self.upstream.slots} here, not {params.n}")
        self.check_ids(body.token_ids)
        limit = params.max_tokens if "max_tokens" in body.sampling_params else None
        jobs = self.jobs([body.token_ids], params, limit, calls=True)
        reply_options = ReplyOptions(
            "generate",
            f"generate-tokens-{self.request_id(request, body.request_id)}",
            self.upstream.model,
            int(time.time()),
            jobs,
            n=params.n,
            logprobs=params.logprobs,
        )
        return await self._answer(
            request,
            reply_options,
            [reply_options.name] * len(jobs),
            body.stream,
            body.stream_options,
            params.stream_interval,
        )

    async def _answer(
        self,
        request: web.Request,
        reply_options: ReplyOptions,
        names: list[str],
        stream: bool | None,
        options: bodies.StreamOptions | None,
        every: int | None,
    ) -> web.StreamResponse:
        jobs = list(reply_options.jobs)
        if not stream:
            await self.drawn(names, jobs)
            return json_response(_WHOLE[reply_options.kind](reply_options))
        usage = bool(options is not None and options.include_usage)
        reply_options = reply_options._replace(
            usage=usage, continuous=usage and bool(options is not None and options.continuous_usage_stats)
        )
        writer = StreamWriter(reply_options)
        out = Stream(request)
        await out.begin()
        try:
            async for number, ready, ended in self.new_tokens(names, jobs, every or 1):
                for event in writer.new_events(number, ready, ended):
                    await out.send(event)
        except RookeryError as raised:
            await out.send(b"data: " + encode(self._refusal(raised).body) + b"\n\n" + DONE)
            return out.response
        for event in writer.end():
            await out.send(event)
        return out.response

    # ----------------------------------------------------------------------------------------------- pieces

    async def body(self, request: web.Request) -> dict[str, Any]:
        if request.content_type != "application/json":
            raise error(400, "1 validation error:\n  only application/json is read", kind="Bad Request")
        return read(await read_body(request))

    def request_id(self, request: web.Request, body_id: str | None) -> str:
        return request.headers.get("X-Request-Id") or body_id or secrets.token_hex(16)

    def check_model(self, name: str | None) -> None:
        if name and name != self.upstream.model:
            raise error(404, f"The model `{name}` does not exist.", kind="NotFoundError", param="model")

    def fit(self, prompt: list[int], limit: int | None, called: str, body: bodies.Common) -> list[int]:
        """Return the prompt, truncated if requested. Raises the error that clients recognise as a full context."""
        context = self.upstream.context
        available = context - (limit or 0)
        if available < 0:
            words = f"{called}={limit} cannot be greater than max_model_len={context}"
            raise VLLMError(words, called, limit)
        most = available if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
        if most is not None and most > available:
            raise VLLMError(f"truncate_prompt_tokens={most} does not fit", "truncate_prompt_tokens", most)
        if most is not None and len(prompt) > most:
            prompt = prompt[:most] if body.truncation_side == "right" else prompt[len(prompt) - most :]
        if len(prompt) > available:
            about = "at least " if len(prompt) == available + 1 else ""
            words = (
                f"This model's maximum context length is {context} tokens. However, you requested {limit or 0} "
                f"output tokens and your prompt contains {about}{len(prompt)} input tokens, for a total of {about}"
                f"{len(prompt) + (limit or 0)} tokens. Please reduce the length of the input prompt or the number "
                "of requested output tokens."
            )
            raise VLLMError(words, "input_tokens", len(prompt))
        self.check_ids(prompt)
        return prompt

    def check_ids(self, prompt: list[int]) -> None:
        context, words = self.upstream.context, self.engine.llama.shape.vocab_size
        if not prompt:
            raise VLLMError("The decoder prompt cannot be empty")
        if len(prompt) > context:
            raise VLLMError(
                f"The decoder prompt (length {len(prompt)}) is longer than the maximum model length of {context}."
            )
        if len(prompt) == context:
            raise VLLMError(
                f"The decoder prompt (length {len(prompt)}) plus the number of requested output tokens (at least "
                f"1) is longer than the maximum model length of {context}."
            )
        if max(prompt) >= words:
            raise VLLMError(f"Token id {max(prompt)} is out of vocabulary")

    def jobs(
        self, prompts: list[list[int]], params: SamplingParams, limit: int | None, *, calls: bool
    ) -> list[SamplingJob]:
        """Return one job per choice. Seeds count up from the request's seed, as in vLLM's child requests."""
        words = self.engine.llama.shape.vocab_size
        params.max_tokens = limit
        params.verify(words)
        own = frozenset() if params.ignore_eos else chat.ENDS
        ends = own | frozenset(params.stop_token_ids or ())
        shaping = Shaping(
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            0.0 if params.greedy else params.min_p,
            params.temperature,
            params.logit_bias or {},
            None if params.allowed_token_ids is None else frozenset(params.allowed_token_ids),
            ends=ends | chat.ENDS,
        )
        choice = TokenChoice(
            0.0 if params.greedy else params.temperature,
            1.0 if params.greedy else params.top_p,
            0 if params.greedy else max(0, params.top_k),
            banned_id=-1 if calls else chat.CALL,
        )
        found = []
        for prompt in prompts:
            root = params.seed if params.seed is not None else secrets.randbits(SEEDS)
            for number in range(params.n):
                job = SamplingJob(
                    prompt,
                    max_tokens=self.upstream.context if limit is None else limit,
                    seed=root + number,
                    choice=choice,
                    ends=ends,
                    stop=tuple(text.encode() for text in params.stops),
                )
                job.min_tokens = params.min_tokens
                job.include_stop = params.include_stop_str_in_output
                job.top_count = words if params.logprobs == -1 else params.logprobs or 0
                job.logits_processor = shaping.on(job)
                found.append(job)
        return found

    def note_ignored(self, path: str, fields: dict[str, Any], kind: type[Any]) -> None:
        self.note_ignored_fields(
            path, [*find_unknown_fields(fields, kind), *(name for name in bodies.IGNORED if fields.get(name))]
        )
