// The language in which episodes are chosen: the same as agentenv/runs/records/filters.py. Both are tested by
// tests/runs/filters.json.
import { near } from "./near";

export interface Term {
  negated: boolean;
  /** Empty for text. */
  column: string;
  operator: string;
  value: string;
}

/** All of the outer, one of the inner must hold. */
export type Filter = Term[][];

export class FilterError extends Error {}

export const EPISODE_COLUMNS = [
  "episode_id", "task_id", "group_id", "env", "prompt", "label", "reward", "score", "stop_reason", "num_turns",
  "num_tokens", "num_action_tokens", "policy_version", "cost_usd", "attempt", "num_step_retries", "retried_errors",
  "seed", "generate_s", "step_s", "last_action", "error", "error_kind", "error_place",
];
const TURN_COLUMNS = [
  "episode_id", "task_id", "turn_index", "action", "observation", "reward", "score", "finish_reason", "model",
  "num_action_tokens", "policy_version", "generate_s", "step_s", "num_retries", "num_request_retries", "num_failovers",
];
const TEXT_COLUMNS = new Set([
  "episode_id", "task_id", "group_id", "env", "prompt", "label", "stop_reason", "retried_errors", "last_action", "error",
  "error_kind", "error_place", "action", "observation", "finish_reason",
  "model",
]);
/** All values of columns that have few. */
const VALUES = new Map([
  ["stop_reason", [
    "terminated", "truncated_by_env", "max_turns", "max_length", "step_timeout", "episode_timeout", "aborted", "error", "none",
  ]],
  ["error_kind", ["infra", "env", "contract", "data", "none"]],
]);
const GROUP_COLUMNS = ["group.reward", "group.spread"];
/** Numbers that only the index has. */
export const INDEX_COLUMNS = ["segments", "mean_logprob", "min_logprob", "repeated_share"];
/** Columns of the list that steps.jsonl has. */
export const STEP_COLUMNS = ["step", "A", "adv"];
const ALIASES = new Map([
  ["act", "num_action_tokens"], ["episode", "episode_id"], ["finish", "finish_reason"], ["group", "group_id"],
  ["step_retries", "num_step_retries"], ["stop", "stop_reason"], ["task", "task_id"], ["tokens", "num_tokens"], ["turns", "num_turns"],
  ["version", "policy_version"],
]);
export const COLUMN_NAMES = [
  ...EPISODE_COLUMNS, ...INDEX_COLUMNS, ...ALIASES.keys(), "info.KEY", ...GROUP_COLUMNS, ...TURN_COLUMNS.map((each) => `turn.${each}`),
];

const QUOTED = '"((?:[^"\\\\]|\\\\.)*)"';
const TERM = new RegExp(
  `\\s*(-?)(?:(i:)?${QUOTED}|([A-Za-z_][^\\s"=!<>:]*)(!=|<=|>=|[=<>:])(?:${QUOTED}|([^\\s"]+)))(?=\\s|$)`,
  "sy",
);
const OR = /\s+or(?=\s)/y;
const FLOAT = /^\s*[+-]?(?:\d+(?:_\d+)*\.?(?:\d+(?:_\d+)*)?|\.\d+(?:_\d+)*)(?:[eE][+-]?\d+)?\s*$/;
const NOT_FINITE = /^\s*[+-]?(?:inf(?:inity)?|nan)\s*$/i;

/** Return the number that a text is, or null. */
export function asNumber(text: string): number | null {
  if (FLOAT.test(text)) return Number(text.replace(/_/g, ""));
  if (!NOT_FINITE.test(text)) return null;
  if (/nan/i.test(text)) return Number.NaN;
  return text.trim().startsWith("-") ? Number.NEGATIVE_INFINITY : Number.POSITIVE_INFINITY;
}

