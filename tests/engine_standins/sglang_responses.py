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
from typing import Any, Final

import msgspec

from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.streaming import DecodedCall, DeltaDecoder
from tests.engine_standins.vllm_logprobs import token_text

encode = msgspec.json.Encoder().encode
DONE: Final = b"data: [DONE]\n\n"


class Run(msgspec.Struct, kw_only=True):
    """One sequence and the options of its reply."""

    rid: str
    job: SamplingJob
    version: Any
    """Gives what the server calls the weights now."""
    began: float
    logprobs: bool = False
    tops: int = 0
    with_text: bool = False
    prompt_ids: bool = False
    special: bool = False
    begun: str = ""
    tools: bool = False

    def deltas(self, *, streamed: bool) -> DeltaDecoder:
        job = self.job
        return DeltaDecoder(
            prefix=self.begun,
            prompt_length=len(job.prompt),
            stop=() if streamed else job.stop,
            calls_as_text=not self.tools and self.special,
            hide_calls=not self.tools and not self.special,
        )

    @property
    def queued(self) -> bool:
        """Return whether the sequence was aborted before it began."""
        return self.job.finish == "abort" and not self.job.tokens


def finish_reason(run: Run) -> dict[str, Any]:
    job = run.job
    if run.queued:
        return {"type": "abort", "message": "Abort in waiting queue"}
    if job.finish == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if job.finish == "length":
        return {"type": "length", "length": len(job.tokens)}
    matched = job.matched.decode("utf-8", "replace") if isinstance(job.matched, bytes) else job.matched
    return {"type": "stop", "matched": matched}


def _entry(logprob: float | None, token: int, text: bool) -> list[Any]:
    return [logprob, token, token_text(token) if text else None]


def meta_info(run: Run, first: int, ready: int, ended: bool) -> dict[str, Any]:
    """Return the metadata of the tokens from `first`, which is 0 in cumulative streams."""
    job = run.job
    meta: dict[str, Any] = {"id": run.rid, "finish_reason": finish_reason(run) if ended else None}
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


def generated(run: Run) -> dict[str, Any]:
    """Return the complete response of `/generate`."""
    job = run.job
    out = {
        "text": run.deltas(streamed=False).finish(job.tokens, job.text_tokens).text,
        "output_ids": job.tokens,
        "meta_info": meta_info(run, 0, len(job.tokens), True),
    }
    return out | ({"prompt_token_ids": job.prompt} if run.prompt_ids else {})


class GenerateStreamWriter:
    """Write the events of a stream of `/generate`."""

    def __init__(self, runs: list[Run], *, incremental: bool, batch: bool) -> None:
        self._runs = runs
        self._incremental = incremental
        self._batch = batch
        self._deltas = [run.deltas(streamed=True) for run in runs]
        self._texts = [""] * len(runs)
        self._sent = [0] * len(runs)

    def new_events(self, number: int, ready: int, ended: bool) -> bytes:
        run, deltas = self._runs[number], self._deltas[number]
        job = run.job
        first, self._sent[number] = self._sent[number], ready
        new = (deltas.finish(job.tokens, job.text_tokens) if ended else deltas.feed(job.tokens, ready)).text
        self._texts[number] += new
        since = first if self._incremental else 0
        out: dict[str, Any] = {
            "text": new if self._incremental else self._texts[number],
            "output_ids": job.tokens[since:ready],
            "meta_info": meta_info(run, since, ready, ended),
        }
        if run.prompt_ids:
            out["prompt_token_ids"] = job.prompt
        if self._batch:
            out["index"] = number
        return event(out)


def event(body: Any) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


# ------------------------------------------------------------------------------------------------ OpenAI


def usage(runs: list[Run], n: int) -> dict[str, Any]:
    prompt = sum(len(run.job.prompt) for run in runs[::n])
    sampled = sum(len(run.job.tokens) for run in runs)
    return step_usage(prompt, sampled)


