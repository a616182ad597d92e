// The viewer's page: its frame, its keyboard shortcuts, and the choice of a view by the URL.

import { render } from "preact";
import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import { exportedRun, isExport } from "./api";
import { Compare } from "./compare";
import { Group } from "./group";
import { Rollout } from "./rollout";
import { link, useRoute } from "./route";
import { Run } from "./run";
import { Runs } from "./runs";
import { Rollouts } from "./table";
import { visible } from "./text";
import { Tokens } from "./tokens";
import "./style.css";

const SHORTCUTS: [string, string][] = [
  ["/", "search or filter"],
  ["j, k or ↓, ↑", "next and previous row of the table; next and previous rollout of the group"],
  ["Enter", "open the chosen row"],
  ["t", "tokens of the rollout"],
  ["g", "group of the rollout"],
  ["u", "one level up"],
  ["d", "dark or light"],
  ["?", "show or hide this list"],
];

function View() {
  const { path, query } = useRoute();
  const [page, run, kind, id, more] = path;
  if (page === "compare") return <Compare a={query.get("a") ?? ""} b={query.get("b") ?? ""} />;
  if (page === "run" && run !== undefined) {
    if (kind === "rollouts") return <Rollouts run={run} />;
    if (kind === "group") return <Group run={run} group={Number(id)} />;
    if (kind === "rollout" && id !== undefined)
      return more === "tokens" ? <Tokens run={run} id={id} /> : <Rollout run={run} id={id} />;
    return <Run run={run} />;
  }
  return isExport ? <Run run={exportedRun} /> : <Runs />;
}

function up(path: string[]): string {
  const [page, run, kind, id, more] = path;
  if (page !== "run" || run === undefined || !kind) return link([]);
  if (more) return link(["run", run, "rollout", id ?? ""]);
  return kind === "rollouts" ? link(["run", run]) : link(["run", run, "rollouts"]);
}

function setTheme(): void {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

function App() {
  const { path } = useRoute();
  const [help, setHelp] = useState(false);
  useLayoutEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.key === "Escape") {
        target.blur();
        setHelp(false);
      }
      if (/^(?:INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "/") {
        document.querySelector<HTMLElement>("[data-search]")?.focus();
        event.preventDefault();
      } else if (event.key === "?") setHelp((now) => !now);
      else if (event.key === "u") location.hash = up(path);
      else if (event.key === "d") setTheme();
    };
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, [path]);
  useEffect(() => {
    document.title = path.length ? `${path.slice(1).join(" ")} – Rookery` : "Rookery";
    window.scrollTo(0, 0);
  }, [path.join("/")]);
  const [page, run, kind, id] = path;
  return (
    <>
      <header>
        <a class="brand" href={link([])}>
          Rookery
        </a>
        {page === "run" && run !== undefined && (
          <nav aria-label="Location">
            <a href={link(["run", run])}>{visible(run)}</a>
            {kind && (
              <>
                {" "}
                / <a href={link(["run", run, "rollouts"])}>rollouts</a>
              </>
            )}
            {id !== undefined && (
              <>
                {" "}
                / {kind} {visible(id)}
              </>
            )}
          </nav>
        )}
        <span class="spacer" />
        {isExport && <span class="quiet">exported file</span>}
        <button onClick={setTheme} aria-label="Dark or light" title="Dark or light (d)">
          ◐
        </button>
        <button onClick={() => setHelp(!help)} aria-expanded={help} title="Keyboard shortcuts (?)">
          ?
        </button>
      </header>
      {help && (
        <section class="help" aria-label="Keyboard shortcuts">
          <table class="pairs">
            <tbody>
              {SHORTCUTS.map(([keys, about]) => (
                <tr key={keys}>
                  <th scope="row">
                    <kbd>{keys}</kbd>
                  </th>
                  <td>{about}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </section>
      )}
      <div data-route={location.hash}>
        <View key={path.join("/")} />
      </div>
    </>
  );
}

render(<App />, document.getElementById("app") as HTMLElement);
