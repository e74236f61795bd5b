// Curves of a training, from the table of panels in agentenv/view/panels.py.
import type { Metrics, RunStore } from "../data/store";
import type { Panel } from "../data/types";

export interface Curve {
  name: string;
  values: (number | null)[];
}

export interface Chart {
  title: string;
  label: string;
  curves: Curve[];
}

export type XAxis = "step" | "tokens" | "hours";

export interface Curves {
  steps: number[];
  x: number[];
  /** Place in `x` of each step: other trainings may have more points. */
  places: number[];
  charts: Chart[];
}

/** Return the keys of the metrics that a key of a panel stands for, with the part that it leaves open. */
function keysFor(key: string, known: Set<string>): [string, string][] {
  if (key.endsWith("@")) {
    const parts = [...known].filter((each) => each.startsWith(key)).map((each) => each.slice(key.length));
    parts.sort((a, b) => Number(a) - Number(b));
    return parts.filter((_, place) => place === 0 || place === parts.length - 1).map((part) => [key + part, part]);
  }
  if (!key.includes("*")) return known.has(key) ? [[key, ""]] : [];
  const [before = "", after = ""] = key.split("*");
  return [...known].flatMap((each): [string, string][] => {
    if (!each.startsWith(before) || !each.endsWith(after)) return [];
    const part = each.slice(before.length, each.length - after.length);
    return part && !part.includes("/") ? [[each, part]] : [];
  });
}

/** Mean over the last steps, as many as chosen. */
function smoothed(values: (number | null)[], window: number): (number | null)[] {
  if (window <= 1) return values;
  return values.map((value, place) => {
    if (value === null) return null;
    const recent = values.slice(Math.max(0, place - window + 1), place + 1).filter((each): each is number => each !== null);
    return recent.reduce((sum, each) => sum + each, 0) / recent.length;
  });
}

/** Panels of what the page adds to the plots. */
const MORE: Panel[] = [
  { title: "Groups without spread", label: "share of groups", series: [["rollout/reward/zero_spread_share", "training"]] },
  {
    title: "What the reward goes by", label: "correlation among siblings",
    series: [
      ["rollout/reward/length_correlation_in_group", "length"],
      ["rollout/reward/format_correlation_in_group", "Markdown marks"],
      ["rollout/reward/repetition_correlation_in_group", "repetition"],
    ],
  },
  { title: "Cut off", label: "share of episodes", series: [["rollout/truncated_share", "truncated"]] },
  { title: "Throughput", label: "sampled tokens per second", series: [["throughput/tokens_per_s", "tokens"]] },
];

/** Return the curves of a training, and of others beside it, whose names get that of their run. */
export function curvesOf(store: RunStore, axis: XAxis, window: number, beside: { name: string; store: RunStore }[] = []): Curves {
  const own = curvesOfOne(store, axis, window);
  const others = beside.map(({ name, store: other }) => ({ name, curves: curvesOfOne(other, axis, window) }));
  if (!others.length) return own;
  const x = [...new Set([own, ...others.map((each) => each.curves)].flatMap((each) => each.x))].sort((a, b) => a - b);
  const placeOf = new Map(x.map((value, place) => [value, place]));
  const widened = (from: Curves, curve: Curve, name: string): Curve => {
    const values: (number | null)[] = Array<number | null>(x.length).fill(null);
    from.x.forEach((value, place) => {
      values[placeOf.get(value) ?? 0] = curve.values[place] ?? null;
    });
    return { name, values };
  };
  const charts = own.charts.map((chart) => ({
    ...chart,
    curves: [
      ...chart.curves.map((curve) => widened(own, curve, curve.name)),
      ...others.flatMap(({ name, curves }) => {
        const same = curves.charts.find((each) => each.title === chart.title);
        return (same?.curves ?? []).map((curve) => widened(curves, curve, `${curve.name}, ${name}`));
      }),
    ],
  }));
  return { ...own, x, charts, places: own.x.map((value) => placeOf.get(value) ?? 0) };
}

function curvesOfOne(store: RunStore, axis: XAxis, window: number): Curves {
  const steps = [...store.metrics.keys()].sort((a, b) => a - b);
  const rows = steps.map((step): Metrics => store.metrics.get(step) ?? new Map());
  const known = new Set(rows.flatMap((row) => [...row.keys()]));
  const charts: Chart[] = [];
  for (const panel of [...(store.meta?.panels ?? []), ...MORE]) {
    const curves = panel.series.flatMap(([key, name]) =>
      keysFor(key, known).map(([full, part]) => ({
        name: name === "*" ? part : name + (key.endsWith("@") ? part : ""),
        values: smoothed(rows.map((row) => row.get(full) ?? null), window),
      })),
    );
    if (curves.length) charts.push({ title: panel.title, label: panel.label, curves });
  }
  return { steps, x: xValues(axis, steps, rows), charts, places: steps.map((_, place) => place) };
}

function xValues(axis: XAxis, steps: number[], rows: Metrics[]): number[] {
  if (axis === "step") return steps;
  const key = axis === "tokens" ? "train/num_tokens" : "time/wall_s";
  const scale = axis === "tokens" ? 1 : 3600;
  let sum = 0;
  return rows.map((row) => {
    sum += (row.get(key) ?? 0) / scale;
    return sum;
  });
}
