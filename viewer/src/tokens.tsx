// The tokens of a rollout's segments, coloured by what is known about each.

import { useEffect, useMemo, useState } from "preact/hooks";
import { useData } from "./api";
import { count, number, percent } from "./format";
import { Problem } from "./parts";
import { RolloutHead } from "./rollout";
import { setQuery, useRoute } from "./route";
import { visible } from "./text";
import type { Rollout, Tokens as TokenData } from "./types";

const CHUNK = 1000;
const PAGE = 20_000;
const RATIO = "extra:importance ratio";

export function Tokens({ run, id }: { run: string; id: string }) {
  const { query } = useRoute();
  const segment = Number(query.get("segment") ?? 0);
  const start = Number(query.get("start") ?? 0);
  const wanted = query.get("color") ?? "logprob";
  const rollout = useData<Rollout>("rollout", { run, id });
  const { data, error } = useData<TokenData>("tokens", { run, id, segment, start });
  const color = wanted.startsWith("extra:") && data && !(wanted.slice(6) in data.extras) ? "logprob" : wanted;
  const [at, setAt] = useState<number | null>(null);
  useEffect(() => setAt(null), [id, segment, start]);
  return (
    <main>
      {rollout.data && <RolloutHead run={run} data={rollout.data} page="tokens" />}
      {!data && <Problem error={error} />}
      {data && (
        <>
          <div class="filter-row">
            <label>
              Segment{" "}
              <select value={segment} onChange={(event) => setQuery({ segment: event.currentTarget.value, start: "" })}>
                {Array.from({ length: data.segments }, (_, one) => (
                  <option key={one} value={one}>
                    {one} · turns {rollout.data?.segments[one]?.turns.join(", ") ?? ""}
                  </option>
                ))}
              </select>
            </label>
            <label>
              Colour by{" "}
              <select value={color} onChange={(event) => setQuery({ color: event.currentTarget.value })}>
                <option value="logprob">log probability</option>
                <option value="mask">loss mask</option>
                <option value="version">policy version</option>
                {Object.keys(data.extras).map((name) => (
                  <option key={name} value={`extra:${name}`}>
                    {name}
                  </option>
                ))}
              </select>
            </label>
            {data.length > PAGE && (
              <span>
                <button disabled={!start} onClick={() => setQuery({ start: Math.max(0, start - PAGE) })}>
                  ←
                </button>{" "}
                tokens {count(start)} to {count(start + data.tokens.length)} of {count(data.length)}{" "}
                <button disabled={start + PAGE >= data.length} onClick={() => setQuery({ start: start + PAGE })}>
                  →
                </button>
              </span>
            )}
            <Legend data={data} color={color} />
          </div>
          <Info data={data} at={at} />
          <Strip data={data} color={color} at={at} onMove={setAt} />
          <p class="quiet">texts: {visible(data.tokenizer)}</p>
        </>
      )}
    </main>
  );
}

function versionOf(data: TokenData, at: number): number | null {
  const position = data.start + at;
  return data.versions.find(([low, high]) => low <= position && position < high)?.[2] ?? null;
}

function Legend({ data, color }: { data: TokenData; color: string }) {
  const trained = data.mask.reduce((sum, one) => sum + one, 0);
  const versions = [...new Set(data.versions.map((one) => one[2]))];
  return (
    <span class="token-legend">
      {color === "logprob" && (
        <>
          <span class="token lp-0">p &gt; 0.9</span>
          <span class="token lp-2">0.5</span>
          <span class="token lp-4">0.1</span>
          <span class="token lp-6">&lt; 0.01</span>
        </>
      )}
      {color === "mask" && (
        <>
          <span class="token trains">trains</span> <span class="token context">context</span>
        </>
      )}
      {color === RATIO && (
        <>
          <span class="token ra-0">&lt; 0.5</span>
          <span class="token ra-3">1</span>
          <span class="token ra-6">&gt; 2</span>
        </>
      )}
      {color === "version" &&
        versions.map((version, index) => (
          <span key={version} class={`token v-${index % 6}`}>
            version {version}
          </span>
        ))}
      <span class="quiet">
        {count(trained)} of {count(data.tokens.length)} tokens here train
      </span>
    </span>
  );
}

function Info({ data, at }: { data: TokenData; at: number | null }) {
  if (at === null || at >= data.tokens.length)
    return <p class="token-info quiet">Point at a token, or choose one and use the arrow keys.</p>;
  const id = data.tokens[at] ?? 0;
  const trains = data.mask[at] === 1;
  const logprob = data.logprobs[at] ?? null;
  const position = data.start + at;
  const turn = data.turns.find(([, low, high]) => low <= position && position < high)?.[0];
  return (
    <p class="token-info" role="status">
      position <b>{count(position)}</b> · id <b>{id}</b> · text <code>{visible(JSON.stringify(data.texts[id] ?? null))}</code>{" "}
      · {trains ? "trains" : "context"}
      {trains && logprob !== null && (
        <>
          {" "}
          · logprob <b>{number(logprob, 5)}</b> ({percent(Math.exp(logprob))})
        </>
      )}
      {trains && logprob === null && " · no log probability"}
      {trains && ` · version ${versionOf(data, at)}`}
      {turn !== undefined && ` · turn ${turn}`}
      {Object.entries(data.extras).map(([name, values]) => ` · ${name} ${number(values[at])}`)}
      <Alternatives data={data} at={at} id={id} />
    </p>
  );
}

