import type { VNode } from "preact";
import type { Stores } from "../data/store";
import type { Runs } from "../data/types";
import type { Comparison, TaskChange } from "../lib/comparison";
import { fixed, number, signed } from "../lib/format";
import { type Route, links } from "../lib/router";
import { Card, Folded, SignedBar, Text } from "../ui/bits";
import { KeptFew, useKept } from "./compare_pair";

const BOTH_GROUPS = "both groups of the task, that of B below that of A";

interface TasksProps {
  stores: Stores;
  route: Route;
  runs: Runs;
  comparison: Comparison;
}

export function CompareTasks(props: TasksProps): VNode {
  const { route, comparison } = props;
  const { tasks } = comparison;
  const isKept = useKept(props);
  const most = Math.max(...tasks.map((each) => Math.abs(each.difference)), 0);
  const moved = tasks.filter((each) => each.difference !== 0);
  const same = tasks.length - moved.length;
  const isSampled = comparison.episodes === null; // else graded again: chance has changed nothing
  return (
    <Card
      title={`Tasks, those that changed most ${isSampled ? "surely " : ""}first`}
      note={isSampled ? "★ is q ≤ .10, Benjamini–Hochberg over tasks" : undefined}
    >
      {moved.length > 0 && (
        <table class="table tight">
          <thead>
            <tr>
              <th>task</th>
              <th class="right">A</th>
              <th class="right">B</th>
              <th>B − A</th>
              <th class="right">episodes</th>
              {isSampled && <th class="right">p</th>}
              {isSampled && <th class="right">q</th>}
            </tr>
          </thead>
          <tbody>
            <Folded items={moved} most={50} name="tasks" each={(task) => <Row key={task.task_id} {...{ route, comparison, task, most }} isKept={isKept(task.task_id)} />} />
          </tbody>
        </table>
      )}
      {same > 0 && <p class="nothing">{same === tasks.length ? "No task differs." : `${same} more did not change.`}</p>}
      {moved.some((task) => !isKept(task.task_id)) && (
        <p class="hint">
          A task is a link if both runs kept episodes of it. <KeptFew />
        </p>
      )}
      {comparison.num_needed !== null && (
        <p class="hint">
          With so few episodes, a task that changed alone cannot be told from chance among {tasks.length}: that takes{" "}
          {comparison.num_needed} episodes of it in each run.
        </p>
      )}
    </Card>
  );
}

interface RowProps {
  route: Route;
  comparison: Comparison;
  task: TaskChange;
  most: number;
  /** True if both runs kept episodes of it. */
  isKept: boolean;
}

function Row({ route, comparison, task, most, isKept }: RowProps): VNode {
  const isSampled = comparison.episodes === null;
  const href = links.compare(route.run, route.other, { by: comparison.by, task: task.task_id });
  return (
    <tr data-task={task.task_id}>
      <td class="mono">
        {isKept ? (
          <a href={href} title={BOTH_GROUPS}>
            <Text value={task.task_id} line />
          </a>
        ) : (
          <Text value={task.task_id} line />
        )}
        {task.is_named && " \u2605"}
      </td>
      <td class="right">{fixed(task.mean_a)}</td>
      <td class="right">{fixed(task.mean_b)}</td>
      <td>
        <SignedBar value={task.difference} most={most} />
      </td>
      <td class="right dim">
        {task.num_a} and {task.num_b}
      </td>
      {isSampled && <td class="right">{number(task.p)}</td>}
      {isSampled && <td class="right">{number(task.q)}</td>}
    </tr>
  );
}

/** The episodes of a run that was graded again, each with its value in both runs. */
export function CompareEpisodes({ route, comparison: { by, episodes } }: { route: Route; comparison: Comparison }): VNode | null {
  if (!episodes?.length) return null;
  return (
    <Card title="Episodes that changed, the largest change first">
      <table class="table tight">
        <thead>
          <tr>
            <th>episode</th>
            <th class="right">A</th>
            <th class="right">B</th>
            <th class="right">B − A</th>
          </tr>
        </thead>
        <tbody>
          <Folded
            items={episodes}
            most={50}
            name="episodes"
            each={({ episode_id: id, task_id: task, a, b }) => (
              <tr key={id} data-episode={id}>
                <td class="mono">
                  <a href={links.compare(route.run, route.other, { by, task })} title={BOTH_GROUPS}>
                    <Text value={id} line />
                  </a>
                </td>
                <td class="right">
                  <a href={links.episode(route.run, id)}>{fixed(a)}</a>
                </td>
                <td class="right">
                  <a href={links.episode(route.other, id)}>{fixed(b)}</a>
                </td>
                <td class="right">{signed(b - a)}</td>
              </tr>
            )}
          />
        </tbody>
      </table>
    </Card>
  );
}
