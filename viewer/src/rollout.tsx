// One rollout: its transcript with branches, where the time went, attempts, grader output and events.

import { useLayoutEffect, useMemo, useState } from "preact/hooks";
import { useData } from "./api";
import { bytes, count, number, plural, seconds, time } from "./format";
import { MessageView, textOf } from "./message";
import { Events, NameValues, OutcomeBadge, Panel, Problem } from "./parts";
import { go, link, setQuery, useRoute } from "./route";
import { Data, LongText, visible } from "./text";
import type { Message, Outcome, Rollout as RolloutData, Turn } from "./types";

export function Rollout({ run, id }: { run: string; id: string }) {
  const { data, error } = useData<RolloutData>("rollout", { run, id });
  useLayoutEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (!data || event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || event.altKey) return;
      const at = data.members.findIndex((one) => one.id === id);
      const next = event.key === "j" ? data.members[at + 1] : event.key === "k" ? data.members[at - 1] : undefined;
      if (next) go(link(["run", run, "rollout", next.id]));
      if (event.key === "t") go(link(["run", run, "rollout", id, "tokens"]));
      if (event.key === "g") go(link(["run", run, "group", data.group]));
    };
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, [run, id, data]);
  if (!data) return <Problem error={error} />;
  return (
    <main>
      <RolloutHead run={run} data={data} page="transcript" />
      {data.damage && <Problem error={data.damage} />}
      {data.outcome.kind === "failed" && <FailurePanel outcome={data.outcome} cause={data.cause} />}
      <div class="split">
        <Transcript turns={data.turns} />
        <aside>
          <Panel title="Time">
            <Waterfall data={data} />
          </Panel>
          <Panel title="Scores">
            <NameValues values={{ reward: data.reward, ...prefix("", data.rewards), ...prefix("metric ", data.metrics) }} />
          </Panel>
          {Object.keys(data.info).length > 0 && (
            <Panel title="Grader output and info">
              <Data value={data.info} />
            </Panel>
          )}
          <Attempts data={data} />
          <Sandboxes data={data} />
          <Panel title="Usage" open={false}>
            <NameValues values={flat({ ...data.usage, seed: data.seed })} />
          </Panel>
          {data.task_content && (
            <Panel title="Task" open={false}>
              <Data value={{ ...data.task_content, prompt: undefined }} />
            </Panel>
          )}
          {data.events.length > 0 && (
            <Panel title={`Events (${count(data.events.length)})`} open={false}>
              <Events events={data.events} />
            </Panel>
          )}
        </aside>
      </div>
    </main>
  );
}

function prefix(text: string, values: Record<string, number | null>): Record<string, number | null> {
  return Object.fromEntries(Object.entries(values).map(([name, value]) => [`${text}${name}`, value]));
}

function flat(values: Record<string, unknown>): Record<string, string | number> {
  return Object.fromEntries(
    Object.entries(values)
      .filter(([, value]) => value && (typeof value !== "object" || Object.keys(value).length))
      .map(([name, value]) => [name.replaceAll("_", " "), typeof value === "number" ? value : typeof value === "string" ? value : JSON.stringify(value)]),
  );
}

export function RolloutHead({ run, data, page }: { run: string; data: RolloutData; page: string }) {
  const at = data.members.findIndex((one) => one.id === data.id);
  const [before, after] = [data.members[at - 1], data.members[at + 1]];
  const tabs = [
    ["transcript", "Transcript", link(["run", run, "rollout", data.id])],
    ["tokens", "Tokens", link(["run", run, "rollout", data.id, "tokens"])],
    ["group", "Group", link(["run", run, "group", data.group])],
  ] as const;
  return (
    <>
      <div class="bar-row">
        <h1>
          Rollout {data.id} <OutcomeBadge label={data.label} />{" "}
          <span class="reward">{data.reward !== null ? `reward ${number(data.reward)}` : data.ungraded ? "ungraded" : "no reward"}</span>
        </h1>
        <nav class="tabs" aria-label="Rollout">
          {tabs.map(([name, title, url]) => (
            <a key={name} href={url} aria-current={name === page ? "page" : undefined}>
              {title}
            </a>
          ))}
          {before && <a href={link(["run", run, "rollout", before.id])}>← {before.id}</a>}
          {after && <a href={link(["run", run, "rollout", after.id])}>{after.id} →</a>}
        </nav>
      </div>
      <p class="quiet">
        {data.environment && (
          <>
            environment{" "}
            <a href={link(["run", run, "rollouts"], { environment: data.environment })}>{visible(data.environment)}</a> ·{" "}
          </>
        )}
        task <a href={link(["run", run, "rollouts"], { task: data.task })}>{visible(data.task)}</a> ·{" "}
        {plural(Number(data.usage.turns), "turn")} · {plural(Number(data.usage.sampled_tokens), "sampled token")} ·{" "}
        {plural(Number(data.usage.tool_calls), "tool call")} · {plural(data.attempts.length, "attempt")}
        {data.cost !== null && ` · cost ${number(data.cost)}`}
      </p>
    </>
  );
}

