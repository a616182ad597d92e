// The table of rollouts. All rows are filtered and sorted here; only the visible rows are in the document.

import { Component } from "preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { api, isExport, loadColumns, useChanges } from "./api";
import { histogram, Histogram } from "./chart";
import { count, number, seconds } from "./format";
import { OutcomeBadge, Problem, RunTabs } from "./parts";
import { go, link, setQuery, useRoute } from "./route";
import { visible } from "./text";
import type { Columns } from "./types";

const ROW = 28;
const SPARE = 8;
const STEP = 6;
const SHOWN_METRICS = 5;

interface Column {
  name: string;
  title: string;
  width: number;
  show?: (value: number) => string;
}

const FIXED: Column[] = [
  { name: "id", title: "Rollout", width: 90 },
  { name: "task", title: "Task", width: 200 },
  { name: "label", title: "Outcome", width: 145 },
  { name: "reward", title: "Reward", width: 95 },
  { name: "turns", title: "Turns", width: 80 },
  { name: "sampled_tokens", title: "Tokens", width: 90 },
  { name: "tool_calls", title: "Calls", width: 75 },
  { name: "attempts", title: "Attempts", width: 100 },
  { name: "run", title: "Run", width: 80, show: (value) => seconds(value) },
  { name: "model", title: "Model", width: 80, show: (value) => seconds(value) },
];

/** Load the table part by part, and later only the rows that were added. */
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
    const load = async () => {
      for (let complete = false; current && !complete; ) {
        const before = known.current;
        const found = await loadColumns({ run, start: before?.count ?? 0, generation: before?.generation ?? 0 });
        if (!current) return;
        known.current = before && found.start > 0 && found.start === before.count ? append(before, found) : found;
        complete = found.complete;
        setTable(known.current);
      }
    };
    load().catch((problem: Error) => current && setError(problem.message));
    return () => {
      current = false;
    };
  }, [run, version]);
  return { table, error };
}

function join(before: Float64Array | undefined, more: Float64Array, count: number): Float64Array {
  const joined = new Float64Array(count + more.length);
  if (before) joined.set(before);
  else joined.fill(NaN, 0, count);
  joined.set(more, count);
  return joined;
}

function append(before: Columns, more: Columns): Columns {
  const joinAll = (a: Record<string, Float64Array>, b: Record<string, Float64Array>) =>
    Object.fromEntries(Object.entries(b).map(([name, values]) => [name, join(a[name], values, before.count)]));
  return {
    ...more,
    start: 0,
    tasks: before.tasks.slice(0, more.first_task).concat(more.tasks),
    task: join(before.task, more.task, before.count),
    label: join(before.label, more.label, before.count),
    numbers: joinAll(before.numbers, more.numbers),
    metrics: joinAll(before.metrics, more.metrics),
  };
}

