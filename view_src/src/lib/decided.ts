// Which token decided a group: where a strand with less reward leaves the better one that it followed longest; if both
// got the same at first, where they part in the turn from which their rewards differ.
import { type Parting, type Strand, partingOf, sharedLength, unitLogprob, unitText } from "./group";

export interface Decision {
  /** Strands that leave the better one at the same place with the same words. */
  worse: Strand[];
  better: Strand;
  parting: Parting;
  /** They parted before, in a turn for which both got the same reward. */
  isLater: boolean;
  /** What each says there; null at its end, or where the observations differ. */
  said: { worse: string | null; better: string | null };
  logprob: { worse: number; better: number };
  /** What both say right before. */
  context: string;
}

function isLater(a: Parting, b: Parting): boolean {
  // A parting in the observation comes after the whole action.
  const unit = (each: Parting): number => (each.unit < 0 ? Number.MAX_SAFE_INTEGER : each.unit);
  return a.turn > b.turn || (a.turn === b.turn && unit(a) > unit(b));
}

/** Return where two strands that parted part in the first turn with different rewards; else where they parted. */
function decidingOf(better: Strand, worse: Strand, first: Parting): Parting {
  const rewardsOf = (strand: Strand): unknown[] => strand.siblings[0]?.episode.record.turns.map((turn) => turn.result?.reward) ?? [];
  const [a, b] = [rewardsOf(better), rewardsOf(worse)];
  let turn = first.turn;
  while (turn < Math.max(a.length, b.length) && a[turn] === b[turn]) turn++;
  if (turn === first.turn || turn >= Math.max(a.length, b.length)) return first;
  const [own, other] = [better.turns[turn] ?? [], worse.turns[turn] ?? []];
  const unit = sharedLength(own, other);
  return unit < Math.max(own.length, other.length) ? { turn, unit } : first;
}

/** Return a decision for each strand that got less than the best, the least reward first. */
export function decisionsOf(strands: Strand[]): Decision[] {
  const best = strands[0]?.reward ?? null;
  if (best === null) return [];
  const good = strands.filter((strand) => strand.reward === best);
  const found = new Map<string, Decision>();
  for (const worse of strands) {
    if (worse.reward === null || worse.reward >= best) continue;
    let chosen: { better: Strand; first: Parting; parting: Parting } | null = null;
    for (const better of good) {
      const first = partingOf(better, worse);
      if (!first) continue;
      const parting = decidingOf(better, worse, first);
      const by = parting.turn - (chosen?.parting.turn ?? -1);
      if (!chosen || by > 0 || (by === 0 && isLater(first, chosen.first))) chosen = { better, first, parting };
    }
    if (!chosen) continue;
    const { better, first, parting } = chosen;
    const said = { worse: unitText(worse, parting), better: unitText(better, parting) };
    const key = JSON.stringify([worse.reward, strands.indexOf(better), parting, said.worse]);
    const known = found.get(key);
    if (known) known.worse.push(worse);
    else {
      const logprob = { worse: unitLogprob(worse, parting), better: unitLogprob(better, parting) };
      found.set(key, { worse: [worse], better, parting, isLater: parting !== first, said, logprob, context: contextOf(better, parting) });
    }
  }
  return [...found.values()].sort((a, b) => (a.worse[0]?.reward ?? 0) - (b.worse[0]?.reward ?? 0));
}

const CONTEXT_CHARS = 36;

/** Return the text of the action before a parting, from its last line break on. */
function contextOf(strand: Strand, parting: Parting): string {
  let text = "";
  for (let unit = parting.unit - 1; unit >= 0 && text.length < CONTEXT_CHARS; unit--) {
    text = (unitText(strand, { turn: parting.turn, unit }) ?? "") + text;
  }
  return (text.split("\n").at(-1) ?? "").slice(-CONTEXT_CHARS);
}
