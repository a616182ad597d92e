"""Stand-in for SGLang's server at commit cce0a12: `/generate` and the OpenAI endpoints.

From `entrypoints/http_server.py`, `managers/{tokenizer_manager,scheduler}.py` and `entrypoints/openai`.

Behaviour:
- a pause in mode `in_place` freezes sequences between two tokens and keeps their keys and values. Mode `retract`
  computes these again. Mode `abort` ends every request with the tokens sampled so far;
- a running request that is aborted during a pause ends after the pause, because SGLang ends it at its next token;
- an abort names a `rid`, and applies to every request whose `rid` begins with it, also after the client of the
  named request has closed its connection;
- a stream of `/generate` begins before its request is validated: an error is an event after status 200;
- a sampling parameter that does not exist, or has a wrong type, is a server error;
- model names are not checked. The version of the weights is a string, `default` until it is set.
"""

import secrets
import time
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from rookery.core import RookeryError
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.http_server import json_response, read_body
from rookery.upstreams.embedded.openai_requests import RequestError
from tests.engine_standins import sglang_requests as bodies
from tests.engine_standins.base import Standin, Stream
from tests.engine_standins.batch import StandinJob
from tests.engine_standins.replies import DONE, event
from tests.engine_standins.requests import Invalid, Unsupported, convert, read, render, split_prompts
from tests.engine_standins.sampling import SamplingParams, from_fields
from tests.engine_standins.sglang_control import add_control
from tests.engine_standins.sglang_responses import (
    ChatStreamWriter,
    CompletionStreamWriter,
    GenerateStreamWriter,
    SGLangRun,
    answered,
    chat_choice,
    completion_choice,
    generated,
)


class Broken(Exception):
    """SGLang would fail with an uncaught exception: 500, `Internal Server Error`."""


