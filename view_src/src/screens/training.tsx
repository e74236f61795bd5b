import type { VNode } from "preact";
import { useMemo } from "preact/hooks";
import type { RunStore, Stores } from "../data/store";
import type { Runs } from "../data/types";
import { plural } from "../lib/format";
import { type XAxis, curvesOf } from "../lib/curves";
import { flagsOf } from "../lib/flags";
import { type Route, go, links, setQuery } from "../lib/router";
import { useKeys } from "../lib/keys";
import { oneLine } from "../lib/visible";
import { Card, Empty, Text } from "../ui/bits";
import { Chart } from "../ui/chart";
import { useStores } from "../ui/hooks";
import { StepView } from "./training_step";

const AXES: [XAxis, string][] = [
  ["step", "train step"],
  ["tokens", "tokens trained on"],
  ["hours", "hours"],
];

interface TrainingProps {
  stores: Stores;
  store: RunStore;
  route: Route;
  runs: Runs;
}

/** Return the numbers of the trainings beside the one of the route. */
function besideOf(route: Route): number[] {
  return (route.query.get("with") ?? "").split(" ").filter((each) => /^\d+$/.test(each)).map(Number);
}

export function Training({ stores, store, route, runs }: TrainingProps): VNode {
  const numbers = besideOf(route);
  const named = runs.runs.filter((each) => numbers.includes(each.run) && each.run !== route.run && each.kind === "train");
  const beside = named.map((each) => ({ name: oneLine(each.name), store: stores.peek(each.run) }));
  const versions = useStores(beside.map((each) => each.store));
  const axis = (route.query.get("x") as XAxis | null) ?? "step";
  const smooth = Number(route.query.get("smooth") ?? 1) || 1;
  const curves = useMemo(
    () => curvesOf(store, axis, smooth, beside),
    [store.version, axis, smooth, versions],
  );
  const asked = route.query.get("step");
  const step = asked === null ? null : Number(asked);
  const [earlier] = curves.steps.filter((each) => String(each) === route.query.get("since"));
  const since = earlier ?? null;
  const place = step === null ? -1 : curves.steps.indexOf(step);
  const zoom = zoomOf(route.query.get("zoom"));
  /** Open the step whose point is nearest to a place of the axis. */
  const openNear = (at: number): void => {
    const away = curves.places.map((each) => Math.abs((curves.x[each] ?? 0) - (curves.x[at] ?? 0)));
    open(away.indexOf(Math.min(...away)));
  };
  const open = (to: number): void => {
    const chosen = curves.steps[to];
    if (chosen !== undefined) setQuery("step", String(chosen));
  };
  const walk = (by: number): void => open(place < 0 ? (by > 0 ? 0 : curves.steps.length - 1) : place + by);
  useKeys({
    j: () => walk(1),
    k: () => walk(-1),
    u: () => (step === null ? go(links.overview(store.run)) : setQuery("step", null)),
    Escape: () => setQuery("step", null),
  });
  if (!curves.steps.length) return <NoSteps store={store} />;
  return (
    <>
      <div class="toolbar">
        <strong>{plural(curves.steps.filter((each) => each > 0).length, "train step")}</strong>
        <label>
          x{" "}
          <select value={axis} onChange={(event) => setQuery("x", event.currentTarget.value)}>
            {AXES.map(([key, name]) => (
              <option key={key} value={key}>
                {name}
              </option>
            ))}
          </select>
        </label>
        <label>
          mean over{" "}
          <select value={String(smooth)} onChange={(event) => setQuery("smooth", event.currentTarget.value)}>
            {[1, 5, 10, 25].map((each) => (
              <option key={each} value={String(each)}>
                {plural(each, "step")}
              </option>
            ))}
          </select>
        </label>
        <Beside {...{ route, runs }} chosen={numbers} />
        <span class="dim">click a point for the episodes of its step; drag to zoom</span>
        {zoom && (
          <button type="button" class="button" onClick={() => setQuery("zoom", null)}>
            All steps
          </button>
        )}
      </div>
      {step === null && <Flags store={store} />}
      <div class={`charts ${step === null ? "" : "as-strip"}`} tabIndex={step === null ? undefined : 0}>
        {curves.charts.map((chart) => (
          <Chart
            key={chart.title}
            {...{ chart, zoom, axis }}
            open={openNear}
            x={curves.x}
            height={step === null ? 150 : 104}
            chosen={curves.places[place] ?? -1}
            setZoom={(range) => setQuery("zoom", range ? range.map((each) => Number(each.toPrecision(5))).join("_") : null)}
          />
        ))}
      </div>
      {step !== null && <StepView {...{ store, step, walk, since, smooth }} steps={curves.steps} />}
    </>
  );
}

/** The other trainings, to have their curves in the same charts. */
function Beside({ route, runs, chosen }: { route: Route; runs: Runs; chosen: number[] }): VNode | null {
  const others = runs.runs.filter((each) => each.kind === "train" && each.run !== route.run);
  if (!others.length) return null;
  const toggle = (run: number): void => {
    const next = chosen.includes(run) ? chosen.filter((each) => each !== run) : [...chosen, run];
    setQuery("with", next.join(" "));
  };
  return (
    <span class="beside" role="group" aria-label="trainings beside this one">
      beside
      {others.map((each) => (
        <label key={each.run} class="check">
          <input type="checkbox" checked={chosen.includes(each.run)} onChange={() => toggle(each.run)} /> <Text value={each.name} line />
        </label>
      ))}
    </span>
  );
}

function zoomOf(text: string | null): [number, number] | null {
  const [low, high] = (text ?? "").split("_").map(Number);
  return low !== undefined && high !== undefined && high > low ? [low, high] : null;
}

function NoSteps({ store }: { store: RunStore }): VNode {
  if (store.meta && store.meta.kind !== "train") {
    return <Empty title="This is not a training">A run has no train steps; its overview has its figures.</Empty>;
  }
  if (!store.complete.has("metrics")) return <Empty title="Reading the metrics" />;
  return <Empty title="No train step yet">The first point appears here once a step has ended.</Empty>;
}

function Flags({ store }: { store: RunStore }): VNode | null {
  const flags = useMemo(() => flagsOf(store), [store.version]);
  if (!flags.length) return null;
  return (
    <Card title="Places to look at" note="means of the last steps; a flag is no verdict" className="flags-card">
      <ul class="plain-list flag-list">
        {flags.map((flag) => (
          <li key={flag.title}>
            <span class="chip flag">⚑ {flag.title}</span>
            <span>{flag.text}</span>
            {flag.since !== null && <a href={links.training(store.run, { step: flag.since })}>since step {flag.since}</a>}
            {flag.href !== null && <a href={flag.href}>its episodes</a>}
          </li>
        ))}
      </ul>
    </Card>
  );
}
