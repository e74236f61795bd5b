// When episodes ran: how many at once, and where the seconds of each one went.
import type { RunStore } from "../data/store";
import type { Episode } from "../data/types";
import type { Bin } from "./stats";

const NUM_BINS = 48;
const SECONDS = ["generate_s", "step_s", "wait_s"];

export interface AtOnce {
  /** Mean number of episodes that ran, over equal parts of the time; seconds since the first one began. */
  bins: Bin[];
  most: number;
}

/** Return how many episodes ran at once; null if the record does not say when they began. */
export function atOnce({ index }: RunStore): AtOnce | null {
  const began: number[] = [];
  const ended: number[] = [];
  for (const row of index.rows()) {
    const start = index.number("began_s", row);
    const took = SECONDS.reduce((sum, name) => sum + (index.number(name, row) || 0), 0);
    if (Number.isNaN(start) || took <= 0) continue;
    began.push(start);
    ended.push(start + took);
  }
  if (began.length < 2) return null;
  const starts = Float64Array.from(began).sort();
  const ends = Float64Array.from(ended).sort();
  const first = starts[0] ?? 0;
  const width = ((ends[ends.length - 1] ?? first) - first) / NUM_BINS;
  const edge = (k: number): number => Number((k * width).toPrecision(3));
  const bins = Array.from({ length: NUM_BINS }, (_, k) => ({ from: edge(k), to: edge(k + 1), count: 0 }));
  began.forEach((start, k) => {
    const [from, to] = [start - first, (ended[k] ?? start) - first];
    for (let k = Math.floor(from / width); k < Math.min(NUM_BINS, to / width); k++) {
      const bin = bins[k];
      if (bin) bin.count += (Math.min(to, (k + 1) * width) - Math.max(from, k * width)) / width;
    }
  });
  return { bins, most: mostAtOnce(starts, ends) };
}

function mostAtOnce(starts: Float64Array, ends: Float64Array): number {
  let most = 0;
  let over = 0;
  starts.forEach((start, k) => {
    while ((ends[over] ?? Number.POSITIVE_INFINITY) <= start) over++;
    most = Math.max(most, k + 1 - over);
  });
  return most;
}

export interface LanePart {
  kind: "generate" | "step";
  from: number;
  to: number;
}

/** One episode on the clock: what is no part of it is waiting. */
export interface Lane {
  row: number;
  from: number;
  to: number;
  parts: LanePart[];
}

/** Return the lanes of episodes in the order in which they began; those without a start in the record are left out. */
export function lanesOf(rows: number[], episodes: Episode[]): Lane[] {
  const lanes = episodes.flatMap(({ record }, k): Lane[] => {
    const start = record.began_s;
    if (typeof start !== "number") return [];
    const parts = record.turns.flatMap((turn): LanePart[] => {
      const from = start + (turn.began_s ?? Number.NaN);
      const answered = from + (turn.generate_s ?? 0);
      if (Number.isNaN(answered)) return [];
      return [
        { kind: "generate", from, to: answered },
        { kind: "step", from: answered, to: answered + (turn.step_s ?? 0) },
      ];
    });
    const took = record.turns.reduce((sum, turn) => sum + (turn.generate_s ?? 0) + (turn.step_s ?? 0), record.wait_s ?? 0);
    return [{ row: rows[k] ?? -1, from: start, to: Math.max(start + took, ...parts.map((part) => part.to)), parts }];
  });
  return lanes.sort((a, b) => a.from - b.from);
}
