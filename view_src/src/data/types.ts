// What the two hosts give the page: the answers of the server and the elements of the single file.

export type RunKind = "run" | "train" | "eval";

export interface RunName {
  run: number;
  name: string;
  kind: RunKind;
}

export interface Runs {
  runs: RunName[];
  version: string;
}

export interface Estimate {
  mean: number;
  ci95_low: number | null;
  ci95_high: number | null;
  num_tasks: number;
}

export interface RunMetrics {
  num_tasks?: number;
  num_samples?: number;
  num_episodes?: number;
  num_missing?: number;
  num_no_reward?: number;
  num_retries?: number;
  num_infra_errors?: number;
  num_env_errors?: number;
  error_types?: Record<string, number>;
  reward?: Estimate | null;
  score?: Estimate | null;
  pass_score?: number | null;
  pass_at_k?: Record<string, Estimate>;
  hygiene?: Record<string, number | null>;
  turns_mean?: number | null;
  turns_max?: number | null;
  tokens?: Record<string, number | null>;
  time?: Record<string, number | null>;
  cost_usd?: number | null;
  judge_cost?: number | null;
  /** Of a mixture, by name. */
  environments?: Record<string, RunMetrics>;
}

export interface Panel {
  title: string;
  label: string;
  series: [string, string][];
}

export interface Meta {
  run: number;
  name: string;
  path: string;
  kind: RunKind;
  is_writing: boolean;
  config: unknown;
  metrics: RunMetrics | null;
  env: string | null;
  model: string | null;
  changed_flags: [string, string][];
  tokenizer: { sha256?: string; source?: string; error?: string } | null;
  sizes: Record<string, number>;
  panels: Panel[];
}

/** Offset and length of a line of trajectories.jsonl. */
export type At = [number, number];

export type SpanKind = "prompt" | "action" | "close" | "feedback";

/** Start, end, kind, turn, and the ranges of the span that carry text of messages. */
export type Span = [number, number, SpanKind, number, [number, number][]];

export interface StepResult {
  observation?: unknown;
  reward?: number | null;
  terminated?: boolean;
  truncated?: boolean;
  score?: number | null;
  info?: Record<string, unknown>;
}

export interface TurnRecord {
  segment: number;
  start: number;
  end: number;
  action?: string;
  answer?: { model?: string; num_output_tokens?: number | null } | null;
  finish_reason?: string | null;
  matched_stop?: string | null;
  generate_s?: number;
  step_s?: number;
  began_s?: number | null;
  num_cached_tokens?: number | null;
  num_retries?: number;
  /** Left out where it is 0, as the next. */
  num_request_retries?: number;
  num_failovers?: number;
  bridge?: string | null;
  num_synthesized?: number;
  observation_cut?: boolean;
  /** Indices in the action of tokens that a constraint forced. */
  forced?: number[] | null;
  result?: StepResult | null;
}

export interface SegmentRecord {
  token_ids: number[];
  action_spans: [number, number][];
  logprobs: (number | string | null)[];
  policy_versions: [number, number][];
}

export interface ErrorRecord {
  kind?: string;
  type?: string;
  message?: string;
  where?: string;
  place?: string | null;
}

export interface EpisodeRecord {
  episode_id: string;
  group_id: string;
  attempt?: number;
  error?: ErrorRecord | null;
  stop_reason?: string | null;
  reward?: number | null;
  score?: number | null;
  seed?: number | null;
  max_length?: number | null;
  prompt?: unknown;
  task?: { prompt?: unknown; label?: unknown; task_id?: string; metadata?: Record<string, unknown> };
  tools?: unknown[];
  turns: TurnRecord[];
  segments: SegmentRecord[];
  wait_s?: number;
  /** Seconds since 1970. */
  began_s?: number | null;
}

/** What the learner noted about the action tokens, in the record's order. */
export interface Learned {
  step: number;
  advantages: (number | null)[] | null;
  logprobs: (number | null)[] | null;
}

export interface EpisodeView {
  segments: { spans: Span[]; texts: [number, string][] }[];
  turns: { num_action_tokens: number | null; policy_version: number | null }[];
  learned: Learned | null;
}

export interface Episode {
  at: At;
  record: EpisodeRecord;
  view: EpisodeView;
}

export type EpisodeOrError = Episode | { at: At; error: string };

export interface EpisodesAnswer {
  texts: [number, string][];
  special: number[];
  episodes: EpisodeOrError[];
}

export interface Head {
  at: At;
  prompt?: string | null;
  label?: string | null;
  last_action?: string | null;
  info?: Record<string, unknown> | null;
  error?: string;
}

export interface StepGroup {
  group_id: string;
  rejected: string | null;
  episodes: unknown[][];
  rewards?: (number | null)[];
}

export interface StepLine {
  v?: number;
  step: number;
  kind: string;
  version?: number | null;
  estimator?: string | null;
  credit?: string | null;
  episode_fields: string[];
  groups: StepGroup[];
}

export type StreamName = "index" | "metrics" | "steps";

/** What a stream tells: lines of data as they came, or one control. */
export interface StreamEvents {
  lines(lines: string[]): void;
  reset(): void;
  progress(done: number, all: number): void;
  end(): void;
}

export interface Source {
  readonly isFile: boolean;
  /** What the file leaves out, in a sentence. */
  readonly note: string | null;
  runs(): Promise<Runs>;
  meta(run: number): Promise<Meta>;
  /** Read a stream and follow it; returns what ends it. */
  stream(run: number, name: StreamName, events: StreamEvents): () => void;
  episodes(run: number, at: At[]): Promise<EpisodesAnswer>;
  heads(run: number, at: At[]): Promise<Head[]>;
  /** Call `found` with the places of lines in which the text occurs. */
  grep(run: number, text: string, fold: boolean, found: (at: At[]) => void, signal: AbortSignal): Promise<void>;
  diff(a: number, b: number, by: string, cluster: string): Promise<unknown>;
  /** The keys that tasks can be joined by in a comparison; null for any. */
  readonly clusters: string[] | null;
  /** True if the host has this line. */
  has(run: number, at: At): boolean;
}

export class SourceError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}
