import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { number } from "../lib/format";
import type { Chart as ChartData, XAxis } from "../lib/curves";

interface ChartProps {
  chart: ChartData;
  x: number[];
  axis: XAxis;
  height: number;
  /** Place of the open step in `x`; -1 if none. */
  chosen: number;
  zoom: [number, number] | null;
  setZoom: (zoom: [number, number] | null) => void;
  open: (place: number) => void;
}

/** Pixels left of the first point that still choose it; to the right is nothing else. */
const BEYOND = 8;
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3], [4, 2], [1, 2], [10, 4]];

function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function optionsOf(props: ChartProps, width: number, live: { current: ChartProps }, told: (place: number | null) => void): uPlot.Options {
  const axis = {
    stroke: color("--dim"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: color("--line"), width: 1 },
    ticks: { show: false },
  };
  return {
    width,
    height: props.height,
    legend: { show: false },
    padding: [8, 10, 0, 0],
    cursor: { sync: { key: "training" }, drag: { x: true, y: false, setScale: false }, points: { size: 7 }, focus: { prox: 30 } },
    scales: { x: { time: false }, y: { range: (_, low, high) => ranged(low, high) } },
    axes: [
      { ...axis, size: 22, gap: 3 },
      { ...axis, size: 46, gap: 3, values: (_, splits) => splits.map((each) => number(each, 4)) },
    ],
    series: [
      {},
      ...props.chart.curves.map((curve, k) => ({
        label: curve.name,
        stroke: color(`--series${k % 7}`),
        width: 1.75,
        dash: DASHES[k % DASHES.length] ?? [],
        spanGaps: true,
        points: { show: props.x.length <= 40, size: 4.5, fill: color("--panel") },
      })),
    ],
    hooks: {
      setCursor: [(plot) => told(plot.cursor.idx ?? null)],
      setSelect: [
        (plot) => {
          if (plot.select.width < 6) return;
          const range: [number, number] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          live.current.setZoom(range);
        },
      ],
      draw: [(plot) => drawChosen(plot, live.current)],
    },
  };
}

function ranged(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.5;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

function drawChosen(plot: uPlot, props: ChartProps): void {
  const at = props.x[props.chosen];
  if (at === undefined) return;
  const { ctx, bbox } = plot;
  const left = plot.valToPos(at, "x", true);
  if (left < bbox.left || left > bbox.left + bbox.width) return;
  ctx.save();
  ctx.strokeStyle = color("--text");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([]);
  ctx.beginPath();
  ctx.moveTo(left, bbox.top);
  ctx.lineTo(left, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

export function Chart(props: ChartProps): VNode {
  const { chart, x, axis, height, chosen, zoom } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const live = useRef(props);
  live.current = props;
  const [at, setAt] = useState<number | null>(null);
  const shape = `${chart.curves.map((curve) => curve.name).join("|")}:${height}:${x.length <= 40}`;
  useEffect(() => {
    const { current } = box;
    if (!current) return undefined;
    const make = (): void => {
      plot.current?.destroy();
      const { chart: own, x: xs } = live.current;
      const data = [xs, ...own.curves.map((curve) => curve.values)] as uPlot.AlignedData;
      plot.current = new uPlot(optionsOf(live.current, current.clientWidth || 280, live, setAt), data, current);
      applyZoom(plot.current, live.current);
    };
    make();
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: current.clientWidth, height }));
    resized.observe(current);
    window.addEventListener("themechange", make);
    return () => {
      resized.disconnect();
      window.removeEventListener("themechange", make);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    plot.current?.setData([x, ...chart.curves.map((curve) => curve.values)] as uPlot.AlignedData, false);
    if (plot.current) applyZoom(plot.current, live.current);
  }, [chart, x]);
  useEffect(() => {
    if (plot.current) applyZoom(plot.current, live.current);
  }, [zoom?.[0], zoom?.[1], chosen]);
  const pressedAt = useRef(0);
  const clicked = (event: MouseEvent): void => {
    if (Math.abs(event.clientX - pressedAt.current) > 5) return; // a drag, which zooms
    const over = plot.current?.over.getBoundingClientRect();
    if (!over || event.clientY < over.top || event.clientY > over.bottom || event.clientX < over.left - BEYOND) return;
    const place = plot.current?.posToIdx(Math.max(0, Math.min(over.width, event.clientX - over.left)));
    if (place !== undefined) props.open(place);
  };
  return (
    <figure class="chart">
      <figcaption>
        <strong>{chart.title}</strong>
        <span class="dim chart-label">{at === null ? chart.label : `${axis} ${number(x[at])}`}</span>
      </figcaption>
      <div ref={box} class="plot" onPointerDown={(event) => (pressedAt.current = event.clientX)} onClick={clicked} onDblClick={() => props.setZoom(null)} role="img" aria-label={spoken(chart, x)} />
      <ul class="chart-legend">
        {chart.curves.map((curve, k) =>
          curve.values[chosen] === null ? null : (
            <li key={curve.name}>
              <span class={`swatch series${k % 7}`} aria-hidden="true" />
              {curve.name} <span class="chart-value">{number(valueAt(curve.values, at ?? chosen), 4)}</span>
            </li>
          ),
        )}
      </ul>
    </figure>
  );
}

function applyZoom(plot: uPlot, { zoom, x }: ChartProps): void {
  const [first = 0, last = 1] = [x[0], x[x.length - 1]];
  const [low, high] = zoom ?? [first, last];
  plot.setScale("x", { min: low, max: high > low ? high : low + 1 });
  // Without this argument the redraw would set the scale to what it was before.
  plot.redraw(false);
}

/** Return the value at a place; before one is chosen, the latest there is. */
function valueAt(values: (number | null)[], place: number): number | null {
  return place >= 0 ? (values[place] ?? null) : (values.findLast((each) => each !== null) ?? null);
}

function spoken(chart: ChartData, x: number[]): string {
  const told = chart.curves.map((curve) => {
    const known = curve.values.filter((each): each is number => each !== null);
    return `${curve.name} from ${number(known[0])} to ${number(known[known.length - 1])}`;
  });
  return `${chart.title}, ${x.length} steps: ${told.join("; ")}`;
}
