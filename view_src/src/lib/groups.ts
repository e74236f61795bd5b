// What the overview says of groups, from the index alone.
import type { RunStore } from "../data/store";
import { outcomeOf, type Outcome } from "./outcome";
import { mean, spread } from "./stats";

export interface GroupFacts {
  id: string;
  /** Best reward first; those without a reward last. */
  rows: number[];
  outcomes: Outcome[];
  mean: number;
  spread: number;
  /** Number of different action sequences; NaN where the index does not tell. */
  distinct: number;
}

export interface Sorted {
  /** Siblings got different rewards: the widest spread first. */
  differ: GroupFacts[];
  failed: GroupFacts[];
  solved: GroupFacts[];
  /** The same reward for all, neither failed nor solved; single episodes are here too. */
  same: GroupFacts[];
  /** With an episode that failed, or without a reward. */
  broken: GroupFacts[];
  /** All siblings took the same actions. */
  saidTheSame: GroupFacts[];
  numGroups: number;
}

const caches = new WeakMap<RunStore, { version: number; passScore: number; sorted: Sorted }>();

export function sortedGroups(store: RunStore): Sorted {
  const known = caches.get(store);
  const { passScore } = store;
  if (known?.version === store.index.version && known.passScore === passScore) return known.sorted;
  const sorted: Sorted = { differ: [], failed: [], solved: [], same: [], broken: [], saidTheSame: [], numGroups: 0 };
  for (const group of store.index.groups().values()) {
    const facts = factsOf(store, group.id, group.rows);
    sorted.numGroups++;
    placeOf(sorted, facts).push(facts);
    if (facts.distinct === 1 && facts.rows.length > 1) sorted.saidTheSame.push(facts);
  }
  const { differ, failed, solved, same, broken, saidTheSame } = sorted;
  sorted.differ = inOrder(differ, "-spread");
  for (const groups of [failed, solved, same, broken, saidTheSame]) groups.sort(byMean);
  caches.set(store, { version: store.index.version, passScore, sorted });
  return sorted;
}

/** The least mean first, then by id; groups without a reward come first. */
function byMean(a: GroupFacts, b: GroupFacts): number {
  return (Number.isNaN(a.mean) ? -Infinity : a.mean) - (Number.isNaN(b.mean) ? -Infinity : b.mean) || byId(a, b);
}

function byId(a: GroupFacts, b: GroupFacts): number {
  return a.id < b.id ? -1 : Number(a.id > b.id);
}

/** Return groups in the order of a column, `mean`, `spread` or `task`; with - before it, turned around. */
export function inOrder(groups: GroupFacts[], sort: string): GroupFacts[] {
  const column = sort.replace(/^-/, "");
  const sign = sort.startsWith("-") ? -1 : 1;
  const compare = column === "task" ? byId : column === "mean" ? byMean : (a: GroupFacts, b: GroupFacts) => a.spread - b.spread;
  return [...groups].sort((a, b) => sign * compare(a, b));
}

function placeOf(sorted: Sorted, facts: GroupFacts): GroupFacts[] {
  if (facts.spread > 1e-9) return sorted.differ;
  if (facts.outcomes.some((each) => each === "error" || each === "none")) return sorted.broken;
  if (facts.outcomes.every((each) => each === "fail")) return sorted.failed;
  return facts.outcomes.every((each) => each === "pass") ? sorted.solved : sorted.same;
}

function factsOf(store: RunStore, id: string, unsorted: number[]): GroupFacts {
  const { index } = store;
  const worth = (row: number): number => {
    const reward = index.number("reward", row);
    return Number.isNaN(reward) ? Number.NEGATIVE_INFINITY : reward;
  };
  const rows = [...unsorted].sort((a, b) => worth(b) - worth(a) || 0);
  const rewards = rows.map((row) => index.number("reward", row)).filter((each) => !Number.isNaN(each));
  const hashes = index.has("action_hash") ? new Set(rows.map((row) => index.text("action_hash", row))).size : Number.NaN;
  return {
    id,
    rows,
    outcomes: rows.map((row) =>
      outcomeOf(index.number("reward", row), index.number("score", row), index.value("error", row) !== null, store.passScore),
    ),
    mean: mean(rewards),
    spread: rewards.length > 1 ? spread(rewards) : Number.NaN,
    distinct: hashes,
  };
}
