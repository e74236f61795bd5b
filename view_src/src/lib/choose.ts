// Applies a filter to the rows of a run. Columns of the index are at hand; others are read from heads or episodes.
import { type RunStore, isEpisode } from "../data/store";
import type { Episode, TurnRecord } from "../data/types";
import { type Filter, FilterError, INDEX_COLUMNS, type Term, columnsOf, matcher } from "./filter";
import { promptTexts } from "./messages";
import { near } from "./near";
import { mean, spread } from "./stats";

/** Columns of the index for columns of the filter language. */
const INDEX_NAMES = new Map([
  ["episode_id", "episode_id"], ["task_id", "group_id"], ["group_id", "group_id"], ["reward", "reward"],
  ["score", "score"], ["stop_reason", "stop_reason"], ["num_turns", "turns"],
  ["num_tokens", "tokens"], ["num_action_tokens", "action_tokens"], ["policy_version", "version_max"], ["attempt", "attempt"], ["generate_s", "generate_s"], ["step_s", "step_s"],
  ["error_kind", "error"], ["cost_usd", "cost_usd"], ["error", "error_text"], ["error_place", "error_text"],
  ["env", "env"], ["num_step_retries", "step_retries"], ["retried_errors", "retried"],
  ...INDEX_COLUMNS.map((name): [string, string] => [name, name]),
]);

export interface Choice {
  rows: number[];
  /** Milliseconds that the filter took over data at hand. */
  ms: number;
}

type Test = (row: number) => boolean;
/** Values of a row: one, or those of its turns. */
type Cells = { one: (row: number) => unknown } | { many: (row: number) => unknown[] };

/** Return the rows that a filter keeps; `told` hears what is being read. Raise if the host cannot answer. */
export async function choose(
  store: RunStore,
  filter: Filter,
  signal: AbortSignal,
  told: (what: string) => void,
): Promise<Choice> {
  const all = store.index.rows();
  const episodes = await episodesFor(store, filter, all, told);
  const tests: Test[] = [];
  for (const any of filter) {
    const choices: Test[] = [];
    for (const term of any) choices.push(testOf(term, await cellsOf(store, term, episodes, signal, told)));
    const [first] = choices;
    tests.push(first && choices.length === 1 ? first : (row) => choices.some((test) => test(row)));
  }
  const began = performance.now();
  let rows = all;
  for (const test of tests) rows = rows.filter(test);
  return { rows, ms: performance.now() - began };
}

function testOf(term: Term, cells: Cells): Test {
  const holds = term.column ? matcher(term) : (cell: unknown): boolean => cell === true;
  if ("many" in cells) return (row) => term.negated !== cells.many(row).some(holds);
  return (row) => term.negated !== holds(cells.one(row));
}

function isAtHand(store: RunStore, column: string): boolean {
  if (column.startsWith("group.")) return true;
  if (column === "turn.reward") return store.index.has("rewards");
  if (column.startsWith("info.")) return store.index.infoKeys().includes(column.slice("info.".length));
  return store.index.has(INDEX_NAMES.get(column) ?? "");
}

async function episodesFor(
  store: RunStore,
  filter: Filter,
  rows: number[],
  told: (what: string) => void,
): Promise<Map<number, Episode>> {
  const episodes = new Map<number, Episode>();
  if ([...columnsOf(filter)].every((column) => isAtHand(store, column))) return episodes;
  const held = rows.filter((row) => store.source.has(store.run, store.index.at(row)));
  for (let start = 0; start < held.length; start += 64) {
    const part = held.slice(start, start + 64);
    told(`reading ${start + part.length} of ${held.length} episodes`);
    const found = await store.readEpisodes(part);
    part.forEach((row, position) => {
      const episode = found[position];
      if (episode && isEpisode(episode)) episodes.set(row, episode);
    });
  }
  return episodes;
}

async function cellsOf(
  store: RunStore,
  term: Term,
  episodes: Map<number, Episode>,
  signal: AbortSignal,
  told: (what: string) => void,
): Promise<Cells> {
  const { index } = store;
  if (!term.column) return textCells(store, term, signal, told);
  if (term.column.startsWith("group.")) return groupCells(store, term.column);
  const rewards = term.column === "turn.reward" ? index.reader("rewards") : null;
  if (rewards) return { many: (row) => (rewards(row) as unknown[] | null) ?? [] };
  if (term.column.startsWith("info.")) checkKey(term.column, index.infoKeys(), episodes);
  if (term.column.startsWith("info.") && isAtHand(store, term.column)) {
    const key = term.column.slice("info.".length);
    return { one: (row) => index.info(key, row) };
  }
  const name = INDEX_NAMES.get(term.column) ?? "";
  const value = index.reader(name);
  if (value && name === "error_text") return { one: (row) => errorCell(value(row), term.column) };
  if (value && term.column === "task_id" && store.meta?.kind === "eval") {
    return { one: (row) => String(value(row)).replace(/@\d+$/, "") }; // the step of the evaluation is the group's
  }
  if (value && name === "env") return { one: (row) => value(row) || null };
  if (value && name === "retried") return { one: (row) => countsCell(value(row)) };
  if (value) return { one: value };
  return {
    many: (row) => {
      const episode = episodes.get(row);
      return episode ? episodeCells(episode, term.column) : [];
    },
  };
}

