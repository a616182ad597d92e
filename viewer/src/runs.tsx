// The list of runs.

import { useEffect, useState } from "preact/hooks";
import { api, useChanges, useData } from "./api";
import { count, number, percent, time } from "./format";
import { Badge, isFailure, Problem } from "./parts";
import { go, link, setQuery, useRoute } from "./route";
import { visible } from "./text";
import type { RunEntry, Summary } from "./types";

const SUMMARIES = 30;

export function Runs() {
  const version = useChanges("");
  const { data, error } = useData<{ runs: RunEntry[] }>("runs", {}, version);
  const { query } = useRoute();
  const [chosen, setChosen] = useState<string[]>([]);
  const filter = query.get("filter") ?? "";
  const runs = (data?.runs ?? []).filter((run) =>
    `${run.id} ${run.environment} ${run.model} ${run.status}`.toLowerCase().includes(filter.toLowerCase()),
  );
  const summaries = useSummaries(runs, version);
  if (!data) return <Problem error={error} />;
  const differing = differingSettings(runs);
  const choose = (id: string) =>
    setChosen(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id].slice(-2));
  return (
    <main>
      <div class="bar-row">
        <h1>Runs</h1>
        <input
          type="search"
          data-search
          placeholder="Filter runs"
          aria-label="Filter runs"
          value={filter}
          onInput={(event) => setQuery({ filter: event.currentTarget.value })}
        />
        <button
          disabled={chosen.length !== 2}
          onClick={() => go(link(["compare"], { a: chosen[0], b: chosen[1] }))}
          title="Choose two runs with the check boxes"
        >
          Compare {chosen.length === 2 ? "two runs" : "(choose two)"}
        </button>
      </div>
      {!runs.length && <p class="quiet">no runs</p>}
      <div class="scroll">
        <table class="list">
          <thead>
            <tr>
              <th>
                <span class="sr">Choose</span>
              </th>
              <th>Run</th>
              <th>Status</th>
              <th class="r">Rollouts</th>
              <th class="r">Reward (95% interval)</th>
              <th class="r">Failed</th>
              <th class="r">Rollouts/s</th>
              <th>Started</th>
              <th>Settings that differ</th>
            </tr>
          </thead>
          <tbody>
            {runs.map((run) => (
              <RunRow
                key={run.id}
                run={run}
                summary={summaries[run.id]}
                differing={differing}
                chosen={chosen.includes(run.id)}
                onChoose={() => choose(run.id)}
              />
            ))}
          </tbody>
        </table>
      </div>
    </main>
  );
}

interface RowProps {
  run: RunEntry;
  summary: Summary | undefined;
  differing: string[];
  chosen: boolean;
  onChoose: () => void;
}

function RunRow({ run, summary, differing, chosen, onChoose }: RowProps) {
  const failed = Object.entries(run.labels ?? {})
    .filter(([label]) => isFailure(label))
    .sort((a, b) => b[1] - a[1]);
  const own = run.settings ?? {};
  return (
    <tr>
      <td>
        <input type="checkbox" checked={chosen} onChange={onChoose} aria-label={`Choose ${run.id} for a comparison`} />
      </td>
      <td>
        <a href={link(["run", run.id])}>{visible(run.id)}</a>
        <div class="quiet">
          {run.kind === "training" && "training · "}
          {visible(run.environment ?? "")} {run.model && "with "} {visible(run.model ?? run.detail ?? "")}
        </div>
      </td>
      <td>
        <Badge label={run.status} failed={run.status === "unreadable"} />
      </td>
      <td class="r">
        {count(run.rollouts)}
        {run.status === "running" && run.started ? <span class="quiet"> of {count(run.started)}</span> : null}
      </td>
      <td class="r">
        <Reward run={run} summary={summary} />
        {run.evals && run.evals.length > 0 && (
          <div class="quiet">
            held out {percent(run.evals[0])} → {percent(run.evals[run.evals.length - 1])}
          </div>
        )}
      </td>
      <td class="r">
        {failed.length > 0 && (
          <span class="bad-text" title={failed.map(([label, n]) => `${label} ${n}`).join("\n")}>
            {count(failed.reduce((sum, [, n]) => sum + n, 0))}
          </span>
        )}
        {failed[0] && <div class="quiet">{visible(failed[0][0])}</div>}
      </td>
      <td class="r">{summary?.rollouts_per_second ? number(summary.rollouts_per_second, 3) : ""}</td>
      <td>{time(run.created)}</td>
      <td class="settings">
        {differing
          .filter((name) => own[name] !== undefined)
          .map((name) => `${name}=${own[name]}`)
          .join("  ")}
      </td>
    </tr>
  );
}

function Reward({ run, summary }: { run: RunEntry; summary: Summary | undefined }) {
  const reward = summary?.reward;
  if (!reward || reward.mean === null) return <>{number(run.mean_reward, 3)}</>;
  const show = reward.pass_rate === undefined ? (value: number) => number(value, 3) : percent;
  return (
    <>
      <b>{show(reward.mean)}</b>
      {reward.interval95 && (
        <div class="quiet">
          {show(reward.interval95[0])} – {show(reward.interval95[1])}
        </div>
      )}
    </>
  );
}

/** Load the summaries of the first runs, one after the other: each reads a whole journal. */
function useSummaries(runs: RunEntry[], version: number): Record<string, Summary> {
  const [found, setFound] = useState<Record<string, Summary>>({});
  const ids = runs
    .filter((run) => run.status !== "unreadable" && run.rollouts)
    .slice(0, SUMMARIES)
    .map((run) => run.id);
  useEffect(() => {
    let current = true;
    void (async () => {
      for (const id of ids) {
        if (!current) return;
        try {
          const summary = await api<Summary>("summary", { run: id });
          setFound((before) => ({ ...before, [id]: summary }));
        } catch {
          // The row shows what the list of runs says.
        }
      }
    })();
    return () => {
      current = false;
    };
  }, [ids.join("\n"), version]);
  return found;
}

function differingSettings(runs: RunEntry[]): string[] {
  const names = new Set(runs.flatMap((run) => Object.keys(run.settings ?? {})));
  return [...names].filter((name) => runs.length > 1 && new Set(runs.map((run) => run.settings?.[name])).size > 1);
}
