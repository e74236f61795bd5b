import type { VNode } from "preact";
import type { RunStore } from "../data/store";
import { count, fixed, number, plural } from "../lib/format";
import { type GroupFacts, type Sorted, inOrder, sortedGroups } from "../lib/groups";
import { GLYPHS, OUTCOME_NAMES, type Outcome } from "../lib/outcome";
import { type Route, go, links, setQuery } from "../lib/router";
import { oneLine } from "../lib/visible";
import { useKeys } from "../lib/keys";
import { Card, Cells, Empty, Folded, Text } from "../ui/bits";
import { useMemo, useState } from "preact/hooks";
import { OverviewSide } from "./overview_side";
import { OverviewTiles } from "./overview_tiles";

const MOST_ROWS = 40;
/** Up to this many tasks, what would be folded is open. */
const FEW = 20;

/** Columns of the tasks: name, what it tells, and the order that the first click asks for. */
const COLUMNS = [
  ["task", "id of the task", "task"],
  ["mean", "mean reward of the siblings", "mean"],
  ["spread", "standard deviation of the siblings' rewards", "-spread"],
] as const;
const FIRST = "-spread";

export function Overview({ store, route }: { store: RunStore; route: Route }): VNode {
  const sorted = sortedGroups(store);
  const sort = route.query.get("sort") ?? FIRST;
  const differ = useMemo(() => inOrder(sorted.differ, sort), [sorted, sort]);
  const [chosen, setChosen] = useState(-1);
  const shown = differ.slice(0, MOST_ROWS);
  const move = (by: number): void => {
    const next = Math.min(shown.length - 1, Math.max(0, chosen + by));
    setChosen(next);
    document.querySelector(`[data-place="${next}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const open = (): void => {
    const group = shown[chosen];
    if (group) go(links.task(store.run, group.id));
  };
  useKeys({ j: () => move(1), J: () => move(1), k: () => move(-1), K: () => move(-1), Enter: open, "/": () => go(links.episodes(store.run)) });
  if (sorted.numGroups === 0) return <NoEpisodes store={store} />;
  return (
    <>
      <OverviewTiles store={store} sorted={sorted} />
      <div class="overview-columns">
        <Tasks {...{ store, sorted, differ, sort, chosen }} />
        <OverviewSide store={store} />
      </div>
    </>
  );
}

function NoEpisodes({ store }: { store: RunStore }): VNode {
  if (!store.complete.has("index")) return <Empty title="Reading the index" />;
  if (store.meta?.kind === "train" && store.metrics.size) {
    return (
      <Empty title="This training kept no episodes">
        <a href={links.training(store.run)}>Look at its curves</a>; <code>--save_samples</code> keeps episodes.
      </Empty>
    );
  }
  return <Empty title="No episode yet">The first one appears here once it has ended.</Empty>;
}

interface TasksProps {
  store: RunStore;
  sorted: Sorted;
  /** Tasks whose siblings differ, in the order of `sort`. */
  differ: GroupFacts[];
  sort: string;
  chosen: number;
}

function Tasks({ store, sorted, differ, sort, chosen }: TasksProps): VNode {
  const single = sorted.differ.length === 0 && [...sorted.failed, ...sorted.solved, ...sorted.same].every((each) => each.rows.length < 2);
  const few = sorted.differ.length + sorted.failed.length + sorted.broken.length <= FEW;
  return (
    <Card
      title={single ? "Tasks" : "Tasks whose siblings differ"}
      note={single ? count(sorted.numGroups) : `${count(sorted.differ.length)} of ${count(sorted.numGroups)}`}
      actions={<Key passScore={store.passScore} />}
      className="tasks"
    >
      {sorted.differ.length > 0 && <TaskTable {...{ store, sort, chosen }} groups={differ} />}
      {sorted.differ.length === 0 && !single && (
        <p class="nothing">All siblings of each task got the same reward: no group tells one action from another.</p>
      )}
      <div class="folds">
        <Fold {...{ store }} outcome="error" name="with an error or without a reward" groups={sorted.broken} begins={few} />
        <Fold {...{ store }} outcome="fail" name={single ? "failed" : "failed by all siblings"} groups={sorted.failed} begins={few} />
        <Fold {...{ store }} outcome="part" name="the same part of the reward for all" groups={sorted.same} />
        <Fold {...{ store }} outcome="pass" name={single ? "solved" : "solved by all siblings"} groups={sorted.solved} begins={single || sorted.differ.length + sorted.failed.length === 0} />
        <Fold {...{ store }} outcome="none" name="of these, all siblings took the same actions" groups={sorted.saidTheSame} glyph="=" />
      </div>
    </Card>
  );
}

function Key({ passScore }: { passScore: number }): VNode {
  const outcomes: Outcome[] = ["pass", "part", "fail", "none", "error"];
  return (
    <span class="key" title={`By the score, or by the reward where there is none: passed from ${number(passScore)} on, partly above 0`}>
      {outcomes.map((each) => (
        <span key={each}>
          <span class={`mark o-${each}`}>{GLYPHS[each]}</span>
          {OUTCOME_NAMES[each]}
        </span>
      ))}
    </span>
  );
}

function TaskTable({ store, groups, sort, chosen }: Omit<TasksProps, "sorted" | "differ"> & { groups: GroupFacts[] }): VNode {
  return (
    <div class="task-rows">
      <div class="task-row task-row-head">
        {COLUMNS.map(([name, title, first]) => (
          <SortButton key={name} {...{ name, title, first, sort }} />
        ))}
        <span>siblings</span>
        <span>prompt</span>
      </div>
      <div role="list" aria-label="tasks whose siblings differ">
        <Folded
          items={groups.map((group, place) => ({ group, place }))}
          most={MOST_ROWS}
          name="tasks"
          each={({ group, place }) => <TaskRow key={group.id} {...{ store, group, place }} chosen={place === chosen} />}
        />
      </div>
    </div>
  );
}

/** The head of a column: a click sorts by it, a second one turns the order around. */
function SortButton({ name, title, first, sort }: { name: string; title: string; first: string; sort: string }): VNode {
  const isSorted = sort.replace(/^-/, "") === name;
  const turned = first.startsWith("-") ? first.slice(1) : `-${first}`;
  const next = sort === first ? turned : first;
  return (
    <button
      type="button"
      class={name === "task" ? "" : "right"}
      title={`${title}; sort`}
      aria-pressed={isSorted}
      onClick={() => setQuery("sort", next === FIRST ? null : next)}
    >
      {name}
      {isSorted && <span aria-hidden="true">{sort.startsWith("-") ? " \u2193" : " \u2191"}</span>}
    </button>
  );
}

interface TaskRowProps {
  store: RunStore;
  group: GroupFacts;
  place: number;
  chosen: boolean;
}

export function TaskRow({ store, group, place, chosen }: TaskRowProps): VNode {
  const prompt = store.head(group.rows[0] ?? -1)?.prompt ?? "";
  const turns = group.rows.map((row) => store.index.number("turns", row));
  const most = Math.max(...turns);
  const distinct = Number.isNaN(group.distinct) ? "" : `${group.distinct} different`;
  const told = [distinct, Number.isNaN(most) ? "" : `up to ${plural(most, "turn")}`].filter((each) => each).join(", ");
  return (
    <div class={`task-row ${chosen ? "chosen" : ""}`} role="listitem" data-place={place} data-task={group.id}>
      <a class="mono task-id" href={links.task(store.run, group.id)} title={oneLine(group.id)}>
        <Text value={group.id} line />
      </a>
      <span class="right">{fixed(group.mean)}</span>
      <span class="right dim">{fixed(group.spread)}</span>
      <Cells store={store} rows={group.rows} />
      <a class="prompt" href={links.task(store.run, group.id)} tabIndex={-1} title={told}>
        <Text value={prompt} line />
      </a>
    </div>
  );
}

interface FoldProps {
  store: RunStore;
  outcome: Outcome;
  name: string;
  groups: GroupFacts[];
  glyph?: string;
  /** Begin unfolded. */
  begins?: boolean;
}

function Fold({ store, outcome, name, groups, glyph, begins = false }: FoldProps): VNode | null {
  const [open, setOpen] = useState(begins);
  if (!groups.length) return null;
  return (
    <details class="fold" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        <span class={`mark o-${outcome}`}>{glyph ?? GLYPHS[outcome]}</span>
        {name} <span class="dim">{plural(groups.length, "task")}</span>
      </summary>
      {open && (
        <div class="task-rows">
          <Folded
            items={groups}
            most={MOST_ROWS}
            name="tasks"
            each={(group) => <TaskRow key={group.id} {...{ store, group }} place={-1} chosen={false} />}
          />
        </div>
      )}
    </details>
  );
}
