import type { VNode } from "preact";
import type { RunStore } from "../data/store";
import { plural, seconds } from "../lib/format";
import { type Lane, lanesOf } from "../lib/lanes";
import { links } from "../lib/router";
import { Card, Text } from "./bits";
import { useEpisodes } from "./hooks";

const MOST_LANES = 64;
const WIDTH = 1000;

/** When episodes ran, a row each: in the engine, in the environment, and waiting. */
export function Lanes({ store, rows }: { store: RunStore; rows: number[] }): VNode | null {
  const { value } = useEpisodes(store, rows.slice(0, MOST_LANES));
  const lanes = value ? lanesOf(value.rows, value.episodes) : [];
  const first = Math.min(...lanes.map((lane) => lane.from));
  const last = Math.max(...lanes.map((lane) => lane.to));
  if (!(last > first)) return null;
  const all = plural(rows.length, "kept episode");
  const shown = rows.length > MOST_LANES ? `${MOST_LANES} of ${all}` : all;
  return (
    <Card title="When the episodes ran" note={`${shown}, within ${seconds(last - first)}`} actions={<LanesKey />}>
      <ul class="lanes">
        {lanes.map((lane) => (
          <LaneRow key={lane.row} {...{ store, lane }} at={(time) => ((time - first) / (last - first)) * WIDTH} />
        ))}
      </ul>
    </Card>
  );
}

function LanesKey(): VNode {
  return (
    <span class="key">
      <span><span class="swatch series0" aria-hidden="true" /> in the engine</span>
      <span><span class="swatch series1" aria-hidden="true" /> in the environment</span>
      <span><span class="swatch lane-wait" aria-hidden="true" /> waiting</span>
    </span>
  );
}

function LaneRow({ store, lane, at }: { store: RunStore; lane: Lane; at: (time: number) => number }): VNode {
  const id = store.index.text("episode_id", lane.row);
  return (
    <li data-lane={id}>
      <a class="mono clip" href={links.episode(store.run, id)}>
        <Text value={id} line />
      </a>
      <svg viewBox={`0 0 ${WIDTH} 10`} preserveAspectRatio="none" aria-hidden="true">
        <rect class="lane-wait" x={at(lane.from)} y="4" width={at(lane.to) - at(lane.from)} height="2" />
        {lane.parts.map((part, k) => (
          <rect
            key={k}
            class={part.kind === "generate" ? "series0" : "series1"}
            x={at(part.from)}
            y="0"
            width={Math.max(part.to > part.from ? 1 : 0, at(part.to) - at(part.from))}
            height="10"
          />
        ))}
      </svg>
      <span class="right dim">{seconds(lane.to - lane.from)}</span>
    </li>
  );
}
