// Answers of the API of `rookery view`; see src/rookery/view/data.py.

export interface RunEntry {
  id: string;
  kind: "run" | "training";
  path: string;
  status: string;
  detail?: string;
  created?: number;
  environment?: string;
  model?: string;
  rollouts: number;
  started?: number;
  labels?: Record<string, number>;
  mean_reward?: number | null;
  settings?: Record<string, string>;
  evals?: number[];
}

export interface Estimate {
  mean: number | null;
  valid: number;
  tasks?: number;
  standard_error?: number | null;
  interval95?: [number, number] | null;
  pass_rate?: number;
  per_task?: Record<string, { mean: number | null; standard_error: number | null; tasks: number }>;
}

export interface Failure {
  cause: string;
  count: number;
  first: string;
  fault: string;
  detail: string;
  meaning: string;
  advice: string;
}

export interface RunEvent {
  ts: number;
  kind: string;
  payload: Record<string, unknown>;
}

export interface Summary {
  name: string;
  kind: "run" | "training";
  status: string;
  environment?: string;
  model?: string;
  created?: number;
  rollouts: number;
  planned?: number;
  valid?: number;
  failed?: number;
  cancelled?: number;
  tasks?: number;
  solved?: number;
  attempts?: number;
  outcomes?: Record<string, number>;
  reward?: Estimate;
  turns?: number;
  sampled_tokens?: number;
  prompt_tokens?: number;
  drifted?: number;
  seconds?: number;
  rollouts_per_second?: number;
  tokens_per_second?: number;
  failures?: Failure[];
  settings?: Record<string, string>;
  events?: RunEvent[];
  metrics?: Record<string, { mean: number | null; standard_error: number | null; valid: number }>;
  ungraded?: number;
  cost?: number | null;
  /** Statistics of each environment of a mixture, by name. */
  environments?: Record<string, EnvironmentSummary>;
  learning?: Record<string, unknown>[];
  training?: Record<string, string>;
}

export interface EnvironmentSummary {
  tasks: number;
  rollouts: number;
  valid: number;
  failed: number;
  ungraded: number;
  reward: Estimate;
  sampled_tokens: number;
  cost: number | null;
}

export interface Series {
  start: number;
  seconds: number;
  ended: number[];
  valid: number[];
  reward: (number | null)[];
  running: (number | null)[];
  failed: Record<string, number[]>;
  stages: Record<string, (number | null)[]>;
}

/** Columns of the table of rollouts. A missing value is NaN. */
export interface Columns {
  generation: number;
  start: number;
  count: number;
  complete: boolean;
  first_task: number;
  tasks: string[];
  labels: string[];
  failed: string[];
  /** The environments of a mixture, with whose names the IDs of its tasks begin; empty for other runs. */
  environments: string[];
  task: Float64Array;
  label: Float64Array;
  numbers: Record<string, Float64Array>;
  metrics: Record<string, Float64Array>;
}

export interface ToolCall {
  id: string;
  name: string;
  arguments?: string;
}

export type Part = { type?: string; text?: string; image_url?: { url?: string } | string } & Record<string, unknown>;

export interface Message {
  role: string;
  content?: string | Part[] | null;
  tool_calls?: ToolCall[];
  tool_call_id?: string | null;
  name?: string | null;
  reasoning?: string | null;
  left_out?: number;
}

export interface Turn {
  index: number;
  role: string;
  parent: number | null;
  messages: Message[];
  response: Message;
  prompt_tokens: number;
  sampled_tokens: number;
  started: number;
  seconds: number;
  queued: number;
  finish: string;
  version: number;
  versions: number;
  upstream: string;
  partial: boolean;
  token_ids: boolean;
  drifted: boolean;
  mean_logprob: number | null;
}

export interface Outcome {
  kind: string;
  fault?: string;
  cause?: string;
  detail?: string;
  stage?: string;
  traceback?: string;
  reason?: string;
}

export interface Attempt {
  id: string;
  number: number;
  label: string;
  outcome: Outcome;
  runner: string;
  started: number;
  ended: number;
  evidence: Record<string, unknown>;
  charged: boolean;
  policy_loss: boolean;
  sandboxes: SandboxUsage[];
}

export interface SandboxUsage {
  id: string;
  provider?: string;
  seconds?: number;
  commands?: number;
  cpu?: number;
  peak_memory?: number;
  peak_processes?: number;
}

export interface Timing {
  queue: number;
  setup: number;
  run: number;
  score: number;
  teardown: number;
  model: number;
  sandbox: number;
  paused: number;
}

export interface RecordData {
  id: string;
  group: number;
  member: number;
  task: string;
  /** Name of the environment in a mixture; empty for other runs. */
  environment: string;
  seed: string;
  label: string;
  outcome: Outcome;
  valid: boolean;
  ungraded: boolean;
  reward: number | null;
  rewards: Record<string, number | null>;
  metrics: Record<string, number | null>;
  info: Record<string, unknown>;
  usage: Record<string, unknown>;
  timing: Timing;
}

export interface TaskContent {
  id: string;
  prompt?: Message[];
  data?: Record<string, unknown>;
  files?: Record<string, number>;
  image?: string | null;
}

export interface Rollout extends RecordData {
  cost: number | null;
  cause: { meaning: string; advice: string } | null;
  attempts: Attempt[];
  earlier: { ts: number; reason: string; label: string }[];
  events: RunEvent[];
  turns: Turn[];
  segments: { turns: number[]; length: number; trained: number; extras: string[] }[];
  damage: string;
  task_content: TaskContent | null;
  members: { id: string; reward: number | null; label: string }[];
}

export interface GroupMember extends Omit<RecordData, "attempts"> {
  attempts: number;
  advantage: number;
  use: string;
  problem: string;
  trained: number;
  against: string[] | null;
  against_mean: number | null;
  messages: Message[];
}

export interface Group {
  group: number;
  task: string;
  k: number;
  stream: string;
  status: string;
  baseline: string;
  scale: string;
  kind: string;
  warning: string;
  task_content: TaskContent | null;
  members: GroupMember[];
  first_difference: number | null;
}

export interface Tokens {
  segment: number;
  segments: number;
  start: number;
  length: number;
  tokens: number[];
  mask: number[];
  logprobs: (number | null)[];
  versions: [number, number, number][];
  turns: [number, number, number][];
  extras: Record<string, (number | null)[]>;
  alternatives: ([number, number][] | null)[];
  texts: Record<string, string | null>;
  tokenizer: string;
}

export interface Pair {
  task: string;
  a: number;
  b: number;
  a_valid: number;
  b_valid: number;
  change: string;
  difference: number;
}

export interface Comparison {
  a: string;
  b: string;
  binary: boolean;
  tasks: number;
  only_a: number;
  only_b: number;
  a_mean: number | null;
  b_mean: number | null;
  difference: number | null;
  standard_error: number | null;
  interval95: [number, number] | null;
  counts: Record<string, number>;
  changed_tasks: string[];
  settings: Record<string, [string | null, string | null]>;
  pairs: Pair[];
}

export interface EngineStatus {
  paused?: boolean;
  in_flight?: number;
  runners?: number;
  runner_deaths?: number;
  waiting_for_upstream?: number;
  streams?: Record<string, { admitted: number; taken: number; waiting: number; staleness?: number }>;
  sandboxes?: Record<string, number>;
  prewarmed?: Record<string, number>;
  replicas?: { role: string; replica: string; healthy: boolean; calls: number; limit: number }[];
  policy_version?: number;
  retries?: number;
  images?: { image: string; step?: string }[];
  [name: string]: unknown;
}