/** Raise FilterError if no episode has the key, though some have others. */
function checkKey(column: string, atHand: string[], episodes: Map<number, Episode>): void {
  const keys = new Set(atHand);
  for (const { record } of episodes.values()) {
    for (const turn of record.turns) for (const key of Object.keys(turn.result?.info ?? {})) keys.add(key);
  }
  if (!keys.size || keys.has(column.slice("info.".length))) return;
  const names = [...keys].map((key) => `info.${key}`);
  const [closest] = near(column, names, 1);
  const advice = closest ? ` Did you mean '${closest}'?` : ` Use one of ${names.slice(0, 10).join(", ")}.`;
  throw new FilterError(`expected a key of info that an episode has, got '${column}'.${advice}`);
}

/** Return the error, or its place, of the index's list of class, message and place. */
function errorCell(value: unknown, column: string): unknown {
  if (!Array.isArray(value) || !value.length) return null;
  const [kind, message, place] = value as unknown[];
  return column === "error" ? `${String(kind)}: ${String(message)}` : (place ?? null);
}

/** Return counts by name as text, or null. */
function countsCell(value: unknown): string | null {
  return Object.entries(value ?? {}).map(([name, num]) => `${name} ${String(num)}`).join(", ") || null;
}

async function textCells(store: RunStore, term: Term, signal: AbortSignal, told: (what: string) => void): Promise<Cells> {
  const hits = new Set<number>();
  told("searching the texts");
  await store.source.grep(
    store.run,
    term.value,
    term.operator === "i:",
    (at) => {
      for (const [offset] of at) hits.add(offset);
      told(`searching the texts, ${hits.size} found`);
    },
    signal,
  );
  return { one: (row) => hits.has(store.index.number("offset", row)) };
}

function groupCells(store: RunStore, column: string): Cells {
  const fact = new Float64Array(store.index.size).fill(Number.NaN);
  for (const group of store.index.groups().values()) {
    const rewards = group.rows.map((row) => store.index.number("reward", row)).filter((each) => !Number.isNaN(each));
    const value = rewards.length ? (column === "group.reward" ? mean : spread)(rewards) : Number.NaN;
    for (const row of group.rows) fact[row] = value;
  }
  return {
    one: (row) => {
      const value = fact[row] ?? Number.NaN;
      return Number.isNaN(value) ? null : value;
    },
  };
}

/** Return the cells of an episode for a column that the index does not have. */
function episodeCells(episode: Episode, column: string): unknown[] {
  const { record } = episode;
  if (column.startsWith("turn.")) {
    return record.turns.map((turn, index) => turnCell(episode, turn, index, column.slice("turn.".length)));
  }
  if (column.startsWith("info.")) {
    const key = column.slice("info.".length);
    const told = record.turns.map((turn) => infoOf(turn, key)).filter((value) => value !== undefined);
    return [told.at(-1) ?? null];
  }
  const cells = new Map<string, unknown>([
    ["prompt", promptTexts(record).join("\n\n")],
    ["label", record.task?.label == null ? null : String(record.task.label)],
    ["seed", record.seed ?? null],
    ["last_action", record.turns.at(-1)?.action ?? null],
  ]);
  return [cells.get(column) ?? null];
}

function infoOf(turn: TurnRecord, key: string): unknown {
  return new Map(Object.entries(turn.result?.info ?? {})).get(key);
}

function turnCell({ record, view }: Episode, turn: TurnRecord, index: number, column: string): unknown {
  if (column.startsWith("info.")) return infoOf(turn, column.slice("info.".length)) ?? null;
  const observation = turn.result?.observation ?? "";
  switch (column) {
    case "episode_id": return record.episode_id;
    case "task_id": return record.task?.task_id ?? record.group_id;
    case "turn_index": return index;
    case "action": return turn.action ?? "";
    case "observation": return typeof observation === "string" ? observation : JSON.stringify(observation);
    case "reward": return turn.result?.reward ?? null;
    case "score": return turn.result?.score ?? null;
    case "finish_reason": return turn.finish_reason ?? null;
    case "model": return turn.answer?.model || null;
    case "num_action_tokens":
    case "policy_version": return view.turns[index]?.[column] ?? null;
    case "generate_s": return turn.generate_s ?? null;
    case "step_s": return turn.step_s ?? null;
    case "num_retries":
    case "num_request_retries":
    case "num_failovers": return turn[column] ?? 0;
    default: return null;
  }
}
