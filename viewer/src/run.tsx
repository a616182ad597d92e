// The overview of one run: progress, estimates, curves, failures, and the learning curves of a training run.

import { useState } from "preact/hooks";
import { useChanges, useClock, useData } from "./api";
import { LineChart, type Curve } from "./chart";
import { count, estimate, number, percent, seconds, time } from "./format";
import { Badge, Events, NameValues, Panel, Problem, RunTabs, Tile } from "./parts";
import { link } from "./route";
import { visible } from "./text";
import type { EngineStatus, Series, Summary } from "./types";

export function Run({ run }: { run: string }) {
  const version = useChanges(run);
  const summary = useData<Summary>("summary", { run }, version);
  const series = useData<Series>("series", { run }, version);
  const data = summary.data;
  if (!data) return <Problem error={summary.error} />;
  return (
    <main>
      <div class="bar-row">
        <h1>
          {visible(data.name)} <Badge label={data.status} />
        </h1>
        <RunTabs run={run} page="overview" />
      </div>
      <p class="quiet">
        {visible(data.environment ?? "")} {data.model && "with "} {visible(data.model ?? "")} · started{" "}
        {time(data.created)}
      </p>
      <Tiles data={data} />
      {data.status === "running" && <Live run={run} />}
      {data.kind === "training" && <Learning rows={data.learning ?? []} />}
      {series.data && <Curves series={series.data} binary={data.reward?.pass_rate !== undefined} />}
      <Environments run={run} data={data} />
      <Failures run={run} data={data} />
      <div class="columns">
        <Panel title="Outcomes">
          <table class="pairs">
            <tbody>
              {Object.entries(data.outcomes ?? {}).map(([label, n]) => (
                <tr key={label}>
                  <th scope="row">
                    <a href={link(["run", run, "rollouts"], { label })}>{visible(label)}</a>
                  </th>
                  <td>{count(n)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Panel>
        {Object.keys(data.metrics ?? {}).length > 0 && (
          <Panel title="Mean metrics">
            <NameValues
              values={Object.fromEntries(
                Object.entries(data.metrics ?? {}).map(([name, one]) => [
                  name,
                  one.standard_error === null ? one.mean : `${number(one.mean)} ± ${number(one.standard_error, 2)}`,
                ]),
              )}
            />
          </Panel>
        )}
        <Panel title="Settings">
          <NameValues values={{ ...data.training, ...data.settings }} />
        </Panel>
      </div>
      <Panel title="Events" open={false}>
        <Events events={data.events ?? []} />
      </Panel>
    </main>
  );
}

function Tiles({ data }: { data: Summary }) {
  const reward = data.reward;
  const binary = reward?.pass_rate !== undefined;
  const planned = Math.max(data.planned ?? 0, data.rollouts);
  const steps = Math.max(0, ...(data.learning ?? []).map((row) => Number(row.step) || 0));
  return (
    <div class="tiles">
      <Tile
        name="Rollouts"
        value={count(data.rollouts)}
        about={
          data.kind === "training" ? (
            `of the newest start, ${count(steps)} steps in all`
          ) : (
            <>
              <progress value={data.rollouts} max={planned || 1} aria-label="Finished rollouts" /> of {count(planned)}
            </>
          )
        }
      />
      <Tile
        name={binary ? "Pass rate" : "Mean reward"}
        value={estimate(reward?.mean, binary)}
        about={
          reward?.interval95
            ? `95% ${estimate(reward.interval95[0], binary)} – ${estimate(reward.interval95[1], binary)}, by task`
            : "one task: no interval"
        }
      />
      {Object.entries(reward?.per_task ?? {}).map(([name, one]) => (
        <Tile
          key={name}
          name={name}
          value={name.startsWith("pass@") ? percent(one.mean) : estimate(one.mean, binary)}
          about={`± ${estimate(one.standard_error, binary)} over ${count(one.tasks)} tasks`}
        />
      ))}
      <Tile
        name="Failed"
        value={<span class={data.failed ? "bad-text" : ""}>{count(data.failed)}</span>}
        about={`${count(data.valid)} valid, ${data.ungraded ? `${count(data.ungraded)} ungraded, ` : ""}${count(
          data.cancelled,
        )} cancelled, ${count((data.attempts ?? 0) - data.rollouts)} retries`}
      />
      <Tile
        name="Throughput"
        value={data.rollouts_per_second ? `${number(data.rollouts_per_second, 3)}/s` : "–"}
        about={`${number(Math.round(data.tokens_per_second ?? 0))} tokens/s, busy ${seconds(data.seconds)}`}
      />
      <Tile
        name="Sampled tokens"
        value={count(data.sampled_tokens)}
        about={`${count(data.turns)} turns${data.drifted ? `, ${count(data.drifted)} drifted` : ""}`}
      />
      {typeof data.cost === "number" && (
        <Tile name="Cost" value={number(data.cost, 4)} about="of the last attempts, at the prices of the run" />
      )}
    </div>
  );
}

const LIVE_MILLISECONDS = 2000;

function Live({ run }: { run: string }) {
  const { data } = useData<EngineStatus | null>("live", { run }, useClock(LIVE_MILLISECONDS));
  if (!data) return <p class="quiet">The engine of this run cannot be reached from this machine.</p>;
  const streams = Object.entries(data.streams ?? {});
  const staleness = Math.max(0, ...streams.map(([, one]) => one.staleness ?? 0));
  const [sandboxes, prewarmed] = [data.sandboxes ?? {}, data.prewarmed ?? {}];
  const replicas = data.replicas ?? [];
  return (
    <Panel title="Now">
      <div class="tiles">
        <Tile
          name="Rollouts in flight"
          value={count(data.in_flight)}
          about={data.paused ? <Badge label="paused" /> : `${count(data.runners)} runners, ${count(data.runner_deaths)} died`}
        />
        <Tile name="Open sandboxes" value={count(total(sandboxes))} about={describe(sandboxes, prewarmed)} />
        <Tile
          name="Model calls"
          value={count(replicas.reduce((sum, one) => sum + one.calls, 0))}
          about={`${replicas.filter((one) => one.healthy).length} of ${replicas.length} replicas healthy`}
        />
        <Tile name="Staleness" value={count(staleness)} about={`versions; the policy has version ${count(data.policy_version)}`} />
        {typeof data.waiting_for_upstream === "number" && (
          <Tile name="Waiting for the upstream" value={seconds(data.waiting_for_upstream)} />
        )}
        {streams.map(([name, one]) => (
          <Tile
            key={name}
            name={`Stream ${name}`}
            value={count(one.admitted)}
            about={`groups started, ${count(one.taken)} taken, ${count(one.waiting)} ready`}
          />
        ))}
        {(data.images ?? []).map((one) => (
          <Tile key={one.image} name="Image" value={visible(one.step ?? "")} about={visible(one.image)} />
        ))}
      </div>
      {replicas.length > 0 && (
        <div class="scroll">
          <table class="list">
            <thead>
              <tr>
                <th>Replica</th>
                <th>Role</th>
                <th>State</th>
                <th class="r">Calls</th>
                <th class="r">Limit</th>
              </tr>
            </thead>
            <tbody>
              {replicas.map((one) => (
                <tr key={`${one.role} ${one.replica}`}>
                  <td>{visible(one.replica)}</td>
                  <td>{visible(one.role)}</td>
                  <td>
                    <Badge label={one.healthy ? "healthy" : "unhealthy"} failed={!one.healthy} />
                  </td>
                  <td class="r">{count(one.calls)}</td>
                  <td class="r">{one.limit ? count(one.limit) : "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}

function total(counts: Record<string, number>): number {
  return Object.values(counts).reduce((sum, one) => sum + one, 0);
}

function describe(sandboxes: Record<string, number>, prewarmed: Record<string, number>): string {
  const open = Object.entries(sandboxes).map(([name, one]) => `${count(one)} ${name}`);
  return [...open, ...(total(prewarmed) ? [`${count(total(prewarmed))} prewarmed`] : [])].join(", ") || "none";
}

function Curves({ series, binary }: { series: Series; binary: boolean }) {
  const at = (index: number) => series.seconds * (index + 1);
  const points = (values: (number | null)[]): [number, number][] =>
    values.flatMap((value, index) => (value === null ? [] : [[at(index), value] as [number, number]]));
  const sums = (values: number[]) => {
    let sum = 0;
    return points(values.map((value) => (sum += value)));
  };
  const show = (value: number) => estimate(value, binary);
  return (
    <div class="charts">
      <LineChart
        title={binary ? "Pass rate over time" : "Mean reward over time"}
        xLabel="seconds"
        format={show}
        curves={[
          { name: "so far", points: points(series.running) },
          { name: "by interval", points: points(series.reward), dots: true },
        ]}
      />
      <LineChart title="Ended rollouts" xLabel="seconds" zero curves={[{ name: "ended", points: sums(series.ended) }]} />
      <LineChart
        title="Failed rollouts by cause"
        xLabel="seconds"
        zero
        empty="none"
        curves={Object.entries(series.failed).map(([cause, values]) => ({ name: cause, points: sums(values) }))}
      />
      <LineChart
        title="Mean seconds per rollout"
        xLabel="seconds"
        zero
        format={(value) => number(value, 3)}
        curves={Object.entries(series.stages).map(([name, values]) => ({ name, points: points(values) }))}
      />
    </div>
  );
}

const LEARNING = ["reward", "entropy", "sampler_kl", "grad_norm", "staleness_mean", "tokens_per_second"];
const MORE = /^(?:step|eval_.*|failed)$/;

function Learning({ rows }: { rows: Record<string, unknown>[] }) {
  const [more, setMore] = useState("");
  const curve = (name: string): Curve => ({
    name,
    points: rows.flatMap((row) =>
      typeof row[name] === "number" ? [[Number(row.step), Number(row[name])] as [number, number]] : [],
    ),
  });
  const evals = rows.filter((row) => typeof row.eval_reward === "number");
  const held: Curve = {
    name: "held-out reward",
    points: evals.map((row) => [Number(row.step), Number(row.eval_reward)]),
    band: evals.map((row) => (row.eval_interval95 as [number, number] | null) ?? [Number(row.eval_reward), Number(row.eval_reward)]),
  };
  const names = [...new Set(rows.flatMap((row) => Object.keys(row).filter((name) => typeof row[name] === "number")))];
  const others = names.filter((name) => !LEARNING.includes(name) && !MORE.test(name)).sort();
  return (
    <section aria-label="Learning curves">
      <LineChart title="Held-out reward, 95% interval by task" xLabel="step" curves={[held]} format={(y) => number(y, 3)} height={200} />
      <div class="charts">
        {LEARNING.filter((name) => names.includes(name)).map((name) => (
          <LineChart key={name} title={name.replaceAll("_", " ")} xLabel="step" curves={[curve(name)]} format={(y) => number(y, 3)} />
        ))}
        {more && <LineChart title={more} xLabel="step" curves={[curve(more)]} format={(y) => number(y, 3)} />}
      </div>
      <label>
        Another metric{" "}
        <select value={more} onChange={(event) => setMore(event.currentTarget.value)}>
          <option value="">–</option>
          {others.map((name) => (
            <option key={name}>{name}</option>
          ))}
        </select>
      </label>
    </section>
  );
}

/** Statistics of each environment of a mixture. */
function Environments({ run, data }: { run: string; data: Summary }) {
  const found = Object.entries(data.environments ?? {});
  if (!found.length) return null;
  const priced = found.some(([, one]) => one.cost !== null);
  return (
    <Panel title="Environments">
      <div class="scroll">
        <table class="list">
          <thead>
            <tr>
              <th>Environment</th>
              <th class="r">Mean reward</th>
              <th class="r">Tasks</th>
              <th class="r">Rollouts</th>
              <th class="r">Valid</th>
              <th class="r">Ungraded</th>
              <th class="r">Failed</th>
              <th class="r">Sampled tokens</th>
              {priced && <th class="r">Cost</th>}
            </tr>
          </thead>
          <tbody>
            {found.map(([name, one]) => (
              <tr key={name}>
                <td>
                  <a href={link(["run", run, "rollouts"], { environment: name })}>{visible(name)}</a>
                </td>
                <td class="r">
                  {estimate(one.reward.mean, one.reward.pass_rate !== undefined)}
                  {typeof one.reward.standard_error === "number" && ` ± ${number(one.reward.standard_error, 2)}`}
                </td>
                <td class="r">{count(one.tasks)}</td>
                <td class="r">{count(one.rollouts)}</td>
                <td class="r">{count(one.valid)}</td>
                <td class="r">{count(one.ungraded)}</td>
                <td class="r">{count(one.failed)}</td>
                <td class="r">{count(one.sampled_tokens)}</td>
                {priced && <td class="r">{one.cost === null ? "–" : number(one.cost, 4)}</td>}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Failures({ run, data }: { run: string; data: Summary }) {
  if (!data.failures?.length) return null;
  return (
    <Panel title="Failures">
      <div class="scroll">
        <table class="list">
          <thead>
            <tr>
              <th>Cause</th>
              <th class="r">Count</th>
              <th>Fault</th>
              <th>First</th>
              <th>What it means</th>
            </tr>
          </thead>
          <tbody>
            {data.failures.map((failure) => (
              <tr key={failure.cause}>
                <td>
                  <a href={link(["run", run, "rollouts"], { label: failure.cause })}>{visible(failure.cause)}</a>
                </td>
                <td class="r">{count(failure.count)}</td>
                <td>{failure.fault}</td>
                <td>
                  <a href={link(["run", run, "rollout", failure.first])}>{failure.first}</a>
                </td>
                <td>
                  {visible(failure.detail.slice(0, 300))}
                  <div class="quiet">
                    {failure.meaning} {failure.advice}
                  </div>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}
