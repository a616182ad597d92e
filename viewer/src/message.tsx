// One message of a transcript.

import { useState } from "preact/hooks";
import type { Message, Part, ToolCall } from "./types";
import { Data, LongText, guessLanguage, looksLikeDiff, visible } from "./text";

const IMAGE = /^data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]*$/;

export function textOf(message: Message): string {
  if (typeof message.content === "string") return message.content;
  return (message.content ?? []).map((part) => (part.type === "text" ? String(part.text ?? "") : "")).join("");
}

function parse(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function Call({ call }: { call: ToolCall }) {
  const source = call.arguments ?? "{}";
  const parsed = parse(source);
  const isObject = typeof parsed === "object" && parsed !== null && !Array.isArray(parsed);
  return (
    <div class="call">
      <div class="call-name">
        <span aria-hidden="true">▸ </span>
        {visible(call.name)} <code class="quiet">{visible(call.id)}</code>
      </div>
      {isObject ? <Data value={parsed} /> : <LongText text={source} language={guessLanguage("", source)} />}
    </div>
  );
}

function ContentPart({ part }: { part: Part }) {
  if (part.type === "text") return <Body text={String(part.text ?? "")} />;
  const url = typeof part.image_url === "string" ? part.image_url : part.image_url?.url;
  if (url && IMAGE.test(url)) return <img class="picture" src={url} alt="image in the message" />;
  if (url) return <p class="quiet">image at {visible(url.slice(0, 200))} (not loaded)</p>;
  return <Data value={part} />;
}

function Body({ text }: { text: string }) {
  return <LongText text={text} language={looksLikeDiff(text) ? "diff" : "text"} />;
}

export interface MessageProps {
  message: Message;
  open: boolean;
  reasoning: boolean;
  about?: string;
}

export function MessageView({ message, open, reasoning, about = "" }: MessageProps) {
  const [toggled, setToggled] = useState<boolean | null>(null);
  const shown = toggled ?? open;
  const content = message.content;
  return (
    <article class={`message role-${message.role}`}>
      <button class="message-head" aria-expanded={shown} onClick={() => setToggled(!shown)}>
        <b>{visible(message.role)}</b> {message.name && <code>{visible(message.name)}</code>}{" "}
        {message.tool_call_id && <code class="quiet">{visible(message.tool_call_id)}</code>}
        {!shown && <span class="preview">{visible(preview(message))}</span>}
        <span class="quiet about">{about}</span>
      </button>
      {shown && (
        <div class="message-body">
          {message.reasoning && (
            <details class="reasoning" open={reasoning}>
              <summary>Reasoning ({message.reasoning.length.toLocaleString("en")} characters)</summary>
              <LongText text={message.reasoning} />
            </details>
          )}
          {typeof content === "string" && content !== "" && <Body text={content} />}
          {Array.isArray(content) && content.map((part, at) => <ContentPart key={at} part={part} />)}
          {message.left_out ? <p class="more">{message.left_out.toLocaleString("en")} more characters</p> : null}
          {message.tool_calls?.map((call, at) => (
            <Call key={at} call={call} />
          ))}
        </div>
      )}
    </article>
  );
}

function preview(message: Message): string {
  const calls = message.tool_calls?.map((call) => `${call.name}(…)`).join(" ") ?? "";
  return `${textOf(message).slice(0, 160)} ${calls}`.replace(/\s+/g, " ").slice(0, 160);
}