/** Rows by group and member. Groups and members are small numbers, so counting is faster than comparing. */
function orderById(table: Columns): Uint32Array {
  let order = Uint32Array.from({ length: table.count }, (_, at) => at);
  for (const name of ["member", "group"]) {
    const values = table.numbers[name] ?? new Float64Array(table.count);
    const most = values.reduce((a, b) => Math.max(a, b), 0);
    if (most > 1e7) {
      order.sort((a, b) => (values[a] ?? 0) - (values[b] ?? 0)); // sparse numbers: stable, so members stay in order
      continue;
    }
    const starts = new Uint32Array(most + 2);
    for (const value of values) starts[value + 1] = (starts[value + 1] ?? 0) + 1;
    for (let at = 1; at < starts.length; at++) starts[at] = (starts[at] ?? 0) + (starts[at - 1] ?? 0);
    const sorted = new Uint32Array(table.count);
    for (const row of order) {
      const value = values[row] ?? 0;
      sorted[starts[value] ?? 0] = row;
      starts[value] = (starts[value] ?? 0) + 1;
    }
    order = sorted;
  }
  return order;
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
  const ready = table?.complete ?? false;
  useEffect(() => {
    if (!query || !table || !ready) {
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
  const environment = get("environment");
  const [low, high, least, most] = [bound("low"), bound("high"), bound("min"), bound("max")];
  const descending = get("order") === "desc";
  const order = useMemo(() => (table ? orderById(table) : new Uint32Array(0)), [table]);
  const rows = useMemo(() => {
    if (!table) return new Uint32Array(0);
    const values = metric ? column(table, metric) : null;
    const rewards = table.numbers.reward ?? null;
    const [byReward, byValue] = [low !== null || high !== null, least !== null || most !== null];
    const [lowest, highest, from, to] = [low ?? -Infinity, high ?? Infinity, least ?? -Infinity, most ?? Infinity];
    const wanted = table.tasks.map(
      (one) => one.toLowerCase().includes(task.toLowerCase()) && (!environment || one.startsWith(`${environment}/`)),
    );
    const labels = table.labels.map(
      (one) =>
        !label || one === label || (label === "any failure" && table.failed.includes(one)) || one.startsWith(`${label}.`),
    );
    const inside = (value: number | undefined, least: number, most: number) => value !== undefined && value >= least && value <= most;
    const found = new Uint32Array(table.count);
    let count = 0;
    for (const at of order) {
      if (!labels[table.label[at] ?? -1] || !wanted[table.task[at] ?? -1]) continue;
      if (byReward && !inside(rewards?.[at], lowest, highest)) continue; // NaN is never inside
      if (byValue && !inside(values?.[at], from, to)) continue;
      if (search.rows && !search.rows.has(at)) continue;
      found[count++] = at;
    }
    return sortRows(table, found.subarray(0, count), sort, descending);
  }, [table, order, label, task, environment, metric, low, high, least, most, sort, descending, search]);
  const bins = useMemo(() => histogram((table?.numbers.reward ?? new Float64Array(0)).filter((one) => !Number.isNaN(one))), [table]);
  if (!table) return <Problem error={error} />;
  const metrics = Object.keys(table.metrics);
  const columns = chooseColumns(metrics);
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
          {table.environments.length > 0 && (
            <label>
              Environment
              <select value={environment} onChange={(event) => setQuery({ environment: event.currentTarget.value })}>
                <option value="">all</option>
                {table.environments.map((one) => (
                  <option key={one}>{one}</option>
                ))}
              </select>
            </label>
          )}
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
              setQuery({ label: "", environment: "", task: "", low: "", high: "", metric: "", min: "", max: "", q: "", sort: "", order: "" })
            }
          >
            Clear
          </button>
        </div>
      </div>
      <p class="quiet" role="status">
        {count(rows.length)} of {count(table.count)} rollouts
        {!table.complete && ", loading more"}
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

const columnCache = new Map<string, Column[]>();

/** The columns for these metrics. The same list is the same array, so that unchanged rows are not rendered again. */
function chooseColumns(metrics: string[]): Column[] {
  const names = metrics.slice(0, SHOWN_METRICS);
  const key = JSON.stringify(names);
  const known = columnCache.get(key);
  if (known) return known;
  const found = [...FIXED, ...names.map((name) => ({ name: `metric:${name}`, title: name, width: 100 }))];
  columnCache.set(key, found);
  return found;
}

function column(table: Columns, name: string): Float64Array | undefined {
  return name.startsWith("metric:") ? table.metrics[name.slice(7)] : table.numbers[name];
}

/** Sort rows that are in the order of their IDs. Rows with equal values keep that order, and missing values are last. */
function sortRows(table: Columns, rows: Uint32Array, sort: string, descending: boolean): Uint32Array {
  if (sort === "id") return descending ? rows.slice().reverse() : rows;
  let values = column(table, sort);
  if (sort === "task" || sort === "label") {
    const names = sort === "task" ? table.tasks : table.labels;
    const rank = new Float64Array(names.length);
    [...names.keys()].sort((a, b) => ((names[a] ?? "") < (names[b] ?? "") ? -1 : 1)).forEach((one, at) => (rank[one] = at));
    values = (sort === "task" ? table.task : table.label).map((one) => rank[one] ?? 0);
  }
  if (!values) return rows;
  const own = values;
  const sign = descending ? -1 : 1;
  const known = rows.filter((row) => !Number.isNaN(own[row]));
  const missing = rows.filter((row) => Number.isNaN(own[row]));
  known.sort((a, b) => sign * ((own[a] ?? 0) - (own[b] ?? 0)));
  const sorted = new Uint32Array(rows.length);
  sorted.set(known);
  sorted.set(missing, known.length);
  return sorted;
}

interface GridProps {
  run: string;
  table: Columns;
  rows: Uint32Array;
  columns: Column[];
  sort: string;
  descending: boolean;
}

function Grid({ run, table, rows, columns, sort, descending }: GridProps) {
  const ref = useRef<HTMLDivElement>(null);
  const [first, setFirst] = useState(0);
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
  // Rows enter and leave in steps, so that most scroll events change nothing in the document.
  const onScroll = (top: number) => setFirst(Math.max(0, Math.floor((top / ROW - SPARE) / STEP) * STEP));
  const shown = rows.subarray(first, first + Math.ceil(height / ROW) + 2 * SPARE + STEP);
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
  const choose = useCallback((at: number) => setCursor(at), []);
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
      onScroll={(event) => onScroll(event.currentTarget.scrollTop)}
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
        {Array.from(shown, (row, at) => (
          <Row
            key={first + at}
            run={run}
            table={table}
            row={row}
            at={first + at}
            chosen={first + at === cursor}
            columns={columns}
            onChoose={choose}
          />
        ))}
      </div>
    </div>
  );
}

interface RowProps {
  run: string;
  table: Columns;
  row: number;
  at: number;
  chosen: boolean;
  columns: Column[];
  onChoose: (at: number) => void;
}

/** A row of the table. It is rendered again only if one of its properties changes. */
class Row extends Component<RowProps> {
  override shouldComponentUpdate(next: RowProps): boolean {
    const now = this.props;
    return (
      next.row !== now.row ||
      next.at !== now.at ||
      next.chosen !== now.chosen ||
      next.columns !== now.columns ||
      next.run !== now.run ||
      next.table.generation !== now.table.generation
    );
  }

  override render() {
    const { run, table, row, at, chosen, columns, onChoose } = this.props;
    return (
      <div
        role="row"
        aria-rowindex={at + 1}
        aria-selected={chosen}
        class={chosen ? "grid-row cursor" : "grid-row"}
        style={{ top: `${at * ROW}px` }}
        onClick={() => onChoose(at)}
      >
        {columns.map((one) => (
          <span key={one.name} role="gridcell" style={{ width: `${one.width}px` }}>
            {cell(run, table, row, one)}
          </span>
        ))}
      </div>
    );
  }
}

function cell(run: string, table: Columns, row: number, one: Column) {
  const group = table.numbers.group?.[row] ?? 0;
  if (one.name === "id") {
    const id = `${group}.${table.numbers.member?.[row]}`;
    return (
      <a href={link(["run", run, "rollout", id])} tabIndex={-1}>
        {id}
      </a>
    );
  }
  if (one.name === "task")
    return (
      <a class="plain" href={link(["run", run, "group", group])} tabIndex={-1} title="Show the group">
        {visible((table.tasks[table.task[row] ?? 0] ?? "").slice(0, 200))}
      </a>
    );
  if (one.name === "label") return <OutcomeBadge label={table.labels[table.label[row] ?? 0] ?? ""} />;
  const value = column(table, one.name)?.[row] ?? NaN;
  return Number.isNaN(value) ? "" : one.show ? one.show(value) : number(value);
}
