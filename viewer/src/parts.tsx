// Small parts that several pages share.

import type { ComponentChildren } from "preact";
import type { RunEvent } from "./types";
import { number, time } from "./format";
import { link } from "./route";
import { Data, visible } from "./text";

export function Badge({ label, failed = false }: { label: string; failed?: boolean }) {
  const kind = failed
    ? "bad"
    : /^(?:completed|finished|gained|improved|informative|healthy)$/.test(label)
      ? "good"
      : /^(?:running|open)$/.test(label)
        ? "live"
        : "warn";
  return <span class={`badge ${kind}`}>{visible(label)}</span>;
}

/** Whether the label of an outcome is the cause of a failure. */
export function isFailure(label: string): boolean {
  return label !== "completed" && !/^(?:truncated|cancelled)\./.test(label);
}

export function OutcomeBadge({ label }: { label: string }) {
  return <Badge label={label} failed={isFailure(label)} />;
}

export function Problem({ error }: { error: string }) {
  return error ? (
    <p class="problem" role="alert">
      {visible(error)}
    </p>
  ) : (
    <p class="quiet" aria-busy="true">
      loading…
    </p>
  );
}

export function Panel(props: { title: ComponentChildren; open?: boolean; children: ComponentChildren }) {
  return (
    <details class="panel" open={props.open ?? true}>
      <summary>
        <h2>{props.title}</h2>
      </summary>
      {props.children}
    </details>
  );
}

export function Tile(props: { name: string; value: ComponentChildren; about?: ComponentChildren }) {
  return (
    <div class="tile">
      <div class="name">{props.name}</div>
      <div class="value">{props.value}</div>
      {props.about && <div class="about">{props.about}</div>}
    </div>
  );
}

export function NameValues({ values }: { values: Record<string, string | number | null> }) {
  return (
    <table class="pairs">
      <tbody>
        {Object.entries(values).map(([name, value]) => (
          <tr key={name}>
            <th scope="row">{visible(name)}</th>
            <td>{typeof value === "number" ? number(value) : visible(value ?? "–")}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

export function Events({ events }: { events: RunEvent[] }) {
  return (
    <ul class="events">
      {events.map((event, at) => (
        <li key={at}>
          <time>{time(event.ts)}</time> <b class={event.kind === "log.warning" ? "warned" : ""}>{visible(event.kind)}</b>{" "}
          {Object.keys(event.payload).length > 0 && <Data value={event.payload} />}
        </li>
      ))}
    </ul>
  );
}

export function RunTabs({ run, page }: { run: string; page: string }) {
  const tabs = [
    ["overview", "Overview", link(["run", run])],
    ["rollouts", "Rollouts", link(["run", run, "rollouts"])],
  ] as const;
  return (
    <nav class="tabs" aria-label="Run">
      {tabs.map(([name, title, url]) => (
        <a key={name} href={url} aria-current={name === page ? "page" : undefined}>
          {title}
        </a>
      ))}
    </nav>
  );
}
