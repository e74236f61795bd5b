// Columns of the Episodes table: where their values come from, and how they are written.
import type { RunStore } from "../data/store";
import { count, decimals, fixed, number, signed } from "./format";
import { oneLine } from "./visible";
import { meanAdvantage, trainedById } from "./trained";

export interface TableColumn {
  key: string;
  name: string;
  title: string;
  width: number;
  isNumber: boolean;
  /** Return the value of a row: a number (NaN if none), or text ("" if none). */
  value: (row: number) => number | string;
  text: (row: number) => string;
  /** True if nothing of it is known yet. */
  pending: boolean;
}

interface Plan {
  key: string;
  name: string;
  title: string;
  width: number;
  from: string;
  write?: (value: number) => string;
  /** Left out of a run in which it is 0 or unknown in all episodes. */
  rare?: true;
}

const NUMBERS: Plan[] = [
  { key: "reward", name: "reward", title: "sum of the turns' rewards", width: 84, from: "reward" },
  { key: "score", name: "score", title: "quality, from 0 to 1", width: 64, from: "score" },
  { key: "turns", name: "turns", title: "number of turns", width: 60, from: "turns", write: count },
  { key: "act", name: "tokens", title: "number of sampled tokens", width: 72, from: "action_tokens", write: count },
  {
    key: "mean_logprob", name: "mean lp", title: "mean log-probability of the sampled tokens", width: 76,
    from: "mean_logprob", write: (value) => fixed(value, 2),
  },
  {
    key: "min_logprob", name: "min lp", title: "least log-probability of a sampled token", width: 70,
    from: "min_logprob", write: (value) => fixed(value, 1),
  },
  {
    key: "repeated_share", name: "repeat", title: "share of repeated text", width: 66, from: "repeated_share",
    write: (value) => fixed(value, 2),
  },
  {
    key: "generate_s", name: "engine s", title: "seconds in the engine", width: 76, from: "generate_s",
    write: (value) => fixed(value, 2),
  },
  {
    key: "cost_usd", name: "cost $", title: "dollars that an API model cost", width: 76, from: "cost_usd", rare: true,
    write: (value) => fixed(value, decimals(value, 4)),
  },
  {
    key: "turn.num_request_retries", name: "request retries", title: "requests to a server that were sent again", width: 112,
    from: "request_retries", rare: true, write: count,
  },
];

/** Return the columns that this run has. */
export function tableColumns(store: RunStore): TableColumn[] {
  const { index } = store;
  const text = (key: string, name: string, from: string, width: number, title: string): TableColumn => ({
    key, name, title, width,
    isNumber: false,
    value: (row) => index.text(from, row),
    text: (row) => index.text(from, row),
    pending: index.size > 0 && !index.has(from),
  });
  const shown = NUMBERS.filter(({ rare, from }) => !rare || index.numbers(from).some((value) => value > 0));
  const numbers = shown.map((plan): TableColumn => ({
    ...plan,
    isNumber: true,
    value: (row) => index.number(plan.from, row),
    text: (row) => (plan.write ?? number)(index.number(plan.from, row)),
    pending: index.size > 0 && !index.has(plan.from),
  }));
  const [reward, score, ...rest] = numbers as [TableColumn, TableColumn, ...TableColumn[]];
  return [
    text("episode", "episode", "episode_id", 132, "id of the episode"),
    ...trainingColumns(store),
    reward,
    score,
    text("stop", "stop reason", "stop_reason", 116, "why the episode ended"),
    ...rest,
    ...versionColumn(store),
    ...infoColumns(store),
  ];
}

/** Keys of `info` that have a column; the filter knows all of them. */
const MOST_INFO = 4;
const OF_GRADERS = /^(judge|rm|group)\//;

function infoColumns(store: RunStore): TableColumn[] {
  const { index } = store;
  const isOfGrader = (key: string): number => Number(OF_GRADERS.test(key));
  const keys = index.infoKeys().sort((a, b) => isOfGrader(a) - isOfGrader(b)); // the environment's own come first
  return keys.slice(0, MOST_INFO).map((key) => {
    const value = (row: number): number => {
      const last = index.info(key, row);
      return typeof last === "number" ? last : Number.NaN;
    };
    const name = `info.${oneLine(key)}`;
    return {
      key: `info.${key}`, name, title: `${name}: its number in the last turn that has it`, width: 20 + 7 * Math.min(18, name.length),
      isNumber: true, pending: false, value, text: (row) => number(value(row)),
    };
  });
}

function trainingColumns(store: RunStore): TableColumn[] {
  if (store.steps.size === 0) return [];
  const trained = trainedById(store);
  const of = (row: number) => trained.get(store.index.text("episode_id", row));
  return [
    {
      key: "step", name: "step", title: "train step that learned from it", width: 56, isNumber: true, pending: false,
      value: (row) => of(row)?.step ?? Number.NaN,
      text: (row) => number(of(row)?.step),
    },
    {
      key: "adv", name: "A", title: "advantage, mean over turns, as trained", width: 68, isNumber: true, pending: false,
      value: (row) => meanAdvantage(of(row)),
      text: (row) => signed(meanAdvantage(of(row))),
    },
  ];
}

function versionColumn(store: RunStore): TableColumn[] {
  const { index } = store;
  if (!index.has("version_max") || store.meta?.kind === "run") return [];
  const write = (row: number): string => {
    const [low, high] = [index.number("version_min", row), index.number("version_max", row)];
    return low === high || Number.isNaN(low) ? number(high) : `${low}\u2192${high}`;
  };
  return [
    {
      key: "version", name: "version", title: "policy versions that sampled it", width: 76, isNumber: true,
      pending: false, value: (row) => index.number("version_max", row), text: write,
    },
  ];
}

/** Sort rows by a column, "-" first for descending; equal ones keep their order, those without a value come last. */
export function sortRows(rows: number[], columns: TableColumn[], sort: string): number[] {
  const key = sort.replace(/^-/, "");
  const column = columns.find((each) => each.key === key);
  if (!column) return rows;
  const sign = sort.startsWith("-") ? -1 : 1;
  if (!column.isNumber) {
    const order = new Intl.Collator("en", { numeric: true });
    const texts = rows.map((row) => String(column.value(row)));
    const places = rows.map((_, place) => place);
    places.sort((a, b) => absentLast(texts[a] === "", texts[b] === "") ?? sign * order.compare(texts[a] ?? "", texts[b] ?? ""));
    return places.map((place) => rows[place] ?? -1);
  }
  const values = Float64Array.from(rows, (row) => Number(column.value(row)));
  const places = rows.map((_, place) => place);
  places.sort((a, b) => {
    const [x = Number.NaN, y = Number.NaN] = [values[a], values[b]];
    return absentLast(Number.isNaN(x), Number.isNaN(y)) ?? sign * (x - y);
  });
  return places.map((place) => rows[place] ?? -1);
}

function absentLast(a: boolean, b: boolean): number | null {
  if (!a && !b) return null;
  return a && b ? 0 : a ? 1 : -1;
}

function csvCell(value: number | string): string {
  const text = typeof value === "number" ? (Number.isNaN(value) ? "" : String(value)) : value;
  return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

export function asCsv(rows: number[], columns: TableColumn[]): string {
  const head = columns.map((column) => column.key).join(",");
  return [head, ...rows.map((row) => columns.map((column) => csvCell(column.value(row))).join(","))].join("\n") + "\n";
}