function FailurePanel({ outcome, cause }: { outcome: Outcome; cause: RolloutData["cause"] }) {
  return (
    <section class="failure" aria-label="Failure">
      <p>
        <b>{visible(outcome.cause ?? "")}</b> in {outcome.stage} ({outcome.fault}): {visible(outcome.detail ?? "")}
      </p>
      {cause && (
        <p class="quiet">
          {cause.meaning} {cause.advice}
        </p>
      )}
      {outcome.traceback && <LongText text={outcome.traceback} />}
    </section>
  );
}

// ---- the transcript

interface Branch {
  turns: Turn[];
  children: Branch[];
}

/** Turns as a tree of branches: a branch ends where two turns continue the same turn. */
export function buildTree(turns: Turn[]): Branch[] {
  const byParent = new Map<number | null, Turn[]>();
  const known = new Set(turns.map((turn) => turn.index));
  for (const turn of turns) {
    const parent = turn.parent !== null && known.has(turn.parent) ? turn.parent : null;
    byParent.set(parent, [...(byParent.get(parent) ?? []), turn]);
  }
  const grow = (first: Turn): Branch => {
    const chain = [first];
    let next = byParent.get(first.index) ?? [];
    while (next.length === 1) {
      chain.push(next[0] as Turn);
      next = byParent.get((next[0] as Turn).index) ?? [];
    }
    return { turns: chain, children: next.map(grow) };
  };
  return (byParent.get(null) ?? []).map(grow);
}

function pathTo(turns: Turn[], leaf: number): Turn[] {
  const byIndex = new Map(turns.map((turn) => [turn.index, turn]));
  const path: Turn[] = [];
  for (let turn = byIndex.get(leaf); turn; turn = turn.parent === null ? undefined : byIndex.get(turn.parent))
    path.push(turn);
  return path.reverse();
}

function lastTurn(branch: Branch): Turn {
  const child = branch.children[branch.children.length - 1];
  return child ? lastTurn(child) : (branch.turns[branch.turns.length - 1] as Turn);
}

const ROLES = ["system", "user", "assistant", "tool"];

function Transcript({ turns }: { turns: Turn[] }) {
  const { query } = useRoute();
  const [open, setOpen] = useState(true);
  const [round, setRound] = useState(0);
  const tree = useMemo(() => buildTree(turns), [turns]);
  const policy = turns.filter((turn) => turn.role === "policy");
  const leaf = Number(query.get("turn") ?? (policy[policy.length - 1] ?? turns[turns.length - 1])?.index ?? 0);
  const path = useMemo(() => pathTo(turns, leaf), [turns, leaf]);
  const hidden = new Set((query.get("hide") ?? "").split(",").filter(Boolean));
  const find = (query.get("find") ?? "").toLowerCase();
  const toggle = (name: string) => {
    const next = new Set(hidden);
    if (!next.delete(name)) next.add(name);
    setQuery({ hide: [...next].join(",") });
  };
  const matches = (message: Message) =>
    !hidden.has(message.role === "developer" ? "system" : message.role) &&
    (!find || searchText(message).toLowerCase().includes(find));
  const setAll = (value: boolean) => {
    setOpen(value);
    setRound(round + 1);
  };
  return (
    <section class="transcript" aria-label="Transcript">
      <div class="filter-row">
        {ROLES.map((role) => (
          <label key={role}>
            <input type="checkbox" checked={!hidden.has(role)} onChange={() => toggle(role)} /> {role}
          </label>
        ))}
        <label>
          <input type="checkbox" checked={query.get("reasoning") === "1"} onChange={(event) => setQuery({ reasoning: event.currentTarget.checked ? 1 : "" })} />{" "}
          reasoning open
        </label>
        <input
          type="search"
          data-search
          placeholder="Find in this transcript"
          aria-label="Find in this transcript"
          value={query.get("find") ?? ""}
          onInput={(event) => setQuery({ find: event.currentTarget.value })}
        />
        <button onClick={() => setAll(true)}>Expand all</button>
        <button onClick={() => setAll(false)}>Collapse all</button>
      </div>
      {(tree.length > 1 || (tree[0]?.children.length ?? 0) > 0) && (
        <details class="branches" open>
          <summary>Conversations and branches</summary>
          <Branches branches={tree} path={new Set(path.map((turn) => turn.index))} root />
        </details>
      )}
      {!turns.length && <p class="quiet">No model calls were recorded.</p>}
      {path.map((turn) => {
        const shown = [...turn.messages, turn.response].filter(matches);
        return (
          <section key={`${turn.index}-${round}`} class="turn" id={`turn-${turn.index}`} aria-label={`Turn ${turn.index}`}>
            {(shown.length > 0 || !find) && <TurnHead turn={turn} />}
            {shown.map((message, at) => (
              <MessageView key={at} message={message} open={open || find !== ""} reasoning={query.get("reasoning") === "1"} />
            ))}
          </section>
        );
      })}
    </section>
  );
}

