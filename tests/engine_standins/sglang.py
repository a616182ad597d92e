"""Stand-in for SGLang's server at commit cce0a12: `/generate` and the OpenAI endpoints.

From `entrypoints/http_server.py`, `managers/{tokenizer_manager,scheduler}.py` and `entrypoints/openai`.

Behaviour:
- a pause in mode `in_place` freezes sequences between two tokens and keeps their keys and values. Mode `retract`
  computes these again. Mode `abort` ends every request with the tokens sampled so far;
- a running request that is aborted during a pause ends after the pause, because SGLang ends it at its next token;
- an abort names a `rid`, and applies to every request whose `rid` begins with it;
- a stream of `/generate` begins before its request is validated: an error is an event after status 200;
- model names are not checked. The version of the weights is a string, `default` until it is set.
"""

import secrets
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from rookery.core import RookeryError
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.http_server import json_response, read_body
from rookery.upstreams.embedded.openai_requests import RequestError
from rookery.upstreams.embedded.sampler import TokenChoice
from tests.engine_standins import sglang_requests as bodies
from tests.engine_standins.base import Refusal, Standin, Stream
from tests.engine_standins.logits import Shaping
from tests.engine_standins.sglang_control import add_control
from tests.engine_standins.sglang_requests import Broken, SamplingParams, Unsupported
from tests.engine_standins.sglang_responses import (
    DONE,
    ChatStreamWriter,
    CompletionStreamWriter,
    GenerateStreamWriter,
    Run,
    answered,
    chat_choice,
    completion_choice,
    event,
    generated,
)
from tests.engine_standins.validation import Invalid, conversation, convert, find_unknown_fields, read


