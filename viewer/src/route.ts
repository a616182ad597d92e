// The page and its settings are in the fragment of the URL, so that every view can be bookmarked and shared.

import { useEffect, useState } from "preact/hooks";

export interface Route {
  path: string[];
  query: URLSearchParams;
}

function read(): Route {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

export function link(path: (string | number)[], query: Record<string, string | number | undefined> = {}): string {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const text = given.length ? new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString() : "";
  return `#/${path.map((part) => encodeURIComponent(part)).join("/")}${text ? `?${text}` : ""}`;
}

export function go(url: string): void {
  location.hash = url;
}

/** Change settings of the current page in the URL, without an entry in the browser's history. */
export function setQuery(changes: Record<string, string | number | undefined>): void {
  const { path, query } = read();
  const merged = { ...Object.fromEntries(query), ...changes };
  history.replaceState(null, "", link(path, merged));
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute(): Route {
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const update = () => setRoute(read());
    window.addEventListener("hashchange", update);
    return () => window.removeEventListener("hashchange", update);
  }, []);
  return route;
}