def step_usage(prompt: int, sampled: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + sampled,
        "completion_tokens": sampled,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def chat_logprobs(run: Run, first: int, ready: int) -> dict[str, Any] | None:
    if not run.logprobs:
        return None
    content = []
    for at in range(first, ready):
        token = token_text(run.job.tokens[at])
        tops = {token_text(other): value for other, value in (run.job.tops[at][: run.tops] if run.tops else ())}
        content.append(
            {
                "token": token,
                "bytes": list(token.encode()),
                "logprob": run.job.logprobs[at],
                "top_logprobs": [
                    {"token": name, "bytes": list(name.encode()), "logprob": value} for name, value in tops.items()
                ],
            }
        )
    return {"content": content}


def completion_logprobs(run: Run, first: int, ready: int) -> dict[str, Any] | None:
    if not run.logprobs:
        return None
    job = run.job
    return {
        "text_offset": [-1] * (ready - first),
        "token_logprobs": job.logprobs[first:ready],
        "tokens": [token_text(token) for token in job.tokens[first:ready]],
        "top_logprobs": [
            {token_text(token): value for token, value in job.tops[at][: run.tops]}
            for at in (range(first, ready) if run.tops else ())
        ],
    }


def matched_stop(run: Run) -> Any:
    return finish_reason(run).get("matched")


def chat_choice(run: Run, number: int, *, ids: bool, meta: bool) -> dict[str, Any]:
    job = run.job
    delta = run.deltas(streamed=False).finish(job.tokens, job.text_tokens)
    calls = [
        {
            "id": call.id,
            "index": call.index,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in delta.calls
    ]
    message = {
        "role": "assistant",
        "content": delta.text,
        "reasoning_content": None,
        "tool_calls": calls or None,
    }
    choice = {
        "index": number,
        "message": message,
        "logprobs": chat_logprobs(run, 0, len(job.tokens)),
        "finish_reason": "tool_calls" if calls and job.finish == "stop" else finish_reason(run)["type"],
        "matched_stop": None if calls and job.finish == "stop" else matched_stop(run),
    }
    if run.prompt_ids:
        choice["prompt_token_ids"] = job.prompt
    if ids:
        choice["response_token_ids"] = job.tokens
    if meta:
        choice["meta_info"] = meta_info(run, 0, len(job.tokens), True)
    return choice


def completion_choice(run: Run, number: int, *, ids: bool) -> dict[str, Any]:
    job = run.job
    choice = {
        "index": number,
        "text": run.deltas(streamed=False).finish(job.tokens, job.text_tokens).text,
        "logprobs": completion_logprobs(run, 0, len(job.tokens)),
        "finish_reason": finish_reason(run)["type"],
        "matched_stop": matched_stop(run),
    }
    return choice | ({"token_ids": job.tokens, "prompt_token_ids": job.prompt} if ids else {})


def answered(runs: list[Run], choices: list[dict[str, Any]], *, kind: str, model: str, n: int) -> dict[str, Any]:
    return {
        "id": runs[0].rid,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(runs, n),
        "metadata": {"weight_version": runs[0].version()},
    }


class ChatStreamWriter:
    """Write the events of a chat stream. Finish reasons come last, as SGLang sends them."""

    def __init__(self, runs: list[Run], *, model: str, n: int, with_usage: bool, continuous: bool) -> None:
        self._runs = runs
        self._about = {"object": "chat.completion.chunk", "created": int(time.time()), "model": model}
        self._n = n
        self._usage = with_usage
        self._continuous = continuous
        self._deltas = [run.deltas(streamed=True) for run in runs]
        self._sent = [0] * len(runs)
        self._begun = [False] * len(runs)

    def new_events(self, number: int, ready: int, ended: bool) -> list[bytes]:
        run, deltas = self._runs[number], self._deltas[number]
        job = run.job
        first, self._sent[number] = self._sent[number], ready
        events = []
        if not self._begun[number]:
            self._begun[number] = True
            events.append(self._chunk(number, {"role": "assistant", "content": ""}))
        delta = deltas.finish(job.tokens, job.text_tokens) if ended else deltas.feed(job.tokens, ready)
        logprobs = chat_logprobs(run, first, ready)
        used = step_usage(len(job.prompt), ready) if self._continuous else None
        if delta.text:
            events.append(self._chunk(number, {"content": delta.text}, logprobs=logprobs, usage=used))
        events += [self._call(number, call) for call in delta.calls]
        if run.tools and not delta.text and logprobs:
            events.append(self._chunk(number, {}, logprobs=logprobs, usage=used))
        return events

    def end(self) -> list[bytes]:
        events = []
        for number, run in enumerate(self._runs):
            if not self._begun[number]:
                continue
            called = self._deltas[number].calls and run.job.finish == "stop"
            reason = "tool_calls" if called else finish_reason(run)["type"]
            events.append(self._chunk(number, {}, finish=reason, matched=matched_stop(run)))
        if self._usage:
            head = {"id": self._runs[0].rid, **self._about}
            events.append(event(head | {"choices": [], "usage": usage(self._runs, self._n)}))
        return [*events, DONE]

    def _chunk(self, number: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {
            "index": number,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": more.get("logprobs"),
            "finish_reason": more.get("finish"),
            "matched_stop": more.get("matched"),
        }
        chunk = {"id": self._runs[number].rid, **self._about, "choices": [choice]}
        return event(chunk | ({"usage": more["usage"]} if more.get("usage") else {}))

    def _call(self, number: int, call: DecodedCall) -> bytes:
        tool_call = {
            "id": call.id or None,
            "index": call.index,
            "type": "function",
            "function": {"name": call.name or None, "arguments": call.arguments},
        }
        delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": [tool_call]}
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}
        chunk = {"id": self._runs[number].rid, **self._about, "choices": [choice], "usage": None}
        return event(chunk)


class CompletionStreamWriter:
    def __init__(
        self, runs: list[Run], *, model: str, n: int, ids: bool, with_usage: bool, continuous: bool
    ) -> None:
        self._runs = runs
        self._about = {"object": "text_completion", "created": int(time.time()), "model": model}
        self._n = n
        self._ids = ids
        self._usage = with_usage
        self._continuous = continuous
        self._deltas = [run.deltas(streamed=True) for run in runs]
        self._sent = [0] * len(runs)

    def new_events(self, number: int, ready: int, ended: bool) -> list[bytes]:
        run, deltas = self._runs[number], self._deltas[number]
        job = run.job
        first, self._sent[number] = self._sent[number], ready
        text = (deltas.finish(job.tokens, job.text_tokens) if ended else deltas.feed(job.tokens, ready)).text
        choice: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": completion_logprobs(run, first, ready) if first < ready else None,
            "finish_reason": finish_reason(run)["type"] if ended else None,
            "matched_stop": matched_stop(run) if ended else None,
        }
        if self._ids:
            choice["token_ids"] = job.tokens[first:ready]
            choice |= {} if first else {"prompt_token_ids": job.prompt}
        used = step_usage(len(job.prompt), ready) if self._continuous else None
        return [event({"id": run.rid, **self._about, "choices": [choice], "usage": used})]

    def end(self) -> list[bytes]:
        if not self._usage:
            return [DONE]
        head = {"id": self._runs[0].rid, **self._about}
        return [event(head | {"choices": [], "usage": usage(self._runs, self._n)}), DONE]