class SGLangStandin(Standin):
    incremental = False
    """`--incremental-streaming-output`."""

    def routes(self, router: web.UrlDispatcher) -> None:
        for method in ("POST", "PUT"):
            router.add_route(method, "/generate", self._generate)
        router.add_post("/v1/chat/completions", self._chat)
        router.add_post("/v1/completions", self._completions)
        add_control(self, router)

    def error_response(self, error: Exception, path: str) -> tuple[int, Any]:
        if isinstance(error, Invalid):
            return 400, _error(str([error.listed()]), "Bad Request", 400)
        if isinstance(error, Unsupported):
            return 501, _error(str(error), "NotImplementedError", 501)
        if isinstance(error, RequestError):
            return error.status, _error(str(error), "BadRequest", error.status)
        if isinstance(error, ValueError):
            if path.startswith("/v1/"):
                return 400, _error(str(error), "BadRequestError", 400)
            return 400, {"error": {"message": str(error)}}
        if isinstance(error, web.HTTPException):
            return error.status, {"detail": HTTPStatus(error.status).phrase}
        if isinstance(error, RookeryError):
            return 500, _error(str(error), "InternalServerError", 500)
        return 500, "Internal Server Error"

    # -------------------------------------------------------------------------------------------- /generate

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        fields = await self.body(request)
        body = convert(fields, bodies.Generate)
        self.note_ignored(request.path, fields, bodies.Generate)
        if not body.stream:
            runs, batch = self._runs(body)
            await self._sample_all(runs)
            outs = [generated(run) for run in runs]
            return json_response(outs if batch else outs[0])
        out = Stream(request)
        await out.begin()
        try:
            runs, batch = self._runs(body)
        except (ValueError, Unsupported) as error:
            code = 501 if isinstance(error, Unsupported) else 400
            failure = {"message": str(error), "type": "invalid_request_error", "code": code, "retryable": False}
            await out.send(event({"error": failure}))
            await out.send(DONE)
            return out.response
        writer = GenerateStreamWriter(runs, incremental=self.incremental, batch=batch)
        async for number, ready, ended in self._new_tokens(runs):
            await out.send(writer.new_events(number, ready, ended))
        await out.send(DONE)
        return out.response

    def _runs(self, body: bodies.Generate) -> tuple[list[Run], bool]:
        """Return the sequences and whether the response is a list. Raises `ValueError` for invalid requests."""
        for name in bodies.UNSUPPORTED:
            if getattr(body, name, None):
                raise Unsupported(name)
        if body.text is None and body.input_ids is None:
            raise ValueError("there is neither text nor input_ids nor input_embeds")
        batch = isinstance(body.text, list) if body.text is not None else _nested(body.input_ids)
        prompt_or_prompts: Any = body.input_ids if body.input_ids is not None else body.text
        prompts = prompt_or_prompts if batch else [prompt_or_prompts]
        per = body.sampling_params if isinstance(body.sampling_params, list) else None
        if per is not None and len(per) != len(prompts):
            raise ValueError(f"{len(per)} sampling_params are not one for each of {len(prompts)} prompts")
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
            if isinstance(getattr(body, name), list):
                raise Unsupported(f"a list as {name}")
        found = []
        for number, prompt in enumerate(prompts):
            options: Any = per[number] if per is not None else body.sampling_params or {}
            found.append((self.ids(prompt), self.params(options)))
        n = found[0][1].of("n")
        if any(params.of("n") != n for _, params in found):
            raise ValueError("all prompts of a request have the same n")
        batch = batch or n > 1
        start = None if body.logprob_start_len in (None, -1) else body.logprob_start_len
        runs = []
        for prompt, params in found:
            for number in range(n):
                job = self.job(prompt, params, number)
                if body.return_logprob and isinstance(start, int):
                    if start > len(prompt):
                        raise ValueError(f"logprob_start_len={start} is above the input's {len(prompt)} tokens")
                    if start < len(prompt):
                        job.logprob_start = start
                    if body.top_logprobs_num and job.logprob_start is not None:
                        raise Unsupported("top_logprobs_num for the input")
                runs.append(
                    self.run(
                        job,
                        logprobs=bool(body.return_logprob),
                        tops=body.top_logprobs_num if isinstance(body.top_logprobs_num, int) else 0,
                        with_text=body.return_text_in_logprobs,
                        prompt_ids=body.return_prompt_token_ids,
                        special=not params.of("skip_special_tokens"),
                    )
                )
        self.name(runs, body.rid)
        return runs, batch

    # ----------------------------------------------------------------------------------------------- OpenAI

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        fields = await self.body(request, strict=True)
        if fields.get("tool_choice") is None:
            fields["tool_choice"] = "none" if fields.get("tools") is None else "auto"
        body = convert(fields, bodies.Chat)
        self.note_ignored(request.path, fields, bodies.Chat)
        if not body.messages:
            raise ValueError("there are no messages")
        if body.return_sampling_mask and not body.return_meta_info:
            raise ValueError("return_sampling_mask needs return_meta_info=true")
        messages, tools = conversation(body.messages, body.tools)
        choice: str | None = body.tool_choice if isinstance(body.tool_choice, str) else None
        if isinstance(body.tool_choice, bodies.NamedTool):
            choice = body.tool_choice.function.name
            if choice not in (tool.name for tool in tools):
                raise ValueError(f"the tool {choice!r} is none of the tools")
        if choice == "required" and not tools:
            raise ValueError("a call is required, and there are no tools")
        if body.stream:
            for name in ("return_prompt_token_ids", "return_token_ids", "return_meta_info"):
                if getattr(body, name):
                    words = f"{name} is not supported with streaming: set stream=false"
                    raise Refusal(400, _error(words, "BadRequest", 400))
        prompt, begun = chat.prompt(messages, tools, choice if tools else None)
        if body.input_ids is not None:
            prompt, begun = body.input_ids, ""
        calls = bool(tools) and choice != "none"
        most = body.max_completion_tokens or body.max_tokens
        params = self._openai_params(body, most)
        runs = [
            self.run(
                self.job(self.ids(prompt), params, number, calls=calls),
                logprobs=body.logprobs,
                tops=body.top_logprobs or 0,
                with_text=True,
                prompt_ids=body.return_prompt_token_ids or body.return_token_ids,
                special=not body.skip_special_tokens,
                begun=begun,
                tools=calls,
            )
            for number in range(body.n)
        ]
        self.name(runs, body.rid)
        if not body.stream:
            await self._sample_all(runs)
            choices = [
                chat_choice(run, number, ids=body.return_token_ids, meta=body.return_meta_info)
                for number, run in enumerate(runs)
            ]
            return json_response(answered(runs, choices, kind="chat.completion", model=body.model, n=body.n))
        with_usage, continuous = _usage(body.stream_options)
        writer = ChatStreamWriter(runs, model=body.model, n=body.n, with_usage=with_usage, continuous=continuous)
        return await self._stream(request, runs, writer)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        fields = await self.body(request, strict=True)
        body = convert(fields, bodies.Completion)
        self.note_ignored(request.path, fields, bodies.Completion)
        if body.max_tokens <= 0:
            raise Invalid("value_error", ("body", "max_tokens"), "it is above 0", body.max_tokens)
        if body.json_schema:
            raise Unsupported("json_schema")
        prompt = body.prompt
        many = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))
        prompts = [self.ids(one) for one in (prompt if many else [prompt])]
        if not prompts:
            raise ValueError("the prompt is empty")
        params = self._openai_params(body, body.max_tokens)
        runs = [
            self.run(
                self.job(prompt, params, number),
                logprobs=body.logprobs is not None,
                tops=body.logprobs or 0,
                with_text=True,
                special=not body.skip_special_tokens,
            )
            for prompt in prompts
            for number in range(body.n)
        ]
        self.name(runs, body.rid)
        ids = body.return_token_ids
        if not body.stream:
            await self._sample_all(runs)
            choices = [completion_choice(run, number, ids=ids) for number, run in enumerate(runs)]
            return json_response(answered(runs, choices, kind="text_completion", model=body.model, n=body.n))
        with_usage, continuous = _usage(body.stream_options)
        writer = CompletionStreamWriter(
            runs, model=body.model, n=body.n, ids=ids, with_usage=with_usage, continuous=continuous
        )
        return await self._stream(request, runs, writer)

    async def _stream(
        self, request: web.Request, runs: list[Run], writer: ChatStreamWriter | CompletionStreamWriter
    ) -> web.StreamResponse:
        out = Stream(request)
        async for number, ready, ended in self._new_tokens(runs):
            for piece in writer.new_events(number, ready, ended):
                await out.send(piece)
        for piece in writer.end():
            await out.send(piece)
        return out.response

    def _openai_params(self, body: bodies.Common, most: int | None) -> SamplingParams:
        for name in bodies.UNSUPPORTED:
            if getattr(body, name, None):
                raise Unsupported(name)
        if (body.response_format or {"type": "text"}).get("type") != "text":
            raise Unsupported("response_format")
        params = SamplingParams(
            max_new_tokens=most,
            min_new_tokens=body.min_tokens,
            sampling_seed=body.seed,
            **{name: getattr(body, name) for name in bodies.AS_THEY_ARE},
        )
        params.verify(self.engine.llama.shape.vocab_size)
        return params

    # ----------------------------------------------------------------------------------------------- pieces

    async def body(self, request: web.Request, *, strict: bool = False) -> dict[str, Any]:
        if strict and request.content_type != "application/json":
            raise Invalid("value_error", ("header", "content-type"), "only application/json is read")
        return read(await read_body(request))

    def note_ignored(self, path: str, fields: dict[str, Any], kind: type[Any]) -> None:
        self.note_ignored_fields(
            path, [*find_unknown_fields(fields, kind), *(name for name in bodies.IGNORED if fields.get(name))]
        )

    def params(self, fields: dict[str, Any]) -> SamplingParams:
        try:
            params = msgspec.convert(fields, SamplingParams)
        except msgspec.ValidationError as error:
            raise Broken(str(error)) from None
        params.verify(self.engine.llama.shape.vocab_size)
        return params

    def ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return [chat.BEGIN, *chat.text_ids(prompt)]
        words = self.engine.llama.shape.vocab_size
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            raise Invalid("list_type", ("body", "input_ids"), "a prompt is a text or ids, not a mixture", prompt)
        if not prompt:
            raise ValueError("input_ids cannot be empty.")
        if any(not 0 <= token < words for token in prompt):
            raise ValueError(f"the input_ids have values that are none of the vocabulary's {words}")
        return prompt

    def job(self, prompt: list[int], params: SamplingParams, number: int, *, calls: bool = True) -> SamplingJob:
        context = self.upstream.context
        if len(prompt) >= context:
            raise ValueError(
                f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens)."
            )
        most = params.max_new_tokens
        if most is not None and len(prompt) + most > context:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You "
                f"requested a total of {len(prompt) + most} tokens: {len(prompt)} tokens from the input messages "
                f"and {most} tokens for the completion. Please reduce the number of tokens in the input messages "
                "or the completion to fit within the limit."
            )
        own = frozenset[int]() if params.ignore_eos else chat.ENDS | frozenset(params.stop_token_ids or ())
        warm = params.of("temperature")
        root = params.sampling_seed if params.sampling_seed is not None else secrets.randbits(63)
        job = SamplingJob(
            prompt,
            max_tokens=context if most is None else most,
            seed=root + number,
            choice=TokenChoice(
                0.0 if params.greedy else warm,
                params.of("top_p"),
                0 if params.of("top_k") == -1 else params.of("top_k"),
                banned_id=-1 if calls else chat.CALL,
            ),
            ends=own,
            stop=tuple(text.encode() for text in params.stops),
        )
        job.min_tokens = params.of("min_new_tokens")
        job.include_stop = bool(params.no_stop_trim)
        job.logprob_temperature = 1.0 if params.greedy else warm
        job.logits_processor = Shaping(
            params.of("presence_penalty"),
            params.of("frequency_penalty"),
            params.of("repetition_penalty"),
            params.of("min_p"),
            1.0 if params.greedy else warm,
            {int(token): bias for token, bias in (params.logit_bias or {}).items()},
            ends=own | chat.ENDS,
        ).on(job)
        job.max_tokens = min(job.max_tokens, context - len(prompt))
        return job

    def run(self, job: SamplingJob, **how: Any) -> Run:
        job.top_count = how.get("tops", 0)
        return Run(rid="", job=job, version=lambda: self.engine.version, began=time.perf_counter(), **how)

    def name(self, runs: list[Run], rid: str | list[str] | None) -> None:
        """Set the `rid` of each run: the requested one (numbered if several runs share it) or a random one."""
        if isinstance(rid, list):
            names = rid
        elif rid is not None and len(runs) == 1:
            names = [rid]
        else:
            names = [
                f"{rid}_{number}" if rid is not None else secrets.token_hex(16) for number in range(len(runs))
            ]
        if len(names) != len(runs) or len(set(names)) != len(names):
            raise ValueError("rid is not one name of its own for each sequence")
        for run, name in zip(runs, names, strict=True):
            if name in self.engine.live:
                raise ValueError(f"Duplicate request ID detected: {name}")
            run.rid = name

    async def _sample_all(self, runs: list[Run]) -> None:
        await self.drawn([run.rid for run in runs], [run.job for run in runs])

    def _new_tokens(self, runs: list[Run]) -> AsyncGenerator[tuple[int, int, bool], None]:
        return self.new_tokens([run.rid for run in runs], [run.job for run in runs])


def _nested(ids: list[Any] | None) -> bool:
    if not ids:
        raise ValueError("input_ids cannot be empty.")
    return not isinstance(ids[0], int)


def _usage(options: bodies.StreamOptions | None) -> tuple[bool, bool]:
    if options is None:
        return False, False
    return bool(options.include_usage), bool(options.include_usage) and bool(options.continuous_usage_stats)


def _error(message: str, kind: str, code: int) -> dict[str, Any]:
    text = message.encode("utf-8", "replace").decode()
    return {"object": "error", "message": text, "type": kind, "param": None, "code": code}
