// Siblings beside each other: identical ones folded, and the place at which each parts from the reference.
import type { Episode, EpisodeRecord } from "../data/types";
import type { EpisodeModel } from "./tokens";

export interface Sibling {
  row: number;
  /** Tells it from those beside it: the end of its id if they are of one group, else the whole id. */
  name: string;
  episode: Episode;
  model: EpisodeModel;
}

/** Siblings that took the same actions and got the same reward. */
export interface Strand {
  siblings: Sibling[];
  reward: number | null;
  /** Units of each turn: ids of tokens, or words where the record has no tokens. */
  turns: string[][];
}

export interface Parting {
  turn: number;
  /** Index of the first unit that differs, within the action; -1 if the observation differs and not the action. */
  unit: number;
}

function unitsOf(record: EpisodeRecord, turn: number): string[] {
  const own = record.turns[turn];
  if (!own) return [];
  const ids = record.segments[own.segment]?.token_ids.slice(own.start, own.end) ?? [];
  return ids.length ? ids.map(String) : (own.action ?? "").split(/(?<=\s)/);
}

const rewardOf = (record: EpisodeRecord): number | null => record.reward ?? null;

/** Return the distinct strands, best reward first, then the most frequent. */
export function strandsOf(siblings: Sibling[]): Strand[] {
  const byActions = new Map<string, Strand>();
  for (const sibling of siblings) {
    const { record } = sibling.episode;
    const turns = record.turns.map((_, turn) => unitsOf(record, turn));
    const key = JSON.stringify([rewardOf(record), record.error?.kind ?? null, turns]);
    const strand = byActions.get(key);
    if (strand) strand.siblings.push(sibling);
    else byActions.set(key, { siblings: [sibling], reward: rewardOf(record), turns });
  }
  return [...byActions.values()].sort(
    (a, b) =>
      (b.reward ?? Number.NEGATIVE_INFINITY) - (a.reward ?? Number.NEGATIVE_INFINITY) ||
      b.siblings.length - a.siblings.length,
  );
}

function observationText(record: EpisodeRecord, turn: number): string {
  return JSON.stringify(record.turns[turn]?.result?.observation ?? "");
}

const recordOf = (strand: Strand): EpisodeRecord | undefined => strand.siblings[0]?.episode.record;

/** Return the number of units that two turns begin with alike. */
export function sharedLength(a: string[], b: string[]): number {
  let unit = 0;
  while (unit < a.length && unit < b.length && a[unit] === b[unit]) unit++;
  return unit;
}

/** Return where a strand parts from the reference; null if it never does. */
export function partingOf(reference: Strand, strand: Strand): Parting | null {
  const one = recordOf(reference);
  const other = recordOf(strand);
  if (!one || !other || reference === strand) return null;
  const most = Math.max(reference.turns.length, strand.turns.length);
  for (let turn = 0; turn < most; turn++) {
    const a = reference.turns[turn] ?? [];
    const b = strand.turns[turn] ?? [];
    const unit = sharedLength(a, b);
    if (unit < a.length || unit < b.length) return { turn, unit };
    if (observationText(one, turn) !== observationText(other, turn)) return { turn, unit: -1 };
  }
  return null;
}

/** Return the number of units of a turn that a strand shares with the reference. */
export function sharedUnits(strand: Strand, parting: Parting | null, turn: number): number {
  const all = strand.turns[turn]?.length ?? 0;
  if (parting === null || turn < parting.turn) return all;
  if (turn > parting.turn) return 0;
  return parting.unit < 0 ? all : parting.unit;
}

/** Return the text of a unit. */
export function unitText(strand: Strand, parting: Parting): string | null {
  const sibling = strand.siblings[0];
  const turn = sibling?.episode.record.turns[parting.turn];
  if (!sibling || !turn || parting.unit < 0) return null;
  const segment = sibling.model.segments[turn.segment];
  if (segment?.ids.length) return turn.start + parting.unit < turn.end ? segment.text(turn.start + parting.unit) : null;
  return strand.turns[parting.turn]?.[parting.unit] ?? null;
}

/** Return the log-probability of a unit; NaN if it is not known. */
export function unitLogprob(strand: Strand, parting: Parting): number {
  const sibling = strand.siblings[0];
  const turn = sibling?.episode.record.turns[parting.turn];
  if (!sibling || !turn || parting.unit < 0) return Number.NaN;
  return sibling.model.segments[turn.segment]?.logprobs[turn.start + parting.unit] ?? Number.NaN;
}
