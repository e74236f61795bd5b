import type { VNode } from "preact";
import type { RunStore } from "../data/store";
import type { Estimate } from "../data/types";
import { count, fixed, number, percent, plural } from "../lib/format";
import type { Sorted } from "../lib/groups";
import { mean } from "../lib/stats";
import { links } from "../lib/router";
import { Tile } from "../ui/bits";

/** What an estimate is over, if that is not all tasks, and its interval. */
function told(estimate: Estimate, all?: number): string {
  const { ci95_low: low, ci95_high: high, num_tasks: tasks } = estimate;
  const over = tasks === all ? [] : [`over ${plural(tasks, "task")}`];
  if (typeof low === "number" && typeof high === "number") over.push(`95 % ${fixed(low)} to ${fixed(high)}`);
  return over.join(", ");
}

const total = (values: Float64Array): number => values.reduce((sum, each) => sum + each, 0);
const greatest = (values: Float64Array): number => values.reduce((most, each) => Math.max(most, each), Number.NEGATIVE_INFINITY);

export function OverviewTiles({ store, sorted }: { store: RunStore; sorted: Sorted }): VNode {
  const metrics = store.meta?.metrics ?? null;
  const rows = store.index.rows();
  const rewards = store.index.numbers("reward");
  const turns = store.index.numbers("turns");
  const tokens = store.index.numbers("action_tokens");
  const flat = sorted.numGroups - sorted.differ.length;
  const hasSiblings = rows.length > sorted.numGroups;
  const isPart = store.meta?.kind === "train" || store.meta?.kind === "eval";
  const all = isPart ? `kept of the ${store.meta?.kind === "train" ? "training" : "evaluations"}` : plural(sorted.numGroups, "task");
  const of = (name: string): string => (isPart ? `${name}, kept episodes` : name);
  const noGradient = store.meta?.kind !== "eval" && sorted.numGroups ? `no gradient from ${percent(flat / sorted.numGroups)}` : "";
  return (
    <div class="tiles">
      <Tile value={count(rows.length)} name="episodes" note={store.complete.has("index") ? all : "reading\u2026"} />
      <Tile
        value={fixed(metrics?.reward?.mean ?? mean(rewards), 3)}
        name={`${of("mean reward")}${metrics?.num_no_reward ? ", errors left out" : ""}`}
        note={metrics?.reward ? told(metrics.reward) : "over episodes"}
      />
      {passTiles(store)}
      {hasSiblings && (
        <Tile
          value={`${count(flat)} of ${count(sorted.numGroups)}`}
          name={of("groups without spread")}
          note={noGradient}
        />
      )}
      <Tile value={number(mean(turns), 2)} name={of("turns")} note={turns.length ? `at most ${count(greatest(turns))}` : ""} />
      {greatest(tokens) > 0 && <Tile value={number(mean(tokens), 0)} name={of("sampled tokens")} note={`at most ${count(greatest(tokens))}`} />}
      <ErrorTile store={store} />
    </div>
  );
}

function passTiles(store: RunStore): VNode[] {
  const all = Object.entries(store.meta?.metrics?.pass_at_k ?? {}).sort((a, b) => Number(a[0]) - Number(b[0]));
  const shown = all.length > 2 ? [all[0], all[all.length - 1]] : all;
  return shown.flatMap((entry) =>
    entry ? [<Tile key={entry[0]} value={fixed(entry[1].mean, 3)} name={`pass@${entry[0]}`} note={told(entry[1], store.meta?.metrics?.num_tasks)} />] : [],
  );
}

/** What ran again: the column of the index, that of the filter, and its name. */
const RETRIES = [
  ["attempt", "attempt", "retry", "retries"],
  ["step_retries", "num_step_retries", "step retry", "step retries"],
  ["request_retries", "turn.num_request_retries", "request retry", "request retries"],
  ["failovers", "turn.num_failovers", "failover", "failovers"],
] as const;

function ErrorTile({ store }: { store: RunStore }): VNode {
  const { index } = store;
  const error = index.reader("error");
  const failed = error ? index.rows().filter((row) => error(row) !== null).length : 0;
  const again = RETRIES.map(([from, ...names]) => [total(index.numbers(from)), ...names] as const).filter(([num]) => num > 0);
  const note = again.length
    ? again.map(([num, column, one, many], place) => (
        <>
          {place > 0 && ", "}
          <a href={links.episodes(store.run, { q: `${column}>0` })}>{plural(num, one, many)}</a>
        </>
      ))
    : "no retries";
  const value = failed ? <a href={links.episodes(store.run, { q: "-error_kind=none" })}>{count(failed)}</a> : "0";
  return <Tile value={value} name={failed === 1 ? "error" : "errors"} note={note} tone={failed ? "bad" : ""} />;
}
