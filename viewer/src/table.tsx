// The table of rollouts. All rows are filtered and sorted here; only the visible rows are in the document.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { api, isExport, useChanges } from "./api";
import { histogram, Histogram } from "./chart";
import { count, number, seconds } from "./format";
import { OutcomeBadge, Problem, RunTabs } from "./parts";
import { go, link, setQuery, useRoute } from "./route";
import { visible } from "./text";
import type { Columns } from "./types";

const ROW = 28;
const SPARE = 10;
const SHOWN_METRICS = 5;

interface Column {
  name: string;
  title: string;
  width: number;
  show?: (value: number | null) => string;
}

const FIXED: Column[] = [
  { name: "id", title: "Rollout", width: 90 },
  { name: "task", title: "Task", width: 220 },
  { name: "label", title: "Outcome", width: 150 },
  { name: "reward", title: "Reward", width: 80 },
  { name: "turns", title: "Turns", width: 70 },
  { name: "sampled_tokens", title: "Tokens", width: 80 },
  { name: "tool_calls", title: "Calls", width: 70 },
  { name: "attempts", title: "Attempts", width: 85 },
  { name: "run", title: "Run", width: 80, show: (value) => seconds(value) },
  { name: "model", title: "Model", width: 80, show: (value) => seconds(value) },
];

/** Load the table, and later only the rows that were added. */
function useTable(run: string): { table: Columns | null; error: string } {
  const version = useChanges(run);
  const [table, setTable] = useState<Columns | null>(null);
  const [error, setError] = useState("");
  const known = useRef<Columns | null>(null);
  useEffect(() => {
    known.current = null;
    setTable(null);
  }, [run]);
  useEffect(() => {
    let current = true;
    const before = known.current;
    const query = { run, start: before?.count ?? 0, generation: before?.generation ?? 0 };
    api<Columns>("rollouts", query).then(
      (found) => {
        if (!current) return;
        known.current = before && found.start === before.count ? append(before, found) : found;
        setTable(known.current);
      },
      (problem: Error) => current && setError(problem.message),
    );
    return () => {
      current = false;
    };
  }, [run, version]);
  return { table, error };
}

function append(before: Columns, more: Columns): Columns {
  const join = (a: Record<string, (number | null)[]>, b: Record<string, (number | null)[]>) =>
    Object.fromEntries(
      Object.keys(b).map((name) => [
        name,
        (a[name] ?? Array<number | null>(before.count).fill(null)).concat(b[name] ?? []),
      ]),
    );
  return {
    ...more,
    start: 0,
    task: before.task.concat(more.task),
    label: before.label.concat(more.label),
    numbers: join(before.numbers, more.numbers),
    metrics: join(before.metrics, more.metrics),
  };
}

interface Search {
  query: string;
  rows: Set<number> | null;
  searched: number;
  done: boolean;
}

/** Search the transcripts on the server, part by part. */
function useSearch(run: string, query: string, table: Columns | null): Search {
  const [state, setState] = useState<Search>({ query: "", rows: null, searched: 0, done: true });
  const ready = table !== null;
  useEffect(() => {
    if (!query || !table) {
      setState({ query, rows: null, searched: 0, done: true });
      return;
    }
    let current = true;
    const row = new Map<string, number>();
    for (let at = 0; at < table.count; at++) row.set(`${table.numbers.group?.[at]}.${table.numbers.member?.[at]}`, at);
    void (async () => {
      const rows = new Set<number>();
      let after: number | null = 0;
      let searched = 0;
      while (current && after !== null) {
        const part: { matches: [number, number][]; next: number | null; searched: number } = await api("search", {
          run,
          q: query,
          after,
        });
        for (const [group, member] of part.matches) {
          const found = row.get(`${group}.${member}`);
          if (found !== undefined) rows.add(found);
        }
        searched += part.searched;
        after = part.next;
        if (current) setState({ query, rows: new Set(rows), searched, done: after === null });
      }
    })();
    return () => {
      current = false;
    };
  }, [run, query, ready]);
  return state;
}

