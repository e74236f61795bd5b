import type { VNode } from "preact";
import type { RunStore } from "../data/store";
import { fixed, plural } from "../lib/format";
import { links } from "../lib/router";
import { mean } from "../lib/stats";
import { taskOf, trainedById } from "../lib/trained";
import { Card, Cells, Text } from "../ui/bits";

/** The groups of the same task at each pass over the data. */
export function OverTraining({ store, id }: { store: RunStore; id: string }): VNode | null {
  const task = taskOf(id);
  const laps = [...store.index.groups().values()].filter((group) => taskOf(group.id) === task);
  if (laps.length < 2) return null;
  const trained = trainedById(store);
  const isEval = store.meta?.kind === "eval"; // whose groups are named by the step
  const known = laps.map((group) => {
    const first = store.index.text("episode_id", group.rows[0] ?? -1);
    const rewards = group.rows.map((row) => store.index.number("reward", row)).filter((each) => !Number.isNaN(each));
    const lap = isEval ? group.id.slice(task.length + 1) || "0" : null;
    return { group, step: trained.get(first)?.step ?? lap, mean: mean(rewards) };
  });
  return (
    <Card title="The same task over training" note={plural(laps.length, isEval ? "evaluation" : "pass", isEval ? "evaluations" : "passes")} className="over-training">
      <table class="table">
        <thead>
          <tr>
            <th>group</th>
            <th class="right">step</th>
            <th class="right">mean reward</th>
            <th>siblings</th>
          </tr>
        </thead>
        <tbody>
          {known.map((lap) => (
            <tr key={lap.group.id} class={lap.group.id === id ? "here" : ""}>
              <td>
                <a class="mono" href={links.task(store.run, lap.group.id)} aria-current={lap.group.id === id ? "page" : undefined}>
                  <Text value={lap.group.id} line />
                </a>
              </td>
              <td class="right">{lap.step ?? "\u2014"}</td>
              <td class="right">{fixed(lap.mean)}</td>
              <td>
                <Cells store={store} rows={lap.group.rows} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Card>
  );
}
