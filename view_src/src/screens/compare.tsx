import type { VNode } from "preact";
import type { Stores } from "../data/store";
import type { Runs } from "../data/types";
import type { Comparison, SideFacts } from "../lib/comparison";
import { comparable, verdictText } from "../lib/comparison";
import { change, fixed, number, plural } from "../lib/format";
import { type Route, go, links, setQuery } from "../lib/router";
import { oneLine } from "../lib/visible";
import { useKeys } from "../lib/keys";
import { Empty, Text, Tile } from "../ui/bits";
import { useLoaded } from "../ui/hooks";
import { CompareCards } from "./compare_cards";
import { ComparePair } from "./compare_pair";
import { CompareEpisodes, CompareTasks } from "./compare_tasks";

interface CompareProps {
  stores: Stores;
  route: Route;
  runs: Runs;
}

export function Compare({ stores, route, runs }: CompareProps): VNode {
  const by = route.query.get("by") ?? "reward";
  const cluster = route.query.get("cluster") ?? "";
  const task = route.query.get("task");
  const key = route.run === route.other ? null : `${route.run}:${route.other}:${by}:${cluster}`;
  const { value, problem } = useLoaded(key, async () => ({
    key,
    comparison: (await stores.source.diff(route.run, route.other, by, cluster)) as Comparison,
  }));
  useKeys({ u: () => (task === null ? go(links.overview(route.run)) : setQuery("task", null)) });
  const comparison = value?.key === key ? value?.comparison : undefined;
  return (
    <>
      <Choices {...{ route, runs, by, cluster }} clusters={stores.source.clusters} />
      {key === null && <Empty title="Choose two runs">A run is not compared with itself. Two steps of a training: <code>agentenv diff RUN@0 RUN@40</code>.</Empty>}
      {problem !== null && <Empty title={oneLine(problem)} />}
      {key !== null && !comparison && problem === null && <Empty title="Comparing">The records of both runs are read: half a minute for 100,000 episodes each.</Empty>}
      {comparison && (task === null ? <Whole {...{ stores, route, runs, comparison }} /> : <ComparePair {...{ stores, route, runs, comparison, task }} />)}
    </>
  );
}

interface ChoicesProps {
  route: Route;
  runs: Runs;
  by: string;
  cluster: string;
  /** Keys to choose from; null for any. */
  clusters: string[] | null;
}

function Choices({ route, runs, by, cluster, clusters }: ChoicesProps): VNode {
  const select = (name: string, value: number, change: (run: number) => void): VNode => (
    <label>
      {name}{" "}
      <select value={String(value)} onChange={(event) => change(Number(event.currentTarget.value))}>
        {comparable(runs).map((each) => (
          <option key={each.run} value={String(each.run)}>
            {oneLine(each.name)}
          </option>
        ))}
      </select>
    </label>
  );
  return (
    <div class="toolbar">
      {select("A", route.run, (run) => go(links.compare(run, route.other, { by })))}
      {select("B", route.other, (run) => go(links.compare(route.run, run, { by })))}
      <button type="button" class="button" onClick={() => go(links.compare(route.other, route.run, { by }))}>
        Swap
      </button>
      <label>
        by{" "}
        <select value={by} onChange={(event) => setQuery("by", event.currentTarget.value)}>
          {["reward", "score", "passed"].map((each) => (
            <option key={each} value={each}>
              {each}
            </option>
          ))}
        </select>
      </label>
      {clusters?.length !== 0 && <Unit {...{ cluster, clusters }} />}
    </div>
  );
}

function Unit({ cluster, clusters }: Pick<ChoicesProps, "cluster" | "clusters">): VNode {
  const change = (value: string): void => setQuery("cluster", value.trim());
  return (
    <label title="Tasks with the same value of this key of their metadata, such as a passage or a repository, count as one unit of the interval.">
      one unit by{" "}
      {clusters === null ? (
        <input
          class="short-field"
          type="search"
          spellcheck={false}
          placeholder="each task"
          value={cluster}
          onChange={(event) => change(event.currentTarget.value)}
        />
      ) : (
        <select value={cluster} onChange={(event) => change(event.currentTarget.value)}>
          <option value="">each task</option>
          {clusters.map((each) => (
            <option key={each} value={each}>
              {oneLine(each)}
            </option>
          ))}
        </select>
      )}
    </label>
  );
}

function Whole({ stores, route, runs, comparison }: CompareProps & { comparison: Comparison }): VNode {
  const refused = comparison.caveats.filter((each) => each.refuses);
  const notes = comparison.caveats.filter((each) => !each.refuses);
  return (
    <>
      {refused.length > 0 && (
        <div class="failure" role="note">
          <strong>Not comparable</strong>
          {refused.map((each) => (
            <p key={each.text}>
              <Text value={each.text} />
            </p>
          ))}
        </div>
      )}
      {notes.map((each) => (
        <p key={each.text} class="note">
          <Text value={each.text} />
        </p>
      ))}
      <Tiles {...{ route, runs, comparison }} />
      <CompareCards comparison={comparison} />
      <CompareTasks {...{ stores, route, runs, comparison }} />
      <CompareEpisodes {...{ route, comparison }} />
    </>
  );
}

function Tiles({ route, runs, comparison }: { route: Route; runs: Runs; comparison: Comparison }): VNode {
  const sideName = (letter: string, run: number, { step }: SideFacts): string => {
    const name = runs.runs.find((each) => each.run === run)?.name ?? "";
    return `${letter}: ${oneLine(name)}${step === null ? "" : `, step ${step}`}`;
  };
  const { a, b, difference, verdict, flips, smallest_effect: smallest } = comparison;
  const hasInterval = difference.ci95_low !== null && difference.ci95_high !== null;
  const isRefused = comparison.caveats.some((each) => each.refuses);
  const compared = (side: "a" | "b"): string => {
    const episodes = comparison.tasks.reduce((sum, task) => sum + task[`num_${side}`], 0);
    return `${plural(episodes, "episode")}, ${plural(difference.num_tasks, "task")}${a.num_only || b.num_only ? " of both runs" : ""}`;
  };
  const tone = isRefused ? "" : verdict === "better" ? "good" : verdict === "worse" ? "bad" : "";
  return (
    <div class="tiles">
      <Tile
        value={isRefused ? "no verdict" : verdictText(verdict)}
        name={`by mean ${comparison.by}, paired over tasks`}
        note={isRefused ? "the runs are not comparable" : comparison.are_identical ? "the runs agree on every task" : "the interval decides"}
        tone={tone}
      />
      <Tile value={fixed(a.mean, 3)} name={sideName("A", route.run, a)} note={compared("a")} />
      <Tile value={fixed(b.mean, 3)} name={sideName("B", route.other, b)} note={compared("b")} />
      <Tile
        value={change(difference.mean)}
        name={"B \u2212 A"}
        note={hasInterval ? `95 % ${change(difference.ci95_low)} to ${change(difference.ci95_high)}` : "no interval"}
        tone={tone}
      />
      {flips && <Tile value={`+${flips.gained_once} \u2212${flips.lost_once}`} name="tasks solved at least once" note={`always: +${flips.gained_always} \u2212${flips.lost_always}`} />}
      {smallest !== null && <Tile value={number(smallest)} name="smallest effect to be seen" note="in 80 of 100 comparisons" />}
    </div>
  );
}