function searchText(message: Message): string {
  const calls = message.tool_calls?.map((call) => `${call.name} ${call.arguments ?? ""}`).join(" ") ?? "";
  return `${textOf(message)} ${message.reasoning ?? ""} ${calls}`;
}

function TurnHead({ turn }: { turn: Turn }) {
  return (
    <p class="turn-head">
      <b>turn {turn.index}</b>
      {turn.role !== "policy" && <span class="badge live">{visible(turn.role)}</span>} {count(turn.prompt_tokens)} →{" "}
      {count(turn.sampled_tokens)} tokens · {seconds(turn.seconds)}
      {turn.queued >= 0.05 && ` (${seconds(turn.queued)} queued)`} · {turn.finish} · version {turn.version}
      {turn.versions > 1 && ` to ${turn.versions} versions`}
      {turn.mean_logprob !== null && ` · mean logprob ${number(turn.mean_logprob, 3)}`}
      {turn.drifted && <span class="badge warn" title="The prompt changed tokens of the turn that it continues.">drifted</span>}
      {turn.partial && <span class="badge warn">partial</span>}
      {!turn.token_ids && <span class="badge warn">no token IDs</span>}
    </p>
  );
}

function Branches({ branches, path, root = false }: { branches: Branch[]; path: Set<number>; root?: boolean }) {
  return (
    <ul class="tree">
      {branches.map((branch, at) => {
        const [first, last] = [branch.turns[0] as Turn, branch.turns[branch.turns.length - 1] as Turn];
        const current = path.has(first.index);
        const range = first === last ? `turn ${first.index}` : `turns ${first.index}–${last.index}`;
        return (
          <li key={first.index}>
            <button class={current ? "current" : ""} aria-pressed={current} onClick={() => setQuery({ turn: lastTurn(branch).index })}>
              {visible(first.role)} · {range}
              {root && at > 0 && first.role === "policy" && (
                <span class="badge live" title="This turn does not continue an earlier one: the history was compacted, or a sub-agent started.">
                  new history
                </span>
              )}
              <span class="quiet"> {visible(textOf(first.messages[first.messages.length - 1] ?? first.response).slice(0, 80))}</span>
            </button>
            {branch.children.length > 0 && <Branches branches={branch.children} path={path} />}
          </li>
        );
      })}
    </ul>
  );
}

// ---- time and attempts

const STAGES = ["queue", "setup", "run", "score", "teardown"] as const;

interface Bar {
  row: string;
  kind: string;
  start: number;
  end: number;
  about: string;
}

function bars(data: RolloutData): Bar[] {
  const found: Bar[] = data.attempts.map((one) => ({
    row: `attempt ${one.number}`,
    kind: one.outcome.kind === "failed" ? "failed" : "attempt",
    start: one.started,
    end: one.ended,
    about: `${one.label}, ${seconds(one.ended - one.started)}`,
  }));
  const last = data.attempts[data.attempts.length - 1];
  if (!last) return found;
  let at = last.started - data.timing.queue;
  for (const stage of STAGES) {
    const end = at + data.timing[stage];
    const row = stage === "score" ? "grading" : stage;
    if (data.timing[stage] > 0) found.push({ row, kind: stage, start: at, end, about: seconds(data.timing[stage]) });
    at = end;
  }
  found.push(...toolBars(data.turns));
  for (const turn of data.turns) {
    if (!turn.started) continue;
    const row = turn.role === "policy" ? "model" : turn.role;
    const about = `turn ${turn.index}: ${seconds(turn.seconds)}, ${turn.sampled_tokens} tokens`;
    if (turn.queued > 0) found.push({ row, kind: "queue", start: turn.started, end: turn.started + turn.queued, about: `turn ${turn.index} queued` });
    found.push({ row, kind: "model", start: turn.started + turn.queued, end: turn.started + turn.seconds, about });
  }
  return found.filter((bar) => bar.end >= bar.start && bar.start > 0);
}

