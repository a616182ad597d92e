// Text from rollouts. It is untrusted: it is only ever inserted as text nodes, and characters that are invisible or
// change the direction of text are shown as escapes.

import { useState } from "preact/hooks";
import type { ComponentChildren } from "preact";

const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\u{e0000}-\u{e0fff}\p{Cs}\p{Co}]/gu;
const FIRST = 4_000;
const STEP = 100_000;

function escape(char: string): string {
  const code = char.codePointAt(0) ?? 0;
  if (code < 256) return `\\x${code.toString(16).padStart(2, "0")}`;
  return code < 65536 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
}

/** Text as nodes, with hidden characters escaped. */
export function visible(text: string): ComponentChildren {
  if (text.search(HIDDEN) < 0) return text;
  const parts: ComponentChildren[] = [];
  let last = 0;
  let run = "";
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > last) {
      if (run) parts.push(<span class="hidden-char">{run}</span>);
      run = "";
      parts.push(text.slice(last, match.index));
    }
    run += escape(match[0]);
    last = match.index + match[0].length;
  }
  if (run) parts.push(<span class="hidden-char">{run}</span>);
  parts.push(text.slice(last));
  return parts;
}

export type Language = "python" | "shell" | "json" | "diff" | "text";

const KEYWORDS: Partial<Record<Language, RegExp>> = {
  python:
    /^(?:False|None|True|and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield|match|case)$/,
  shell: /^(?:if|then|else|elif|fi|for|while|do|done|case|esac|in|function|export|local|return|cd|echo|set|exit)$/,
  json: /^(?:true|false|null)$/,
};
const TOKENS =
  /(#[^\n]*)|("""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g;

function highlight(text: string, language: Language): ComponentChildren {
  const keywords = KEYWORDS[language];
  if (!keywords) return visible(text);
  const parts: ComponentChildren[] = [];
  let last = 0;
  for (const match of text.matchAll(TOKENS)) {
    const kind = match[1] && language !== "json" ? "comment" : match[2] ? "string" : match[3] ? "digit" : "";
    const name = kind || (match[4] && keywords.test(match[4]) ? "keyword" : "");
    if (!name) continue;
    if (match.index > last) parts.push(visible(text.slice(last, match.index)));
    parts.push(<span class={`code-${name}`}>{visible(match[0])}</span>);
    last = match.index + match[0].length;
  }
  parts.push(visible(text.slice(last)));
  return parts;
}

function diff(text: string): ComponentChildren {
  return text.split("\n").map((line, at) => {
    const kind = line.startsWith("@@")
      ? "hunk"
      : /^(?:\+\+\+|---|diff |index )/.test(line)
        ? "file"
        : line.startsWith("+")
          ? "added"
          : line.startsWith("-")
            ? "removed"
            : "";
    return (
      <span key={at} class={`diff-line ${kind && `diff-${kind}`}`}>
        {visible(line)}
        {"\n"}
      </span>
    );
  });
}

export function looksLikeDiff(text: string): boolean {
  return /^(?:diff --git |--- [^\n]*\n\+\+\+ |\*\*\* Begin Patch)/m.test(text.slice(0, 2000)) && /^[+-]/m.test(text);
}

/** A text that may be very long: its beginning, and buttons for more. */
export function LongText({ text, language = "text" }: { text: string; language?: Language }) {
  const [shown, setShown] = useState(FIRST);
  const part = text.length > shown ? text.slice(0, shown) : text;
  return (
    <>
      <pre class="text">{language === "diff" ? diff(part) : highlight(part, language)}</pre>
      {text.length > shown && (
        <p class="more">
          {(text.length - shown).toLocaleString("en")} more characters{" "}
          <button onClick={() => setShown(shown === FIRST && text.length <= STEP ? STEP : shown + STEP)}>
            Show {Math.min(STEP, text.length - shown).toLocaleString("en")} more
          </button>
        </p>
      )}
    </>
  );
}

/** Plain data (`info`, payloads, arguments) as an indented list of names and values. */
export function Data({ value, name = "" }: { value: unknown; name?: string }) {
  if (typeof value === "string") {
    if (value.includes("\n") || value.length > 120)
      return <LongText text={value} language={guessLanguage(name, value)} />;
    return <code>{visible(value)}</code>;
  }
  if (value === null || typeof value !== "object") return <code>{String(value)}</code>;
  const entries = Array.isArray(value)
    ? value.map((one, at) => [String(at), one] as const)
    : Object.entries(value as Record<string, unknown>);
  if (!entries.length) return <code>{Array.isArray(value) ? "[]" : "{}"}</code>;
  return (
    <dl class="data">
      {entries.slice(0, 200).map(([inner, one]) => (
        <div key={inner}>
          <dt>{visible(inner)}</dt>
          <dd>
            <Data value={one} name={inner} />
          </dd>
        </div>
      ))}
      {entries.length > 200 && <div>and {entries.length - 200} more entries</div>}
    </dl>
  );
}

export function guessLanguage(name: string, text: string): Language {
  if (looksLikeDiff(text) || /^(?:diff|patch)$/i.test(name)) return "diff";
  if (/^(?:code|python|source|program|solution)$/i.test(name)) return "python";
  if (/^(?:cmd|command|bash|shell|script)$/i.test(name)) return "shell";
  if (/^\s*[[{]/.test(text)) return "json";
  return /^(?:import |from \w+ import |def |class )/m.test(text.slice(0, 500)) ? "python" : "text";
}
