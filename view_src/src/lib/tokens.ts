// The tokens of an episode, a segment at a time, with what the record and the learner say about each.
import type { TextTable } from "../data/store";
import type { Episode, Span, SpanKind } from "../data/types";

export interface Segment {
  index: number;
  ids: number[];
  spans: Span[];
  kinds: Uint8Array;
  /** 0 for tokens of the template. */
  content: Uint8Array;
  turns: Int32Array;
  /** NaN where there is none. */
  logprobs: Float64Array;
  versions: Int32Array;
  advantages: Float64Array;
  learned: Float64Array;
  /** 1 for tokens that a constraint forced: no loss counts them. */
  forced: Uint8Array;
  text(token: number): string;
  isSpecial(token: number): boolean;
}

export const KINDS: SpanKind[] = ["prompt", "action", "close", "feedback"];
export const ACTION = 1;

export interface EpisodeModel {
  segments: Segment[];
  /** Advantage of each turn as trained, if it is known. */
  turnAdvantages: (number | null)[];
  hasLearner: boolean;
  hasAdvantages: boolean;
  numTokens: number;
}

function asLogprob(value: number | string | null | undefined): number {
  if (value === "inf") return Number.POSITIVE_INFINITY;
  if (value === "-inf") return Number.NEGATIVE_INFINITY;
  return typeof value === "number" ? value : Number.NaN;
}

/** Return the model of an episode; `turnAdvantages` are what steps.jsonl says, for lack of the learner's own. */
export function episodeModel(episode: Episode, table: TextTable, turnAdvantages: (number | null)[] = []): EpisodeModel {
  const { record, view } = episode;
  let before = 0;
  const segments = record.segments.map((segment, index) => {
    const spans = view.segments[index]?.spans ?? [];
    const made = bareSegment(segment.token_ids, spans, index);
    const own = new Map(view.segments[index]?.texts ?? []);
    made.text = (token) => {
      const id = made.ids[token] ?? -1;
      return own.get(token) ?? table.of(id) ?? `\u27e8${id}\u27e9`;
    };
    made.isSpecial = (token) => table.isSpecial(made.ids[token] ?? -1);
    const places = segment.action_spans.flatMap(([start, end]) => range(start, end));
    const versions = segment.policy_versions.flatMap(([version, count]) => Array<number>(count).fill(version));
    places.forEach((token, order) => {
      const turn = made.turns[token] ?? -1;
      made.logprobs[token] = asLogprob(segment.logprobs[order]);
      made.versions[token] = versions[order] ?? -1;
      made.learned[token] = view.learned?.logprobs?.[before + order] ?? Number.NaN;
      const noted = view.learned?.advantages?.[before + order];
      made.advantages[token] = noted ?? turnAdvantages[turn] ?? Number.NaN;
    });
    before += places.length;
    for (const turn of record.turns) {
      if (turn.segment === index) for (const at of turn.forced ?? []) made.forced[turn.start + at] = 1;
    }
    return made;
  });
  const perTurn = record.turns.map((turn, k) => {
    const own = segments[turn.segment];
    const values = own ? range(turn.start, turn.end).map((t) => own.advantages[t] ?? Number.NaN) : [];
    const known = values.filter((value) => !Number.isNaN(value));
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : (turnAdvantages[k] ?? null);
  });
  return {
    segments,
    turnAdvantages: perTurn,
    hasLearner: Boolean(view.learned?.logprobs),
    hasAdvantages: perTurn.some((value) => value !== null),
    numTokens: segments.reduce((sum, segment) => sum + segment.ids.length, 0),
  };
}

function range(start: number, end: number): number[] {
  return Array.from({ length: Math.max(0, end - start) }, (_, k) => start + k);
}

function bareSegment(ids: number[], spans: Span[], index: number): Segment {
  const size = ids.length;
  const segment: Segment = {
    index, ids, spans,
    kinds: new Uint8Array(size),
    content: new Uint8Array(size),
    turns: new Int32Array(size).fill(-1),
    logprobs: new Float64Array(size).fill(Number.NaN),
    versions: new Int32Array(size).fill(-1),
    advantages: new Float64Array(size).fill(Number.NaN),
    learned: new Float64Array(size).fill(Number.NaN),
    forced: new Uint8Array(size),
    text: () => "",
    isSpecial: () => false,
  };
  for (const [start, end, kind, turn, content] of spans) {
    segment.kinds.fill(KINDS.indexOf(kind), start, end);
    segment.turns.fill(turn, start, end);
    if (kind === "action" || kind === "close") segment.content.fill(1, start, end);
    for (const [from, to] of content) segment.content.fill(1, from, to);
  }
  return segment;
}

export interface Improbable {
  segment: number;
  token: number;
  turn: number;
  logprob: number;
}

/** Return the least probable action tokens, the least first. */
export function leastProbable(model: EpisodeModel, most = 8): Improbable[] {
  const found: Improbable[] = [];
  for (const segment of model.segments) {
    segment.logprobs.forEach((logprob, token) => {
      if (!Number.isNaN(logprob)) found.push({ segment: segment.index, token, turn: segment.turns[token] ?? -1, logprob });
    });
  }
  return found.sort((a, b) => a.logprob - b.logprob).slice(0, most);
}

export type ColorBy = "logprob" | "advantage" | "version" | "mask" | "ratio" | "none";

export const COLORS: [ColorBy, string][] = [
  ["logprob", "log-prob"], ["advantage", "advantage"], ["version", "policy version"], ["mask", "trained on"],
  ["ratio", "learner \u2212 engine"], ["none", "nothing"],
];

/** Return the step, 0 to 4, of a log-probability: at \u22120.1, \u22121, \u22123 and \u22126. */
export function logprobStep(logprob: number): number {
  if (logprob >= -0.1) return 0;
  if (logprob >= -1) return 1;
  if (logprob >= -3) return 2;
  return logprob >= -6 ? 3 : 4;
}

function divergingStep(value: number, unit: number): string {
  const size = Math.abs(value) / unit;
  const step = size < 0.05 ? 0 : size < 0.5 ? 1 : size < 1.5 ? 2 : 3;
  return step === 0 ? "d0" : `${value > 0 ? "pos" : "neg"}${step}`;
}

export function isTrained(segment: Segment, token: number): boolean {
  return segment.kinds[token] === ACTION && segment.forced[token] === 0;
}

/** Return the class of a token's color. */
export function colorClass(segment: Segment, token: number, by: ColorBy, newest: number): string {
  const isAction = segment.kinds[token] === ACTION;
  if (by === "mask") return isTrained(segment, token) ? "trained" : "untrained";
  if (!isAction || by === "none") return "";
  const logprob = segment.logprobs[token] ?? Number.NaN;
  if (by === "logprob") return Number.isNaN(logprob) ? "missing" : `p${logprobStep(logprob)}`;
  if (by === "version") return `v${Math.min(4, Math.max(0, newest - (segment.versions[token] ?? newest)))}`;
  if (by === "ratio") {
    const difference = (segment.learned[token] ?? Number.NaN) - logprob;
    return Number.isNaN(difference) ? "missing" : divergingStep(difference, 0.2);
  }
  const advantage = segment.advantages[token] ?? Number.NaN;
  return Number.isNaN(advantage) ? "missing" : divergingStep(advantage, 1);
}

export function newestVersion(model: EpisodeModel): number {
  let newest = 0;
  for (const segment of model.segments) for (const version of segment.versions) if (version > newest) newest = version;
  return newest;
}
