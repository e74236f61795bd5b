import type { VNode } from "preact";
import type { RunStore, Stores } from "../data/store";
import type { Group, IndexTable } from "../data/table";
import type { RunKind, Runs } from "../data/types";
import type { Comparison, SideFacts } from "../lib/comparison";
import { fixed, plural, signed } from "../lib/format";
import { type Route, links, setQuery, wellFormed } from "../lib/router";
import { Empty, Text } from "../ui/bits";
import { useStore, useStores } from "../ui/hooks";
import { Siblings, useSiblings } from "./task";

interface PairProps {
  stores: Stores;
  route: Route;
  runs: Runs;
  comparison: Comparison;
  task: string;
}

/** The episodes of a task that are compared, of both runs. */
export function ComparePair({ stores, route, runs, comparison, task }: PairProps): VNode {
  const change = comparison.tasks.find((each) => each.task_id === task);
  const sides = [
    keptOf("A", route.run, comparison.a, runs, change?.num_a),
    keptOf("B", route.other, comparison.b, runs, change?.num_b),
  ];
  return (
    <>
      <div class="headline">
        <button type="button" class="link-button" onClick={() => setQuery("task", null)}>
          ← all tasks
        </button>
        <h1 class="mono">
          <Text value={task} line />
        </h1>
        {change && (
          <span class="fact">
            {fixed(change.mean_a)} → {fixed(change.mean_b)}, <strong>{signed(change.difference)}</strong>
          </span>
        )}
      </div>
      {sides.map((side) => (
        <Side key={side.run} store={stores.open(side.run, sides.map(({ run }) => run), ["index", "steps"])} {...{ task, ...side }} />
      ))}
    </>
  );
}

/** Why a training lacks episodes of a task, and how to get them. */
export function KeptFew(): VNode {
  return (
    <>
      A training keeps as many as <code>--save_samples</code> says. To read episodes of any task, run both models on this data and
      compare these runs: <code>agentenv run --model TRAINING/model</code>, with the training's <code>--eval_temperature</code> as{" "}
      <code>--temperature</code>, its <code>--top_p</code> and its <code>--max_tokens</code>.
    </>
  );
}

/** Return a function that is true for tasks of which both sides kept episodes, to be opened beside each other. */
export function useKept({ stores, route, runs, comparison }: Omit<PairProps, "task">): (task: string) => boolean {
  const { a, b } = comparison;
  const sides = [keptOf("A", route.run, a, runs), keptOf("B", route.other, b, runs)].filter(({ step }) => step !== null);
  const opened = sides.map((side) => stores.open(side.run, sides.map(({ run }) => run), ["index"]));
  useStores(opened);
  return (task) => sides.every((side, number) => groupsOf((opened[number] as RunStore).index, task, side).length > 0);
}

interface Kept {
  name: string;
  run: number;
  kind: RunKind | undefined;
  /** Of the evaluation that is compared; null without one. */
  step: number | null;
  /** Episodes that are compared. */
  num: number;
}

/** Return where the episodes of a side are kept: those of a training's evaluations are in a run of their own. */
function keptOf(letter: string, number: number, { step }: SideFacts, { runs }: Runs, num = 0): Kept {
  const run = runs.find((each) => each.run === number);
  const own = step === null ? run : (runs.find((each) => each.kind === "eval" && each.name === `${run?.name}/eval`) ?? run);
  const name = `${letter}: ${run?.name ?? ""}${step === null ? "" : `, evaluation at step ${step}`}`;
  return { name, run: own?.run ?? number, kind: own?.kind, step, num };
}

function groupsOf(index: IndexTable, task: string, { kind, step }: Pick<Kept, "kind" | "step">): Group[] {
  // A training without evaluations is compared over all passes over its data.
  const isPass = ({ id }: Group): boolean => wellFormed(id).replace(/(?<=.)@\d+$/, "") === task;
  if (step === null && kind === "train") return [...index.groups().values()].filter(isPass);
  // Beside an evaluation of several sets, the ids of one of a single set begin with the set's name.
  const bare = task.slice(task.indexOf("/") + 1);
  const ids = step === null ? [task] : kind === "eval" ? [`${task}@${step}`, `${bare}@${step}`] : [];
  return ids.flatMap((id) => index.group(id) ?? []).slice(0, 1);
}

function Side({ store, task, ...side }: Kept & { store: RunStore; task: string }): VNode {
  useStore(store);
  const groups = groupsOf(store.index, task, side);
  const rows = groups.flatMap((each) => each.rows);
  const { siblings, problem } = useSiblings(store, rows);
  const lacks = side.step === null ? "This run kept no episode of the task" : "This evaluation kept no episode of the task";
  return (
    <section class="pair-side">
      <h2 class="pair-name">
        <a href={links.task(store.run, groups[0]?.id ?? task)}>
          <Text value={side.name} line />
        </a>
      </h2>
      {problem !== null && <Empty title={problem} />}
      {!rows.length && store.complete.has("index") && <Empty title={lacks}>{side.kind !== "run" && <KeptFew />}</Empty>}
      {siblings && rows.length < side.num && <p class="note">{plural(rows.length, "episode")} of the {side.num} that are compared: the others were not kept.</p>}
      {siblings && <Siblings store={store} siblings={siblings} />}
    </section>
  );
}
