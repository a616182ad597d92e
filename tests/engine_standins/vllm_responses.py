"""Responses of vLLM at commit a014e35: complete ones and the chunks of streams.

From `entrypoints/openai/{chat_completion,completion}/serving.py` and `entrypoints/scale_out/token_in_token_out/
serving.py`. Whole responses have every field of their model, null or not; chunks only those that were set.

Behaviour:
- in a chat stream, the prompt IDs are in the first chunks, which also have the role. Every later chunk has IDs
  of its own tokens, with an empty delta if the text of the tokens is not complete yet;
- a request that is aborted before its first token has no finish chunk in a stream. In a stream of
  `/inference/v1/generate` an abort never has one, only the `[DONE]`;
- with `include_reasoning: false`, there are no IDs and logprobs.
"""

from typing import Any, Final

import msgspec

from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.streaming import DecodedCall, DecodedDelta
from tests.engine_standins.vllm_logprobs import (
    ReplyOptions,
    chat_logprobs,
    completion_logprobs,
    generate_logprobs,
)

encode = msgspec.json.Encoder().encode
FINGERPRINT: Final = "vllm-standin-rookery"
DONE: Final = b"data: [DONE]\n\n"


def usage(prompt: int, sampled: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + sampled,
        "completion_tokens": sampled,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def short_usage(prompt: int, sampled: int) -> dict[str, Any]:
    """Return the usage of a chunk; unset fields are omitted."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}


def stop_reason(job: SamplingJob) -> int | str | None:
    """Return the stop string or ID; None for the end-of-sequence token."""
    if isinstance(job.matched, bytes):
        return job.matched.decode("utf-8", "replace")
    return None if job.matched == chat.END else job.matched


# ------------------------------------------------------------------------------------------ whole answers


def chat_answer(reply_options: ReplyOptions) -> dict[str, Any]:
    choices = []
    for number, job in enumerate(reply_options.jobs):
        delta = reply_options.deltas(job).finish(job.tokens, job.text_tokens)
        calls = delta.calls if reply_options.parallel else delta.calls[:1]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": (delta.text or ("" if reply_options.named or reply_options.required else None))
            if calls
            else delta.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        message["reasoning"] = None
        called = (calls and not reply_options.named and not reply_options.required) or (
            reply_options.required and job.finish == "stop"
        )
        choices.append(
            {
                "index": number,
                "message": message,
                "logprobs": chat_logprobs(reply_options, job, 0, len(job.tokens)),
                "finish_reason": "tool_calls" if called else job.finish,
                "stop_reason": stop_reason(job),
                "token_ids": job.tokens if reply_options.token_ids and not reply_options.hidden else None,
                "routed_experts": None,
            }
        )
    return {
        **reply_options.head("chat.completion"),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(reply_options.prompt_tokens, sum(len(job.tokens) for job in reply_options.jobs)),
        "prompt_logprobs": None,
        "prompt_token_ids": reply_options.jobs[0].prompt if reply_options.token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def completion_answer(reply_options: ReplyOptions) -> dict[str, Any]:
    choices = [
        {
            "index": number,
            "text": reply_options.deltas(job).finish(job.tokens, job.text_tokens).text,
            "logprobs": completion_logprobs(reply_options, job, 0, len(job.tokens), 0),
            "finish_reason": job.finish,
            "stop_reason": stop_reason(job),
            "token_ids": job.tokens if reply_options.token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": job.prompt if reply_options.token_ids else None,
            "routed_experts": None,
        }
        for number, job in enumerate(reply_options.jobs)
    ]
    return {
        **reply_options.head("text_completion"),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(reply_options.prompt_tokens, sum(len(job.tokens) for job in reply_options.jobs)),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def generate_answer(reply_options: ReplyOptions) -> dict[str, Any]:
    choices = [
        {
            "index": number,
            "logprobs": generate_logprobs(reply_options, job, 0, len(job.tokens)),
            "finish_reason": job.finish,
            "token_ids": job.tokens,
            "routed_experts": None,
            "sampling_mask": None,
        }
        for number, job in enumerate(reply_options.jobs)
    ]
    return {
        "request_id": reply_options.name,
        "model": reply_options.model,
        "created": reply_options.created,
        "choices": choices,
        "usage": usage(reply_options.prompt_tokens, sum(len(job.tokens) for job in reply_options.jobs)),
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


# ------------------------------------------------------------------------------------------------- chunks


class StreamWriter:
    """Write the events of one stream."""

    def __init__(self, reply_options: ReplyOptions) -> None:
        self.reply_options = reply_options
        self._deltas = [reply_options.deltas(job) for job in reply_options.jobs]
        self._sent = [0] * len(reply_options.jobs)
        self._letters = [0] * len(reply_options.jobs)
        self._called = [False] * len(reply_options.jobs)
        self._begun = False

    def new_events(self, number: int, ready: int, ended: bool) -> list[bytes]:
        """Return the events for new tokens of one choice."""
        write = {"chat": self._chat, "completion": self._completion, "generate": self._generate}[
            self.reply_options.kind
        ]
        first, self._sent[number] = self._sent[number], ready
        return [_event(chunk) for chunk in write(number, first, ready, ended)]

    def end(self) -> list[bytes]:
        """Return the events after the last choice."""
        reply_options = self.reply_options
        sampled = sum(len(job.tokens) for job in reply_options.jobs)
        events = []
        if reply_options.usage and reply_options.kind == "generate":
            last = {
                "request_id": reply_options.name,
                "choices": [],
                "usage": short_usage(reply_options.prompt_tokens, sampled),
            }
            events.append(_event(last))
        elif reply_options.usage:
            kind = "chat.completion.chunk" if reply_options.kind == "chat" else "text_completion"
            more = {"usage": short_usage(reply_options.prompt_tokens, sampled), "system_fingerprint": FINGERPRINT}
            events.append(_event(reply_options.head(kind) | {"choices": []} | more))
        return [*events, DONE]

    def _finished(self, chunk: dict[str, Any], number: int, ready: int, ended: bool) -> dict[str, Any]:
        reply_options = self.reply_options
        if reply_options.continuous:
            chunk["usage"] = short_usage(len(reply_options.jobs[number].prompt), ready)
        if ended and not reply_options.usage and reply_options.kind != "generate":
            chunk["system_fingerprint"] = FINGERPRINT
        return chunk

    def _chat(self, number: int, first: int, ready: int, ended: bool) -> list[dict[str, Any]]:
        reply_options, job = self.reply_options, self.reply_options.jobs[number]
        chunks = [] if self._begun else self._roles()
        self._begun = True
        if not ready:  # aborted before it began
            return chunks
        delta = (
            self._deltas[number].finish(job.tokens, job.text_tokens)
            if ended
            else self._deltas[number].feed(job.tokens, ready)
        )
        message = _delta(delta, reply_options)
        self._called[number] |= "tool_calls" in message
        ids = reply_options.token_ids and not reply_options.hidden
        if not message and not ended and not ids:
            return chunks
        choice: dict[str, Any] = {
            "index": number,
            "delta": message,
            "logprobs": chat_logprobs(reply_options, job, first, ready),
            "finish_reason": None,
        }
        if ended:
            choice["finish_reason"] = (
                "tool_calls" if self._called[number] and not reply_options.named else job.finish
            )
            choice["stop_reason"] = stop_reason(job)
        choice["token_ids"] = job.tokens[first:ready] if ids else None
        chunk = reply_options.head("chat.completion.chunk") | {"choices": [choice]}
        return [*chunks, self._finished(chunk, number, ready, ended)]

    def _roles(self) -> list[dict[str, Any]]:
        reply_options = self.reply_options
        chunks = []
        for number, job in enumerate(reply_options.jobs):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = reply_options.head("chat.completion.chunk") | {"choices": [choice]}
            if reply_options.continuous:
                chunk["usage"] = short_usage(len(job.prompt), 0)
            chunk |= {"prompt_token_ids": job.prompt if reply_options.token_ids else None, "prompt_text": None}
            chunks.append(chunk)
        return chunks

    def _completion(self, number: int, first: int, ready: int, ended: bool) -> list[dict[str, Any]]:
        reply_options, job = self.reply_options, self.reply_options.jobs[number]
        if not ready:
            return []
        deltas = self._deltas[number]
        text = (deltas.finish(job.tokens, job.text_tokens) if ended else deltas.feed(job.tokens, ready)).text
        choice = {
            "index": number,
            "text": text,
            "logprobs": completion_logprobs(reply_options, job, first, ready, self._letters[number]),
            "finish_reason": job.finish if ended else None,
            "stop_reason": stop_reason(job) if ended else None,
            "prompt_token_ids": job.prompt if reply_options.token_ids and not first else None,
            "token_ids": job.tokens[first:ready] if reply_options.token_ids else None,
        }
        self._letters[number] += len(text)
        chunk = reply_options.head("text_completion") | {"choices": [choice]}
        return [self._finished(chunk, number, ready, ended)]

    def _generate(self, number: int, first: int, ready: int, ended: bool) -> list[dict[str, Any]]:
        reply_options, job = self.reply_options, self.reply_options.jobs[number]
        if first == ready:
            return []
        choice = {
            "index": number,
            "logprobs": generate_logprobs(reply_options, job, first, ready),
            "finish_reason": job.finish if ended else None,
            "token_ids": job.tokens[first:ready],
            "routed_experts": None,
            "sampling_mask": None,
        }
        chunk: dict[str, Any] = {"request_id": reply_options.name, "choices": [choice], "usage": None}
        if reply_options.continuous:
            chunk["usage"] = usage(len(job.prompt), ready)
        return [chunk]


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


def _delta(delta: DecodedDelta, reply_options: ReplyOptions) -> dict[str, Any]:
    message: dict[str, Any] = {}
    if delta.text:
        message["content"] = delta.text
    calls = [call for call in delta.calls if reply_options.parallel or call.index == 0]
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: DecodedCall) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "index": call.index, "function": function}