/** The most likely tokens at this position, if the run recorded them. The sampled one is marked. */
function Alternatives({ data, at, id }: { data: TokenData; at: number; id: number }) {
  const found = data.alternatives[at];
  if (!found) return null;
  return (
    <span class="alternatives">
      {" "}
      · most likely:
      {found.map(([token, logprob]) => (
        <span key={token} class={token === id ? "alternative sampled" : "alternative"} title={`id ${token}, logprob ${number(logprob, 5)}`}>
          <code>{visible(JSON.stringify(data.texts[token] ?? `⟨${token}⟩`))}</code> {percent(Math.exp(logprob))}
        </span>
      ))}
    </span>
  );
}

/** Class of a token by its log probability: 0 is almost certain, 6 is very unlikely. */
function level(logprob: number): number {
  const limits = [-0.105, -0.36, -0.92, -1.6, -2.3, -4.6];
  const found = limits.findIndex((limit) => logprob >= limit);
  return found < 0 ? 6 : found;
}

/** Class of a token by its importance ratio: 3 is near 1, 0 is below 0.5, and 6 is above 2. */
function ratioLevel(ratio: number): number {
  const limits = [0.5, 0.8, 0.95, 1.05, 1.25, 2];
  const found = limits.findIndex((limit) => ratio < limit);
  return found < 0 ? 6 : found;
}

function classes(data: TokenData, color: string): string[] {
  if (color === "mask") return data.mask.map((one) => (one ? "trains" : "context"));
  if (color === "version") {
    const order = [...new Set(data.versions.map((one) => one[2]))];
    const found = Array<string>(data.tokens.length).fill("context");
    for (const [low, high, version] of data.versions)
      found.fill(`v-${order.indexOf(version) % 6}`, low - data.start, high - data.start);
    return found;
  }
  if (color === RATIO) return (data.extras[color.slice(6)] ?? []).map((one) => (one === null ? "context" : `ra-${ratioLevel(one)}`));
  if (color.startsWith("extra:")) {
    const values = data.extras[color.slice(6)] ?? [];
    const known = values.filter((one): one is number => one !== null);
    const [low, high] = [Math.min(...known.slice(0, PAGE)), Math.max(...known.slice(0, PAGE))];
    return values.map((one) => (one === null ? "context" : `lp-${Math.round((6 * (one - low)) / (high - low || 1))}`));
  }
  return data.mask.map((one, at) => {
    const logprob = data.logprobs[at] ?? null;
    return !one ? "context" : logprob === null ? "unknown" : `lp-${level(logprob)}`;
  });
}

interface StripProps {
  data: TokenData;
  color: string;
  at: number | null;
  onMove: (at: number) => void;
}

function Strip({ data, color, at, onMove }: StripProps) {
  const kinds = useMemo(() => classes(data, color), [data, color]);
  const chunks = Math.ceil(data.tokens.length / CHUNK);
  const onPoint = (event: Event) => {
    const position = (event.target as HTMLElement).dataset.at;
    if (position !== undefined) onMove(Number(position));
  };
  const onKey = (event: KeyboardEvent) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step) return;
    onMove(Math.max(0, Math.min(data.tokens.length - 1, (at ?? -1) + step)));
    event.preventDefault();
  };
  return (
    <div class="strip" tabIndex={0} role="group" aria-label="Tokens" onMouseOver={onPoint} onClick={onPoint} onKeyDown={onKey}>
      {Array.from({ length: chunks }, (_, chunk) => (
        <Chunk key={chunk} data={data} kinds={kinds} first={chunk * CHUNK} at={at !== null && Math.floor(at / CHUNK) === chunk ? at : null} />
      ))}
    </div>
  );
}

function Chunk({ data, kinds, first, at }: { data: TokenData; kinds: string[]; first: number; at: number | null }) {
  // Only the chunk of the chosen token is made again while the pointer moves.
  const spans = useMemo(
    () =>
      data.tokens.slice(first, first + CHUNK).map((id, offset) => {
        const [position, text] = [first + offset, data.texts[id]];
        return (
          <span key={offset} class={`token ${kinds[position]}${position === at ? " chosen" : ""}`} data-at={position}>
            {text === null || text === undefined ? `⟨${id}⟩` : show(text)}
          </span>
        );
      }),
    [data, kinds, first, at],
  );
  return <div class="chunk">{spans}</div>;
}

function show(text: string) {
  if (text === "\n") return "↵\n";
  return visible(text.replaceAll("\n", "↵\n").replaceAll("\t", "→\t"));
}