/** Time between a turn that calls tools and the turn that continues it: the tools, and the environment around them. */
function toolBars(turns: Turn[]): Bar[] {
  const byIndex = new Map(turns.map((turn) => [turn.index, turn]));
  return turns.flatMap((turn) => {
    const before = turn.parent === null ? undefined : byIndex.get(turn.parent);
    if (!before?.started || !turn.started || !before.response.tool_calls?.length) return [];
    const names = before.response.tool_calls.map((call) => call.name).join(", ");
    const [start, end] = [before.started + before.seconds, turn.started];
    return [{ row: "tools", kind: "tools", start, end, about: `${names.slice(0, 200)}: ${seconds(end - start)}` }];
  });
}

function Waterfall({ data }: { data: RolloutData }) {
  const found = useMemo(() => bars(data), [data]);
  const rows = [...new Set(found.map((bar) => bar.row))];
  const start = Math.min(...found.map((bar) => bar.start));
  const total = Math.max(...found.map((bar) => bar.end)) - start || 1;
  const shares = { ...data.timing } as unknown as Record<string, number>;
  return (
    <>
      {rows.map((row) => (
        <div class="lane" key={row}>
          <span class="lane-name">{visible(row)}</span>
          <span class="lane-bars">
            {found
              .filter((bar) => bar.row === row)
              .map((bar, at) => (
                <span
                  key={at}
                  class={`span span-${bar.kind}`}
                  title={bar.about}
                  style={{
                    left: `${(100 * (bar.start - start)) / total}%`,
                    width: `${Math.max(0.4, (100 * (bar.end - bar.start)) / total)}%`,
                  }}
                />
              ))}
          </span>
        </div>
      ))}
      <p class="quiet">
        {Object.entries(shares)
          .filter(([, value]) => value >= 0.0005)
          .map(([name, value]) => `${name} ${seconds(value)}`)
          .join(" · ")}
        . Model, sandbox and tools are parts of the stages. Tools is the time between a turn that calls tools and the next one.
      </p>
    </>
  );
}

function Sandboxes({ data }: { data: RolloutData }) {
  const used = data.attempts.flatMap((attempt) => (attempt.sandboxes ?? []).map((one) => ({ attempt: attempt.number, ...one })));
  if (!used.length) return null;
  return (
    <Panel title={`Sandboxes (${used.length})`}>
      <ol class="attempts">
        {used.map((one) => (
          <li key={one.id}>
            attempt {one.attempt} · {visible(one.provider ?? "")} <code class="quiet">{visible(one.id)}</code>
            <NameValues
              values={{
                "CPU time": seconds(one.cpu ?? 0),
                "peak memory": one.peak_memory ? bytes(one.peak_memory) : "unknown",
                processes: one.peak_processes ? `up to ${count(one.peak_processes)}` : "unknown",
                commands: one.commands ?? 0,
                open: seconds(one.seconds),
              }}
            />
          </li>
        ))}
      </ol>
    </Panel>
  );
}

function Attempts({ data }: { data: RolloutData }) {
  return (
    <Panel title={`Attempts (${data.attempts.length})`} open={data.attempts.length > 1}>
      <ol class="attempts">
        {data.attempts.map((one) => (
          <li key={one.id}>
            <code>{one.id}</code> <OutcomeBadge label={one.label} /> {seconds(one.ended - one.started)} on{" "}
            {visible(one.runner)} <span class="quiet">{time(one.started)}</span>
            {!one.charged && <span class="badge warn">not charged</span>}
            {one.policy_loss && <span class="badge warn">lost during the policy's command</span>}
            {one.outcome.detail && <p>{visible(one.outcome.detail)}</p>}
            {one.outcome.traceback && (
              <details>
                <summary>Traceback</summary>
                <LongText text={one.outcome.traceback} />
              </details>
            )}
            {Object.keys(one.evidence).length > 0 && <Data value={one.evidence} />}
          </li>
        ))}
      </ol>
      {data.earlier.length > 0 && (
        <>
          <h3>Earlier records</h3>
          <ul>
            {data.earlier.map((one, at) => (
              <li key={at}>
                {time(one.ts)} <OutcomeBadge label={one.label} /> {visible(one.reason)}
              </li>
            ))}
          </ul>
        </>
      )}
    </Panel>
  );
}