export function Rollouts({ run }: { run: string }) {
  const { table, error } = useTable(run);
  const { query } = useRoute();
  const get = (name: string) => query.get(name) ?? "";
  const search = useSearch(run, get("q"), table);
  const bound = (name: string) => (get(name) === "" ? null : Number(get(name)));
  const [label, task, metric, sort] = [get("label"), get("task"), get("metric"), get("sort") || "id"];
  const [low, high, least, most] = [bound("low"), bound("high"), bound("min"), bound("max")];
  const descending = get("order") === "desc";
  const rows = useMemo(() => {
    if (!table) return [];
    const values = metric ? column(table, metric) : [];
    const rewards = table.numbers.reward ?? [];
    const wanted = table.tasks.map((one) => one.toLowerCase().includes(task.toLowerCase()));
    const labels = table.labels.map(
      (one) =>
        !label || one === label || (label === "any failure" && table.failed.includes(one)) || one.startsWith(`${label}.`),
    );
    const found: number[] = [];
    for (let at = 0; at < table.count; at++) {
      const reward = rewards[at] ?? null;
      const value = values[at] ?? null;
      if (!labels[table.label[at] ?? -1] || !wanted[table.task[at] ?? -1]) continue;
      if ((low !== null || high !== null) && (reward === null || reward < (low ?? -Infinity) || reward > (high ?? Infinity)))
        continue;
      if ((least !== null || most !== null) && (value === null || value < (least ?? -Infinity) || value > (most ?? Infinity)))
        continue;
      if (search.rows && !search.rows.has(at)) continue;
      found.push(at);
    }
    return sortRows(table, found, sort, descending);
  }, [table, label, task, metric, low, high, least, most, sort, descending, search]);
  const bins = useMemo(
    () => histogram((table?.numbers.reward ?? []).filter((one): one is number => one !== null)),
    [table],
  );
  if (!table) return <Problem error={error} />;
  const metrics = Object.keys(table.metrics);
  const columns: Column[] = [
    ...FIXED,
    ...metrics.slice(0, SHOWN_METRICS).map((name) => ({ name: `metric:${name}`, title: name, width: 100 })),
  ];
  return (
    <main class="full">
      <div class="bar-row">
        <h1>{visible(run)}</h1>
        <RunTabs run={run} page="rollouts" />
      </div>
      <div class="filters">
        <Histogram
          title="Rewards of valid rollouts"
          bins={bins}
          chosen={(bin) => low !== null && Math.abs(bin.low - low) < 1e-9 && high !== null && Math.abs(bin.high - high) < 1e-9}
          onChoose={(bin) => setQuery({ low: bin?.low, high: bin?.high })}
        />
        <div class="fields">
          <label>
            Outcome
            <select value={label} onChange={(event) => setQuery({ label: event.currentTarget.value })}>
              <option value="">all</option>
              {table.failed.length > 0 && <option>any failure</option>}
              {table.labels.map((one) => (
                <option key={one}>{one}</option>
              ))}
            </select>
          </label>
          <Field name="task" title="Task contains" value={task} />
          <Field name="low" title="Reward from" value={get("low")} numeric />
          <Field name="high" title="to" value={get("high")} numeric />
          <label>
            Metric
            <select value={metric} onChange={(event) => setQuery({ metric: event.currentTarget.value })}>
              <option value="">–</option>
              {[...Object.keys(table.numbers), ...metrics.map((name) => `metric:${name}`)].map((name) => (
                <option key={name}>{name}</option>
              ))}
            </select>
          </label>
          {metric && <Field name="min" title="from" value={get("min")} numeric />}
          {metric && <Field name="max" title="to" value={get("max")} numeric />}
          {!isExport && <Field name="q" title="Transcript contains (Enter)" value={get("q")} onEnter search />}
          <button
            onClick={() =>
              setQuery({ label: "", task: "", low: "", high: "", metric: "", min: "", max: "", q: "", sort: "", order: "" })
            }
          >
            Clear
          </button>
        </div>
      </div>
      <p class="quiet" role="status">
        {count(rows.length)} of {count(table.count)} rollouts
        {!search.done && `, searching: ${count(search.searched)} done`}
      </p>
      <Grid run={run} table={table} rows={rows} columns={columns} sort={sort} descending={descending} />
    </main>
  );
}

interface FieldProps {
  name: string;
  title: string;
  value: string;
  numeric?: boolean;
  onEnter?: boolean;
  search?: boolean;
}

function Field({ name, title, value, numeric = false, onEnter = false, search = false }: FieldProps) {
  const apply = (event: { currentTarget: HTMLInputElement }) => setQuery({ [name]: event.currentTarget.value });
  return (
    <label>
      {title}
      <input
        {...(numeric ? { type: "number" as const, step: "any" } : { type: "search" as const })}
        name={name}
        data-search={search ? true : undefined}
        value={value}
        onInput={onEnter ? undefined : apply}
        onChange={onEnter ? apply : undefined}
      />
    </label>
  );
}

function column(table: Columns, name: string): (number | null)[] {
  return (name.startsWith("metric:") ? table.metrics[name.slice(7)] : table.numbers[name]) ?? [];
}

