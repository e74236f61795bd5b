import type { VNode } from "preact";
import type { RunStore, Stores } from "../data/store";
import type { Runs } from "../data/types";
import type { Comparison } from "../lib/comparison";
import { fixed, signed } from "../lib/format";
import { type Route, links, setQuery } from "../lib/router";
import { Empty, Text } from "../ui/bits";
import { useStore } from "../ui/hooks";
import { Siblings, useSiblings } from "./task";

interface PairProps {
  stores: Stores;
  route: Route;
  runs: Runs;
  comparison: Comparison;
  task: string;
}

/** Both groups of a task. */
export function ComparePair({ stores, route, runs, comparison, task }: PairProps): VNode {
  const change = comparison.tasks.find((each) => each.task_id === task);
  const sides = [route.run, route.other].map((run) => stores.open(run, [route.run, route.other], ["index", "steps"]));
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
      {sides.map((store, k) => (
        <Side key={store.run} store={store} task={task} name={`${k ? "B" : "A"}: ${runs.runs.find((each) => each.run === store.run)?.name ?? ""}`} />
      ))}
    </>
  );
}

function Side({ store, task, name }: { store: RunStore; task: string; name: string }): VNode {
  useStore(store);
  const group = store.index.group(task);
  const { siblings, problem } = useSiblings(store, group?.rows ?? []);
  return (
    <section class="pair-side">
      <h2 class="pair-name">
        <a href={links.task(store.run, task)}>
          <Text value={name} line />
        </a>
      </h2>
      {problem !== null && <Empty title={problem} />}
      {!group && store.complete.has("index") && <Empty title="This run kept no episode of the task" />}
      {siblings && <Siblings store={store} siblings={siblings} />}
    </section>
  );
}
