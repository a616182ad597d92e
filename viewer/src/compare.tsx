// Comparison of two runs, paired by task.

import { useState } from "preact/hooks";
import { useData } from "./api";
import { count, estimate } from "./format";
import { Badge, Panel, Problem, Tile } from "./parts";
import { link } from "./route";
import { visible } from "./text";
import type { Comparison, RunEntry } from "./types";
import { go } from "./route";

const SHOWN = 500;

export function Compare({ a, b }: { a: string; b: string }) {
  const runs = useData<{ runs: RunEntry[] }>("runs", {});
  return (
    <main>
      <h1>Compare</h1>
      <div class="filter-row">
        {(["a", "b"] as const).map((side) => (
          <label key={side}>
            {side.toUpperCase()}{" "}
            <select
              value={side === "a" ? a : b}
              onChange={(event) => {
                const value = event.currentTarget.value;
                go(link(["compare"], side === "a" ? { a: value, b } : { a, b: value }));
              }}
            >
              <option value="">–</option>
              {runs.data?.runs.map((run) => (
                <option key={run.id}>{run.id}</option>
              ))}
            </select>
          </label>
        ))}
        <a href={link(["compare"], { a: b, b: a })}>Swap</a>
      </div>
      {a && b ? <Result a={a} b={b} /> : <p class="quiet">Choose two runs.</p>}
    </main>
  );
}

function Result({ a, b }: { a: string; b: string }) {
  const { data, error } = useData<Comparison>("compare", { a, b });
  const [change, setChange] = useState("");
  if (!data) return <Problem error={error} />;
  const show = (value: number | null) => estimate(value, data.binary);
  const signed = (value: number) =>
    `${value > 0 ? "+" : ""}${data.binary ? `${(100 * value).toFixed(1)} points` : estimate(value, false)}`;
  const pairs = data.pairs
    .filter((pair) => (change ? pair.change === change : pair.change !== "same"))
    .sort((x, y) => Math.abs(y.difference) - Math.abs(x.difference));
  const interval = data.interval95;
  return (
    <>
      <div class="tiles">
        <Tile name="Tasks in both" value={count(data.tasks)} about={`${count(data.only_a)} only in A, ${count(data.only_b)} only in B`} />
        <Tile name="A" value={show(data.a_mean)} about="mean over tasks" />
        <Tile name="B" value={show(data.b_mean)} about="mean over tasks" />
        <Tile
          name="B − A"
          value={data.difference === null ? "–" : signed(data.difference)}
          about={interval ? `95% ${signed(interval[0])} to ${signed(interval[1])}, by task` : "too few tasks for an interval"}
        />
        {interval && data.difference !== null && <IntervalPlot low={interval[0]} mid={data.difference} high={interval[1]} />}
      </div>
      {data.changed_tasks.length > 0 && (
        <p class="problem">The content of {count(data.changed_tasks.length)} tasks differs between the runs.</p>
      )}
      <div class="columns">
        <Panel title="Tasks that changed">
          <div class="filter-row">
            {["", "gained", "lost", "improved", "worsened", "same"].map((name) => (
              <button key={name} aria-pressed={change === name} onClick={() => setChange(name)}>
                {name || "changed"}{" "}
                {count(name ? (data.counts[name] ?? 0) : data.tasks - (data.counts.same ?? 0))}
              </button>
            ))}
          </div>
          <table class="list">
            <thead>
              <tr>
                <th>Task</th>
                <th class="r">A</th>
                <th class="r">B</th>
                <th>Change</th>
              </tr>
            </thead>
            <tbody>
              {pairs.slice(0, SHOWN).map((pair) => (
                <tr key={pair.task}>
                  <td>{visible(pair.task)}</td>
                  <td class="r">
                    <a href={link(["run", a, "rollouts"], { task: pair.task })}>{show(pair.a)}</a>{" "}
                    <span class="quiet">of {pair.a_valid}</span>
                  </td>
                  <td class="r">
                    <a href={link(["run", b, "rollouts"], { task: pair.task })}>{show(pair.b)}</a>{" "}
                    <span class="quiet">of {pair.b_valid}</span>
                  </td>
                  <td>
                    <Badge
                      label={pair.change}
                      failed={pair.change === "lost" || pair.change === "worsened"}
                    />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
          {pairs.length > SHOWN && <p class="quiet">and {count(pairs.length - SHOWN)} more</p>}
        </Panel>
        <Panel title="Settings that differ">
          <table class="list">
            <thead>
              <tr>
                <th>Setting</th>
                <th>A</th>
                <th>B</th>
              </tr>
            </thead>
            <tbody>
              {Object.entries(data.settings).map(([name, [one, two]]) => (
                <tr key={name}>
                  <td>{visible(name)}</td>
                  <td>{visible(one ?? "–")}</td>
                  <td>{visible(two ?? "–")}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Panel>
      </div>
    </>
  );
}

function IntervalPlot({ low, mid, high }: { low: number; mid: number; high: number }) {
  const reach = Math.max(Math.abs(low), Math.abs(high)) * 1.15 || 1;
  const x = (value: number) => 120 + (110 * value) / reach;
  const verdict = low > 0 ? "B is better" : high < 0 ? "A is better" : "the interval contains 0";
  return (
    <svg class="interval" width={240} height={70} role="img" aria-label={verdict}>
      <line class="grid" x1={120} x2={120} y1={20} y2={50} />
      <line class="line" x1={x(low)} x2={x(high)} y1={35} y2={35} />
      <circle cx={x(mid)} cy={35} r={5} />
      <text class="tick" x={120} y={64} text-anchor="middle">
        0
      </text>
      <text class="tick" x={10} y={64}>
        ← A better
      </text>
      <text class="tick" x={230} y={64} text-anchor="end">
        B better →
      </text>
      <text class="tick" x={120} y={12} text-anchor="middle">
        {verdict}
      </text>
    </svg>
  );
}