function sortRows(table: Columns, rows: number[], sort: string, descending: boolean): number[] {
  const sign = descending ? -1 : 1;
  const [group, member] = [table.numbers.group ?? [], table.numbers.member ?? []];
  const byId = (a: number, b: number) =>
    (group[a] ?? 0) - (group[b] ?? 0) || (member[a] ?? 0) - (member[b] ?? 0);
  if (sort === "id") return rows.sort((a, b) => sign * byId(a, b));
  if (sort === "task" || sort === "label") {
    const names = sort === "task" ? table.tasks : table.labels;
    const own = sort === "task" ? table.task : table.label;
    const order = new Map([...names.keys()].sort((a, b) => ((names[a] ?? "") < (names[b] ?? "") ? -1 : 1)).map((one, at) => [one, at]));
    return rows.sort((a, b) => sign * ((order.get(own[a] ?? 0) ?? 0) - (order.get(own[b] ?? 0) ?? 0)) || byId(a, b));
  }
  const values = column(table, sort);
  return rows.sort((a, b) => {
    const [x, y] = [values[a] ?? null, values[b] ?? null];
    if (x === null || y === null) return x === y ? byId(a, b) : x === null ? 1 : -1; // missing values are last
    return sign * (x - y) || byId(a, b);
  });
}

interface GridProps {
  run: string;
  table: Columns;
  rows: number[];
  columns: Column[];
  sort: string;
  descending: boolean;
}

function Grid({ run, table, rows, columns, sort, descending }: GridProps) {
  const ref = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  const [cursor, setCursor] = useState(0);
  useEffect(() => {
    if (!ref.current) return;
    const observer = new ResizeObserver(([entry]) => entry && setHeight(entry.contentRect.height));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => setCursor((now) => Math.min(now, Math.max(0, rows.length - 1))), [rows]);
  const id = (row: number) => `${table.numbers.group?.[row]}.${table.numbers.member?.[row]}`;
  const first = Math.max(0, Math.floor(top / ROW) - SPARE);
  const shown = rows.slice(first, first + Math.ceil(height / ROW) + 2 * SPARE);
  const move = (to: number) => {
    const next = Math.max(0, Math.min(rows.length - 1, to));
    setCursor(next);
    const box = ref.current;
    if (!box) return;
    const space = box.clientHeight - ROW; // without the head
    if (next * ROW < box.scrollTop) box.scrollTop = next * ROW;
    else if ((next + 1) * ROW > box.scrollTop + space) box.scrollTop = (next + 1) * ROW - space;
  };
  const onKey = (event: KeyboardEvent) => {
    const page = Math.floor(height / ROW) - 2;
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: page, PageUp: -page };
    const step = steps[event.key];
    if (step !== undefined) move(cursor + step);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(rows.length - 1);
    else if (event.key === "Enter" && rows[cursor] !== undefined) go(link(["run", run, "rollout", id(rows[cursor] ?? 0)]));
    else return;
    event.preventDefault();
  };
  const width = columns.reduce((sum, one) => sum + one.width, 0);
  const order = (name: string) => setQuery({ sort: name, order: sort === name && !descending ? "desc" : "" });
  return (
    <div
      class="grid"
      ref={ref}
      tabIndex={0}
      role="grid"
      aria-label="Rollouts"
      aria-rowcount={rows.length}
      onKeyDown={onKey}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
    >
      <div class="grid-head" role="row" style={{ width: `${width}px` }}>
        {columns.map((one) => (
          <span
            key={one.name}
            role="columnheader"
            aria-sort={sort === one.name ? (descending ? "descending" : "ascending") : "none"}
            style={{ width: `${one.width}px` }}
          >
            <button onClick={() => order(one.name)}>
              {visible(one.title)} {sort === one.name ? (descending ? "↓" : "↑") : ""}
            </button>
          </span>
        ))}
      </div>
      <div class="grid-body" style={{ height: `${rows.length * ROW}px`, width: `${width}px` }}>
        {shown.map((row, at) => (
          <div
            key={row}
            role="row"
            aria-rowindex={first + at + 1}
            aria-selected={first + at === cursor}
            class={first + at === cursor ? "grid-row cursor" : "grid-row"}
            style={{ top: `${(first + at) * ROW}px`, width: `${width}px` }}
            onClick={() => setCursor(first + at)}
          >
            {columns.map((one) => (
              <span key={one.name} role="gridcell" style={{ width: `${one.width}px` }}>
                <Cell run={run} table={table} row={row} column={one} id={id(row)} />
              </span>
            ))}
          </div>
        ))}
      </div>
    </div>
  );
}

function Cell({ run, table, row, column: one, id }: { run: string; table: Columns; row: number; column: Column; id: string }) {
  if (one.name === "id")
    return (
      <a href={link(["run", run, "rollout", id])} tabIndex={-1}>
        {id}
      </a>
    );
  if (one.name === "task")
    return (
      <a class="plain" href={link(["run", run, "group", table.numbers.group?.[row] ?? 0])} tabIndex={-1} title="Show the group">
        {visible((table.tasks[table.task[row] ?? 0] ?? "").slice(0, 200))}
      </a>
    );
  if (one.name === "label") return <OutcomeBadge label={table.labels[table.label[row] ?? 0] ?? ""} />;
  const value = column(table, one.name)[row] ?? null;
  return <>{value === null ? "" : one.show ? one.show(value) : number(value)}</>;
}
