// An episode at a glance: a bar a token, the root of its -log p; who made it by color.
import type { VNode } from "preact";
import { useMemo } from "preact/hooks";
import { ACTION, type EpisodeModel, KINDS } from "../lib/tokens";

const HEIGHT = 30;
const MOST_COLUMNS = 900;
/** -log p at which a bar is full. */
const FULL = 8;

interface Column {
  segment: number;
  token: number;
  kind: number;
  /** The least log-probability of its tokens. */
  logprob: number;
}

function columnsOf(model: EpisodeModel): Column[] {
  const width = Math.max(1, Math.ceil(model.numTokens / MOST_COLUMNS));
  const columns: Column[] = [];
  for (const segment of model.segments) {
    for (let start = 0; start < segment.ids.length; start += width) {
      const column: Column = { segment: segment.index, token: start, kind: segment.kinds[start] ?? 0, logprob: 0 };
      for (let token = start; token < Math.min(start + width, segment.ids.length); token++) {
        const logprob = segment.logprobs[token] ?? Number.NaN;
        if (segment.kinds[token] !== ACTION) continue;
        if (column.kind === ACTION && !(logprob < column.logprob)) continue;
        column.kind = ACTION;
        column.token = token;
        column.logprob = Number.isNaN(logprob) ? 0 : logprob;
      }
      columns.push(column);
    }
  }
  return columns;
}

function barHeight(column: Column): number {
  if (column.kind !== ACTION) return 3;
  return Math.max(3, Math.min(1, Math.sqrt(-column.logprob / FULL)) * (HEIGHT - 2));
}

/** Return the outline of all bars of a class. */
function path(columns: Column[], tone: (column: Column) => string, wanted: string): string {
  return columns
    .map((column, x) => {
      if (tone(column) !== wanted) return "";
      const height = barHeight(column);
      return `M${x} ${HEIGHT}v${(-height).toFixed(1)}h.86v${height.toFixed(1)}z`;
    })
    .join("");
}

const toneOf = (column: Column): string => {
  if (column.kind !== ACTION) return KINDS[column.kind] ?? "prompt";
  return column.logprob < -1 ? "low" : "action";
};

interface StripProps {
  model: EpisodeModel;
  selected: { segment: number; token: number } | null;
  open: (place: { segment: number; token: number }) => void;
}

export function Strip({ model, selected, open }: StripProps): VNode | null {
  const columns = useMemo(() => columnsOf(model), [model]);
  const paths = useMemo(
    () => ["prompt", "feedback", "close", "action", "low"].map((tone) => [tone, path(columns, toneOf, tone)] as const),
    [columns],
  );
  if (!columns.length) return null;
  const clicked = (event: MouseEvent): void => {
    const box = (event.currentTarget as SVGElement).getBoundingClientRect();
    const column = columns[Math.floor(((event.clientX - box.left) / box.width) * columns.length)];
    if (column) open({ segment: column.segment, token: column.token });
  };
  const at = selected ? columns.findLastIndex((each) => each.segment === selected.segment && each.token <= selected.token) : -1;
  return (
    <svg
      class="strip"
      viewBox={`0 0 ${columns.length} ${HEIGHT}`}
      preserveAspectRatio="none"
      role="img"
      onClick={clicked}
    >
      <title>improbability of each token, in every color mode: orange is below p .37; click to go there</title>
      {paths.map(([tone, d]) => (
        <path key={tone} class={`strip-${tone}`} d={d} />
      ))}
      {at >= 0 && <rect class="strip-here" x={at} y="0" width="1" height={HEIGHT} />}
    </svg>
  );
}
