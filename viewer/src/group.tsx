// The rollouts of a group side by side, with the advantage of each and its reason.

import { useState } from "preact/hooks";
import { useData } from "./api";
import { count, number } from "./format";
import { MessageView } from "./message";
import { Badge, OutcomeBadge, Problem } from "./parts";
import { link } from "./route";
import { visible } from "./text";
import type { Group as GroupData, GroupMember } from "./types";

const KINDS: Record<string, string> = {
  informative: "The rewards differ, so the group trains.",
  uniform: "All rewards are equal, so all advantages are 0.",
  short: "Only one rollout counts, so there is nothing to compare it with and its advantage is 0.",
  failed: "No rollout counts.",
};

export function Group({ run, group }: { run: string; group: number }) {
  const { data, error } = useData<GroupData>("group", { run, group });
  const [common, setCommon] = useState(false);
  if (!data) return <Problem error={error} />;
  const first = data.first_difference;
  const start = common || first === null ? 0 : Math.max(0, first);
  const most = Math.max(...data.members.map((one) => Math.abs(one.advantage)), 1e-9);
  return (
    <main>
      <div class="bar-row">
        <h1>
          Group {data.group} <Badge label={data.kind} />
        </h1>
        <nav class="tabs" aria-label="Group">
          {group > 0 && <a href={link(["run", run, "group", group - 1])}>← {group - 1}</a>}
          <a href={link(["run", run, "group", group + 1])}>{group + 1} →</a>
        </nav>
      </div>
      <p class="quiet">
        task <a href={link(["run", run, "rollouts"], { task: data.task })}>{visible(data.task)}</a> · stream{" "}
        {visible(data.stream)} · {data.status !== "open" && `${data.status} · `}
        {data.members.length} of {data.k} rollouts ended. {KINDS[data.kind]}{" "}
        Baseline {data.baseline.replaceAll("_", " ")}, scale {data.scale}.
      </p>
      {data.warning && <Problem error={data.warning} />}
      <div class="scroll">
        <table class="list">
          <thead>
            <tr>
              <th>Rollout</th>
              <th>Outcome</th>
              <th class="r">Reward</th>
              <th class="r">Advantage</th>
              <th>
                <span class="sr">Advantage as a bar</span>
              </th>
              <th>Why</th>
              <th class="r">Trained tokens</th>
              <th class="r">Turns</th>
            </tr>
          </thead>
          <tbody>
            {data.members.map((one) => (
              <tr key={one.id}>
                <td>
                  <a href={link(["run", run, "rollout", one.id])}>{one.id}</a>
                </td>
                <td>
                  <OutcomeBadge label={one.label} />
                </td>
                <td class="r">{number(one.reward)}</td>
                <td class="r">
                  <b>{one.use === "missing" ? "–" : number(one.advantage)}</b>
                </td>
                <td>
                  <span class="advantage">
                    <span
                      class={one.advantage < 0 ? "negative" : "positive"}
                      style={{
                        width: `${(50 * Math.abs(one.advantage)) / most}%`,
                        left: one.advantage < 0 ? `${50 - (50 * Math.abs(one.advantage)) / most}%` : "50%",
                      }}
                    />
                  </span>
                </td>
                <td>{explain(one, data)}</td>
                <td class="r">{count(one.trained)}</td>
                <td class="r">{count(Number(one.usage.turns))}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <div class="bar-row">
        <h2>Transcripts</h2>
        <span class="quiet">
          {first === null ? "They do not differ." : `They first differ in message ${first + 1}.`}
        </span>
        {first !== null && first > 0 && (
          <button onClick={() => setCommon(!common)}>{common ? "Hide" : "Show"} the common beginning</button>
        )}
      </div>
      <div class="side-by-side" style={{ gridTemplateColumns: `repeat(${data.members.length}, minmax(260px, 1fr))` }}>
        {data.members.map((one) => (
          <div key={one.id} class="side">
            <h3>
              <a href={link(["run", run, "rollout", one.id])}>{one.id}</a> {number(one.reward)}
            </h3>
            {one.messages.slice(start).map((message, at) => (
              <div key={at} class={first === at + start ? "differs" : ""}>
                <MessageView message={message} open reasoning={false} />
              </div>
            ))}
            {!one.messages.length && <p class="quiet">no transcript</p>}
          </div>
        ))}
      </div>
    </main>
  );
}

function explain(one: GroupMember, data: GroupData): string {
  if (one.problem) return `left out: ${one.problem}`;
  if (one.use === "missing") return "missing data: in no baseline and no loss";
  if (one.use === "leave_out") return "left out by the settings of the batch";
  const mask = one.use === "mask" ? "; its tokens do not train" : "";
  if (!one.against) return `nothing to compare with${mask}`;
  const scale = data.scale === "std" ? ", divided by the standard deviation" : "";
  return `${number(one.reward)} − ${number(one.against_mean)} (mean of ${one.against.join(", ")})${scale}${mask}`;
}
