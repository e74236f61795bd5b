// The answer of `agentenv diff --json`.
import type { RunName, Runs } from "../data/types";

/** The runs that can be compared: what a training keeps of its evaluations is compared as the training. */
export const comparable = (runs: Runs): RunName[] => runs.runs.filter((each) => each.kind !== "eval");

export interface Difference {
  mean: number;
  num_tasks: number;
  /** Units of several tasks that it is over; null if each task is one. */
  num_clusters: number | null;
  se: number | null;
  ci95_low: number | null;
  ci95_high: number | null;
}

export interface Change {
  name: string;
  a: number;
  b: number;
  difference: Difference;
  q: number | null;
  /** Of an environment's mean; null for other numbers. */
  verdict: string | null;
}

export interface SideFacts {
  name: string;
  step: number | null;
  num_tasks: number;
  num_episodes: number;
  num_unrewarded: Record<string, number>;
  num_only: number;
  mean: number;
}

export interface Ratio {
  ratio: number;
  ci95_low: number | null;
  ci95_high: number | null;
  num_tasks: number;
}

export interface TaskChange {
  task_id: string;
  num_a: number;
  num_b: number;
  mean_a: number;
  mean_b: number;
  difference: number;
  p: number | null;
  q: number | null;
  is_named: boolean;
}

export interface Comparison {
  a: SideFacts;
  b: SideFacts;
  by: string;
  margin: number;
  cluster: string | null;
  caveats: { kind: string; text: string; refuses: boolean }[];
  changed: Record<string, [unknown, unknown]>;
  verdict: string;
  difference: Difference;
  environments: Change[];
  are_identical: boolean;
  share_bound: number | null;
  sign_flips: { p: number; num: number; is_exact: boolean } | null;
  pairing: { se_unpaired: number; correlation: number } | null;
  precision: { share_within: number; half: number; half_more_episodes: number; half_more_tasks: number; half_at_best: number } | null;
  smallest_effect: number | null;
  share_above: Change | null;
  flips: { gained_once: number; lost_once: number; gained_always: number; lost_always: number; p: number | null } | null;
  passes: Change[];
  lengths: Ratio | null;
  lengths_passed: Ratio | null;
  cost: Change | null;
  stop_reasons: Change[];
  info: Change[];
  tasks: TaskChange[];
  /** Those whose value changed, if one run is the other graded again; otherwise null. */
  episodes: { episode_id: string; task_id: string; a: number; b: number }[] | null;
  num_needed: number | null;
}

const VERDICTS = new Map([
  ["better", "B is better"],
  ["worse", "B is worse"],
  ["no_worse", "B is no worse"],
  ["no_difference", "no difference is shown"],
  ["unknown", "unknown: one task says nothing about others"],
]);

export function verdictText(verdict: string): string {
  return VERDICTS.get(verdict) ?? verdict;
}
