// Access to the API of `rookery view`, or to the answers that an exported file contains.

import { useEffect, useRef, useState } from "preact/hooks";

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
