// Access to the API of `rookery view`, or to the answers that an exported file contains.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Columns } from "./types";

type Query = Record<string, string | number>;

interface Embedded {
  run: string;
  answers: Record<string, unknown>;
}

const key = new URLSearchParams(location.search).get("key") ?? "";
const element = document.getElementById("data");
const embedded: Embedded | null = element ? (JSON.parse(element.textContent ?? "null") as Embedded) : null;

export const isExport = embedded !== null;
export const exportedRun = embedded?.run ?? "";

function address(path: string, query: Query): string {
  const text = new URLSearchParams(Object.entries(query).map(([name, value]) => [name, String(value)])).toString();
  return `/api/${path}${text ? `?${text}` : ""}`;
}

export async function api<T>(path: string, query: Query = {}): Promise<T> {
  const url = address(path, query);
  if (embedded) {
    if (url in embedded.answers) return embedded.answers[url] as T;
    throw new Error("This is not part of the exported file.");
  }
  const response = await fetch(url, { headers: { Authorization: `Bearer ${key}` } });
  const body = (await response.json()) as T & { error?: string };
  if (!response.ok) throw new Error(body.error ?? `The server answered ${response.status}.`);
  return body;
}

/** Load the columns of the table of rollouts; see `RunIndex.encode_columns`. */
export async function loadColumns(query: Query): Promise<Columns> {
  const url = address("rollouts", query);
  if (embedded) {
    const text = atob(String(embedded.answers[url] ?? ""));
    return decodeColumns(Uint8Array.from(text, (char) => char.charCodeAt(0)).buffer);
  }
  const response = await fetch(url, { headers: { Authorization: `Bearer ${key}` } });
  if (!response.ok) throw new Error(((await response.json()) as { error?: string }).error ?? `The server answered ${response.status}.`);
  return decodeColumns(await response.arrayBuffer());
}

function decodeColumns(data: ArrayBuffer): Columns {
  const length = new DataView(data).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length))) as Omit<Columns, "numbers" | "metrics"> & {
    numbers: string[];
    metrics: string[];
  };
  const rows = header.count - header.start;
  let at = 4 + length;
  const next = () => {
    const found = rows ? new Float64Array(data, at, rows) : new Float64Array(0);
    at += 8 * rows;
    return found;
  };
  const read = (names: string[]) => Object.fromEntries(names.map((name) => [name, next()]));
  return { ...header, task: next(), label: next(), numbers: read(header.numbers), metrics: read(header.metrics) };
}

export interface Loaded<T> {
  data: T | null;
  error: string;
}

/** Load data, and load it again when `version` changes. Earlier data stays visible meanwhile. */
export function useData<T>(path: string, query: Query, version = 0): Loaded<T> {
  const url = address(path, query);
  const [state, setState] = useState<Loaded<T> & { url: string }>({ data: null, error: "", url });
  useEffect(() => {
    let current = true;
    api<T>(path, query).then(
      (data) => current && setState({ data, error: "", url }),
      (error: Error) => current && setState({ data: null, error: error.message, url }),
    );
    return () => {
      current = false;
    };
  }, [url, version]);
  return state.url === url ? state : { data: null, error: "" };
}

const PAUSE = 1000;

/** Return a number that increases every `milliseconds`. */
export function useClock(milliseconds: number): number {
  const [tick, setTick] = useState(0);
  useEffect(() => {
    const timer = window.setInterval(() => setTick((now) => now + 1), milliseconds);
    return () => window.clearInterval(timer);
  }, [milliseconds]);
  return tick;
}

/** Return a number that increases when the run, or without `run` the list of runs, changes. */
export function useChanges(run: string | null): number {
  const [version, setVersion] = useState(0);
  const due = useRef(0);
  useEffect(() => {
    if (embedded || run === null) return;
    const stop = new AbortController();
    let first = true;
    const announce = () => {
      // The first event says that the stream is open, when the page has just loaded its data.
      if (first) first = false;
      else if (!due.current)
        due.current = window.setTimeout(() => {
          due.current = 0;
          setVersion((now) => now + 1);
        }, PAUSE);
    };
    void follow(address("events", run ? { run } : {}), stop.signal, announce);
    return () => {
      stop.abort();
      window.clearTimeout(due.current);
      due.current = 0;
    };
  }, [run]);
  return version;
}

async function follow(url: string, signal: AbortSignal, announce: () => void): Promise<void> {
  while (!signal.aborted) {
    try {
      const response = await fetch(url, { headers: { Authorization: `Bearer ${key}` }, signal });
      if (!response.ok || !response.body) return;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read())
        if (part.value.includes("event: change")) announce();
    } catch {
      // The server stopped or the page was left: try again until the page is left.
    }
    await new Promise((resolve) => setTimeout(resolve, 2 * PAUSE));
  }
}