class SGLangStandin(Standin):
    metrics = (
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:generation_tokens_total",
    )
    owner = "sglang"
    incremental = False
    """True if streams are incremental, as with the option `--incremental-streaming-output`."""

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
        if not body.stream:
            runs, batch = self._runs(fields, body)
            await self.sample(runs)
            outs = [generated(run) for run in runs]
            return json_response(outs if batch else outs[0])
        try:
            runs, batch = self._runs(fields, body)
        except (ValueError, Unsupported) as error:
            code = 501 if isinstance(error, Unsupported) else 400
            failure = {"message": str(error), "type": "invalid_request_error", "code": code, "retryable": False}
            out = Stream(request)
            await out.send(event({"error": failure}))
            await out.send(DONE)
            return out.response
        writer = GenerateStreamWriter(runs, incremental=self.incremental, batch=batch)
        return await self.stream(request, runs, writer)

    def _runs(self, fields: dict[str, Any], body: bodies.Generate) -> tuple[list[SGLangRun], bool]:
        """Return the sequences and whether the response is a list. Raises `ValueError` for invalid requests."""
        bodies.check_supported(fields)
        given = body.input_ids if body.input_ids is not None else body.text
        if given is None or given == []:
            raise ValueError("text and input_ids are missing or empty")
        prompts = split_prompts(given)
        batch = prompts is given
        per = body.sampling_params if isinstance(body.sampling_params, list) else None
        if per is not None and len(per) != len(prompts):
            raise ValueError(f"there are {len(per)} sampling_params for {len(prompts)} prompts")
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num"):
            if isinstance(getattr(body, name), list):
                raise Unsupported(f"a list as {name}")
        found = []
        for number, prompt in enumerate(prompts):
            options: Any = per[number] if per is not None else body.sampling_params or {}
            found.append((self.ids(prompt), self._params(options)))
        n = found[0][1].of("n")
        if any(params.of("n") != n for _, params in found):
            raise ValueError("all prompts of a request must have the same n")
        start = None if body.logprob_start_len in (None, -1) else body.logprob_start_len
        runs = []
        for prompt, params in found:
            for number in range(n):
                job = self._job(prompt, params, number)
                if body.return_logprob and isinstance(start, int):
                    if start > len(prompt):
                        raise ValueError(f"logprob_start_len={start} is above the input's {len(prompt)} tokens")
                    if start < len(prompt):
                        job.logprob_start = start
                    if body.top_logprobs_num and job.logprob_start is not None:
                        raise Unsupported("top_logprobs_num for the input")
                run = self._run(
                    job,
                    logprobs=bool(body.return_logprob),
                    tops=body.top_logprobs_num or 0,
                    with_text=body.return_text_in_logprobs,
                    prompt_ids=body.return_prompt_token_ids,
                    special=not params.of("skip_special_tokens"),
                )
                runs.append(run)
        self._name(runs, body.rid)
        return runs, batch or n > 1

    # ----------------------------------------------------------------------------------------------- OpenAI

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        fields = await self.body(request, strict=True)
        body = convert(fields, bodies.Chat)
        if body.return_sampling_mask and not body.return_meta_info:
            raise ValueError("return_sampling_mask needs return_meta_info=true")
        (prompt, begun), calls = render(body)
        if body.stream:
            for name in ("return_prompt_token_ids", "return_token_ids", "return_meta_info"):
                if getattr(body, name):
                    raise RequestError(f"{name} is not supported with streaming: set stream=false")
        if body.input_ids is not None:
            prompt, begun = body.input_ids, ""
        params = self._openai_params(fields, body, body.max_completion_tokens or body.max_tokens)
        runs = [
            self._run(
                self._job(self.ids(prompt), params, number, calls=calls),
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
        self._name(runs, body.rid)
        if body.stream:
            return await self.stream(request, runs, ChatStreamWriter(runs, body))
        await self.sample(runs)
        choices = [chat_choice(run, number, body) for number, run in enumerate(runs)]
        return json_response(answered(runs, choices, "chat.completion", body))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        fields = await self.body(request, strict=True)
        body = convert(fields, bodies.Completion)
        if body.max_tokens is None or body.max_tokens <= 0:
            raise Invalid("value_error", ("body", "max_tokens"), "max_tokens must be above 0", body.max_tokens)
        prompts = [self.ids(prompt) for prompt in split_prompts(body.prompt)]
        if not prompts:
            raise ValueError("the prompt is empty")
        params = self._openai_params(fields, body, body.max_tokens)
        runs = [
            self._run(
                self._job(prompt, params, number),
                logprobs=body.logprobs is not None,
                tops=body.logprobs or 0,
                with_text=True,
                special=not body.skip_special_tokens,
            )
            for prompt in prompts
            for number in range(body.n)
        ]
        self._name(runs, body.rid)
        if body.stream:
            return await self.stream(request, runs, CompletionStreamWriter(runs, body))
        await self.sample(runs)
        choices = [completion_choice(run, number, body) for number, run in enumerate(runs)]
        return json_response(answered(runs, choices, "text_completion", body))

    def _openai_params(
        self, fields: dict[str, Any], body: bodies.Chat | bodies.Completion, most: int | None
    ) -> SamplingParams:
        bodies.check_supported(fields)
        params = from_fields(body, most, no_stop_trim=body.no_stop_trim)
        params.verify(self.engine.llama.shape.vocab_size)
        return params

    # ----------------------------------------------------------------------------------------------- pieces

    async def body(self, request: web.Request, *, strict: bool = False) -> dict[str, Any]:
        if strict and request.content_type != "application/json":
            raise Invalid("value_error", ("header", "content-type"), "the body must be application/json")
        return read(await read_body(request))

    def _params(self, fields: dict[str, Any]) -> SamplingParams:
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
            raise Invalid("list_type", ("body", "input_ids"), "a prompt is a text or a list of IDs", prompt)
        if not prompt:
            raise ValueError("input_ids cannot be empty.")
        if any(not 0 <= token < words for token in prompt):
            raise ValueError(f"the input_ids have values outside the vocabulary of {words} tokens")
        return prompt

    def _job(self, prompt: list[int], params: SamplingParams, number: int, *, calls: bool = True) -> StandinJob:
        context, most = self.upstream.context, params.max_new_tokens
        if len(prompt) >= context:
            raise ValueError(
                f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens)."
            )
        if most is not None and len(prompt) + most > context:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You "
                f"requested a total of {len(prompt) + most} tokens: {len(prompt)} tokens from the input messages "
                f"and {most} tokens for the completion. Please reduce the number of tokens in the input messages "
                "or the completion to fit within the limit."
            )
        ends = frozenset[int]() if params.ignore_eos else chat.ENDS | frozenset(params.stop_token_ids or ())
        job = self.job(prompt, params, number, ends=ends, calls=calls)
        job.logprob_temperature = 1.0 if params.greedy else params.of("temperature")
        return job

    def _run(self, job: StandinJob, **options: Any) -> SGLangRun:
        return SGLangRun(job=job, version=lambda: self.engine.version, began=time.perf_counter(), **options)

    def _name(self, runs: list[SGLangRun], rid: str | list[str] | None) -> None:
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
            raise ValueError("rid must have one name for each sequence")
        for run, name in zip(runs, names, strict=True):
            if name in self.engine.live:
                raise ValueError(f"Duplicate request ID detected: {name}")
            run.name = name


def _error(message: str, kind: str, code: int) -> dict[str, Any]:
    text = message.encode("utf-8", "replace").decode()
    return {"object": "error", "message": text, "type": kind, "param": None, "code": code}