/** Return the filter that a text describes; an empty text is the filter that keeps all. Raise FilterError if none. */
export function parseFilter(text: string): Filter {
  const terms: Filter = [];
  let at = 0;
  let joins = false;
  while (text.slice(at).trim()) {
    OR.lastIndex = at;
    if (terms.length && !joins && OR.test(text)) {
      at = OR.lastIndex;
      joins = true;
      continue;
    }
    TERM.lastIndex = at;
    const match = TERM.exec(text);
    if (!match) {
      const rest = text.slice(at).trim();
      const [episode] = /^[^\s"=]+\/\d+(?=\s|$)/.exec(rest) ?? [];
      const advice = episode ? `Write episode=${episode}.` : "Quote values that contain spaces.";
      throw new FilterError(
        `expected a term such as reward<1, -stop=terminated or "text", got '${rest.slice(0, 60)}'. ${advice}`,
      );
    }
    const one = term(match);
    if (joins) terms[terms.length - 1]?.push(one);
    else terms.push([one]);
    at = TERM.lastIndex;
    joins = false;
  }
  if (joins) throw new FilterError("expected a term after `or`, got none. Add one.");
  return terms;
}

function term(match: RegExpExecArray): Term {
  const [, minus, fold, quoted, column, operator = "", quotedValue, bare = ""] = match;
  if (column === undefined) {
    const text = unquoted(quoted ?? "");
    return { negated: minus === "-", column: "", operator: fold ? "i:" : '"', value: fold ? text.toLowerCase() : text };
  }
  const value = quotedValue === undefined ? bare : unquoted(quotedValue);
  const orders = ["<", "<=", ">", ">="].includes(operator);
  if (orders && asNumber(value) === null) {
    throw new FilterError(`expected a number after ${column}${operator}, got '${value}'. Change it.`);
  }
  const name = fullName(column);
  if (orders && TEXT_COLUMNS.has(name.replace(/^turn\./, ""))) {
    throw new FilterError(
      `expected a column of numbers before ${operator}, got '${column}', which has text. ` +
        `Compare it with = or :, or write ${column}!=none.`,
    );
  }
  checkValue(VALUES.get(name) ?? [], column, operator, value);
  return { negated: minus === "-", column: name, operator, value };
}

/** Raise FilterError for a value or a pattern that no episode can have. */
function checkValue(values: string[], column: string, operator: string, value: string): void {
  const fits = values.some((each) => pattern(value).test(each));
  if (!values.length || values.includes(value) || (fits && operator === ":")) return;
  const [closest] = near(value, values, 1);
  const advice = closest ? `Did you mean '${closest}'?` : `There are ${values.join(", ")}.`;
  throw new FilterError(`expected a value of ${column}, got '${value}'. ${fits ? `Write ${column}:${value}.` : advice}`);
}

const unquoted = (text: string): string => text.replace(/\\(.)/gs, "$1");

function fullName(name: string): string {
  const isTurn = name.startsWith("turn.");
  const known = isTurn ? TURN_COLUMNS : EPISODE_COLUMNS;
  const bare = isTurn ? name.slice("turn.".length) : name;
  const plain = ALIASES.get(bare) ?? bare;
  if (known.includes(plain) || plain.startsWith("info.") || [...GROUP_COLUMNS, ...INDEX_COLUMNS].includes(name)) {
    return (isTurn ? "turn." : "") + plain;
  }
  if (STEP_COLUMNS.includes(name)) throw new FilterError(`expected a column of the record, got '${name}', which the train steps have. Sort by it.`);
  const [closest] = TURN_COLUMNS.includes(plain) ? [`turn.${name}`] : near(name, COLUMN_NAMES, 1);
  const start = closest ?? COLUMN_NAMES.find((each) => each === name.slice(0, 3)); // env
  const advice = start ? ` Did you mean '${start}'?` : ` Use one of ${EPISODE_COLUMNS.join(", ")}, info.KEY, turn.COLUMN.`;
  throw new FilterError(`expected a column, got '${name}'.${advice}`);
}

/** Return the columns that a filter reads. */
export function columnsOf(filter: Filter): Set<string> {
  return new Set(filter.flat().flatMap((each) => (each.column ? [each.column] : [])));
}

/** Return whether cells match a term, apart from its negation; what the term says is read once. */
export function matcher(one: Term): (cell: unknown) => boolean {
  const wanted = asNumber(one.value) ?? Number.NaN;
  const fits = one.operator === ":" ? pattern(one.value) : null;
  const isSame = (cell: unknown): boolean => {
    if (cell === null || cell === undefined) return one.value === "none";
    return typeof cell === "number" ? wanted === cell : one.value === asText(cell);
  };
  switch (one.operator) {
    case "=": return isSame;
    case "!=": return (cell) => !isSame(cell);
    case ":": return (cell) => cell !== null && cell !== undefined && fits !== null && fits.test(asText(cell));
    case "<": return (cell) => typeof cell === "number" && cell < wanted;
    case "<=": return (cell) => typeof cell === "number" && cell <= wanted;
    case ">": return (cell) => typeof cell === "number" && cell > wanted;
    default: return (cell) => typeof cell === "number" && cell >= wanted;
  }
}

function asText(cell: unknown): string {
  if (typeof cell === "boolean") return cell ? "True" : "False";
  return typeof cell === "object" ? JSON.stringify(cell) : String(cell);
}

/** Return the expression of a pattern with the wildcards *, ? and [set]. */
function pattern(text: string): RegExp {
  const source = text.replace(/\[(!?)([^\]]+)\]|[\s\S]/g, (found, not: string, set: string | undefined) => {
    if (set !== undefined) return `[${not ? "^" : ""}${set.replace(/[\\^[\]]/g, "\\$&")}]`;
    if (found === "*") return ".*";
    return found === "?" ? "." : found.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");
  });
  return new RegExp(`^(?:${source})$`, "su");
}
