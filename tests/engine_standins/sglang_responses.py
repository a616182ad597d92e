"""Responses of SGLang at commit cce0a12: `/generate` and the OpenAI endpoints, complete and streamed.

From `managers/tokenizer_manager.py`, `entrypoints/openai/{serving_chat,serving_completions,sse_utils}.py`.

Behaviour:
- a stream of `/generate` is cumulative: each event has the whole text and all IDs and logprobs so far. With
  `incremental_streaming_output`, each event has only the new ones;
- logprobs are those of the distribution that was sampled from: after temperature scaling, before top-k and top-p;
- text that may become a stop string is sent in a stream and never taken back;
- in a chat stream, a step without text has no chunk, and its logprobs are lost. Only a complete response has IDs.
"""

import time
from collections.abc import Callable
from typing import Any

from rookery.upstreams.embedded.streaming import DecodedCall, DecodedDelta
from tests.engine_standins.replies import (
    DONE,
    Chunks,
    Run,
    StreamWriter,
    alternatives,
    chat_logprobs,
    event,
    token_text,
    usage,
)
from tests.engine_standins.sglang_requests import Chat, Completion


class SGLangRun(Run, kw_only=True):
    version: Callable[[], str]
    """Returns the version of the weights that the server reports now."""
    began: float
    with_text: bool = False
    """True if entries of log probabilities have the text of the token."""
    prompt_ids: bool = False

    @property
    def queued(self) -> bool:
        """Return whether the sequence was aborted before it began."""
        return self.job.finish == "abort" and not self.job.tokens


def finish_reason(run: SGLangRun) -> dict[str, Any]:
    job = run.job
    if run.queued:
        return {"type": "abort", "message": "Abort in waiting queue"}
    if job.finish == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if job.finish == "length":
        return {"type": "length", "length": len(job.tokens)}
    matched = job.matched.decode("utf-8", "replace") if isinstance(job.matched, bytes) else job.matched
    return {"type": "stop", "matched": matched}


def matched_stop(run: SGLangRun) -> Any:
    return finish_reason(run).get("matched")


# --------------------------------------------------------------------------------------------- /generate


def _entry(logprob: float | None, token: int, text: bool) -> list[Any]:
    return [logprob, token, token_text(token) if text else None]


def meta_info(run: SGLangRun, first: int, ready: int, ended: bool) -> dict[str, Any]:
    """Return the metadata of the tokens from `first`, which is 0 in cumulative streams."""
    job = run.job
    meta: dict[str, Any] = {"id": run.name, "finish_reason": finish_reason(run) if ended else None}
    if not run.queued:
        meta["prompt_tokens"] = len(job.prompt)
    meta["weight_version"] = run.version()
    if not run.queued:
        meta["num_retractions"] = job.retracted
    if run.logprobs:
        start = len(job.prompt) if job.logprob_start is None else job.logprob_start
        meta["input_token_logprobs"] = [
            _entry(value, token, run.with_text)
            for value, token in zip(job.prompt_logprobs, job.prompt[start:], strict=False)
        ]
        meta["output_token_logprobs"] = [
            _entry(job.logprobs[at], job.tokens[at], run.with_text) for at in range(first, ready)
        ]
        meta["output_token_logprobs_length"] = ready
        if run.tops:
            meta["input_top_logprobs"] = []
            meta["output_top_logprobs"] = [
                [_entry(value, token, run.with_text) for token, value in job.tops[at][: run.tops]]
                for at in range(first, ready)
            ]
    if run.queued:
        meta |= {"e2e_latency": time.perf_counter() - run.began, "completion_tokens": 0}
        return meta
    meta |= {"reasoning_tokens": 0, "completion_tokens": ready, "cached_tokens": job.reused}
    if ended:
        meta["e2e_latency"] = time.perf_counter() - run.began
        meta["response_sent_to_client_ts"] = time.time()
    return meta


def generated(run: SGLangRun) -> dict[str, Any]:
    """Return the complete response of `/generate`."""
    job = run.job
    out = {
        "text": run.decode().text,
        "output_ids": job.tokens,
        "meta_info": meta_info(run, 0, len(job.tokens), True),
    }
    return out | ({"prompt_token_ids": job.prompt} if run.prompt_ids else {})


class GenerateStreamWriter(StreamWriter[SGLangRun]):
    """Write the events of a stream of `/generate`."""

    withholds_stops = False

    def __init__(self, runs: list[SGLangRun], *, incremental: bool, batch: bool) -> None:
        super().__init__(runs)
        self._incremental = incremental
        self._batch = batch
        self._texts = [""] * len(runs)

    def chunks(self, number: int, first: int, ready: int, ended: bool, delta: DecodedDelta) -> Chunks:
        run = self._runs[number]
        self._texts[number] += delta.text
        since = first if self._incremental else 0
        out: dict[str, Any] = {
            "text": delta.text if self._incremental else self._texts[number],
            "output_ids": run.job.tokens[since:ready],
            "meta_info": meta_info(run, since, ready, ended),
        }
        if run.prompt_ids:
            out["prompt_token_ids"] = run.job.prompt
        if self._batch:
            out["index"] = number
        return [out]


# ------------------------------------------------------------------------------------------------ OpenAI


def with_details(counts: dict[str, Any]) -> dict[str, Any]:
    return counts | {"prompt_tokens_details": None, "reasoning_tokens": 0}


def completion_logprobs(run: SGLangRun, first: int, last: int) -> dict[str, Any] | None:
    if not run.logprobs:
        return None
    return {
        "text_offset": [-1] * (last - first),
        "token_logprobs": run.job.logprobs[first:last],
        "tokens": [token_text(token) for token in run.job.tokens[first:last]],
        "top_logprobs": [alternatives(run, at) for at in range(first, last)] if run.tops else [],
    }


def _tool_call(call: DecodedCall) -> dict[str, Any]:
    function = {"name": call.name or None, "arguments": call.arguments}
    return {"id": call.id or None, "index": call.index, "type": "function", "function": function}


def chat_choice(run: SGLangRun, number: int, body: Chat) -> dict[str, Any]:
    job = run.job
    delta = run.decode()
    calls = [_tool_call(call) for call in delta.calls]
    message = {
        "role": "assistant",
        "content": delta.text,
        "reasoning_content": None,
        "tool_calls": calls or None,
    }
    called = bool(calls) and job.finish == "stop"
    choice = {
        "index": number,
        "message": message,
        "logprobs": chat_logprobs(run, 0, len(job.tokens)),
        "finish_reason": "tool_calls" if called else finish_reason(run)["type"],
        "matched_stop": None if called else matched_stop(run),
    }
    if run.prompt_ids:
        choice["prompt_token_ids"] = job.prompt
    if body.return_token_ids:
        choice["response_token_ids"] = job.tokens
    if body.return_meta_info:
        choice["meta_info"] = meta_info(run, 0, len(job.tokens), True)
    return choice


def completion_choice(run: SGLangRun, number: int, body: Completion) -> dict[str, Any]:
    job = run.job
    choice = {
        "index": number,
        "text": run.decode().text,
        "logprobs": completion_logprobs(run, 0, len(job.tokens)),
        "finish_reason": finish_reason(run)["type"],
        "matched_stop": matched_stop(run),
    }
    return choice | ({"token_ids": job.tokens, "prompt_token_ids": job.prompt} if body.return_token_ids else {})


def answered(runs: list[SGLangRun], choices: list[dict[str, Any]], kind: str, body: Chat | Completion) -> Any:
    return {
        "id": runs[0].name,
        "object": kind,
        "created": int(time.time()),
        "model": body.model or "default",
        "choices": choices,
        "usage": with_details(usage(runs, body.n)),
        "metadata": {"weight_version": runs[0].version()},
    }


class OpenAIStreamWriter(StreamWriter[SGLangRun]):
    withholds_stops = False
    begins_at_once = False
    kind: str

    def __init__(self, runs: list[SGLangRun], body: Chat | Completion) -> None:
        super().__init__(runs)
        self._body = body
        self._about = {"object": self.kind, "created": int(time.time()), "model": body.model or "default"}

    def step_usage(self, number: int, ready: int) -> dict[str, Any] | None:
        """Return the token counts so far, if the request wants them in every event."""
        options = self._body.stream_options
        continuous = self._body.with_usage and options is not None and options.continuous_usage_stats
        prompt = len(self._runs[number].job.prompt)
        used = {"prompt_tokens": prompt, "total_tokens": prompt + ready, "completion_tokens": ready}
        return with_details(used) if continuous else None

    def end(self) -> list[bytes]:
        if not self._body.with_usage:
            return [DONE]
        last = {"id": self._runs[0].name, **self._about, "choices": []}
        return [event(last | {"usage": with_details(usage(self._runs, self._body.n))}), DONE]


class ChatStreamWriter(OpenAIStreamWriter):
    """Write the events of a chat stream. Finish reasons come last, as SGLang sends them."""

    kind = "chat.completion.chunk"

    def chunks(self, number: int, first: int, ready: int, ended: bool, delta: DecodedDelta) -> Chunks:
        run = self._runs[number]
        chunks = [] if first else [self._chunk(number, {"role": "assistant", "content": ""})]
        logprobs = chat_logprobs(run, first, ready)
        used = self.step_usage(number, ready)
        if delta.text:
            chunks.append(self._chunk(number, {"content": delta.text}, logprobs=logprobs, usage=used))
        for call in delta.calls:
            message = {"role": None, "content": None, "tool_calls": [_tool_call(call)]}
            chunks.append(self._chunk(number, message) | {"usage": None})
        if run.tools and not delta.text and logprobs:
            chunks.append(self._chunk(number, {}, logprobs=logprobs, usage=used))
        return chunks

    def end(self) -> list[bytes]:
        events = []
        for number, run in enumerate(self._runs):
            called = self._decoders[number].calls and run.job.finish == "stop"
            reason = "tool_calls" if called else finish_reason(run)["type"]
            events.append(event(self._chunk(number, {}, finish=reason, matched=matched_stop(run))))
        return [*events, *super().end()]

    def _chunk(self, number: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {
            "index": number,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": more.get("logprobs"),
            "finish_reason": more.get("finish"),
            "matched_stop": more.get("matched"),
        }
        chunk = {"id": self._runs[number].name, **self._about, "choices": [choice]}
        return chunk | ({"usage": more["usage"]} if more.get("usage") else {})


class CompletionStreamWriter(OpenAIStreamWriter):
    kind = "text_completion"

    def chunks(self, number: int, first: int, ready: int, ended: bool, delta: DecodedDelta) -> Chunks:
        run = self._runs[number]
        choice: dict[str, Any] = {
            "index": number,
            "text": delta.text,
            "logprobs": completion_logprobs(run, first, ready) if first < ready else None,
            "finish_reason": finish_reason(run)["type"] if ended else None,
            "matched_stop": matched_stop(run) if ended else None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = run.job.tokens[first:ready]
            choice |= {} if first else {"prompt_token_ids": run.job.prompt}
        used = self.step_usage(number, ready)
        return [{"id": run.name, **self._about, "choices": [choice], "usage": used}]
