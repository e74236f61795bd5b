// A table of which only the rows in sight are in the page.
import type { VNode } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { RunStore } from "../data/store";
import type { TableColumn } from "../lib/columns";
import { STEP_COLUMNS } from "../lib/filter";
import { go, links, setQuery } from "../lib/router";
import { oneLine } from "../lib/visible";
import { useKeys } from "../lib/keys";
import { OutcomeMark, Text, outcomeOfRow } from "./bits";

export const ROW_PX = 28;
const BEYOND = 12;

interface TableProps {
  store: RunStore;
  rows: number[];
  columns: TableColumn[];
  sort: string;
  /** Id of the episode that is marked to stand beside another one. */
  mark: string | null;
}

export function EpisodeTable({ store, rows, columns, sort, mark }: TableProps): VNode {
  const box = useRef<HTMLDivElement>(null);
  const [range, setRange] = useState<[number, number]>([0, 50]);
  const [chosen, setChosen] = useState<string | null>(null);
  const place = chosen === null ? -1 : rows.findIndex((row) => store.index.text("episode_id", row) === chosen);
  const seen = (): void => {
    const { current } = box;
    if (!current) return;
    const first = Math.max(0, Math.floor(current.scrollTop / ROW_PX) - BEYOND);
    const last = Math.ceil((current.scrollTop + current.clientHeight) / ROW_PX) + BEYOND;
    setRange((before) => (before[0] === first && before[1] === last ? before : [first, last]));
  };
  useLayoutEffect(seen, [rows.length]);
  useEffect(() => {
    window.addEventListener("resize", seen);
    return () => window.removeEventListener("resize", seen);
  }, []);
  const move = (by: number): void => {
    const next = Math.min(rows.length - 1, Math.max(0, place < 0 ? 0 : place + by));
    setChosen(store.index.text("episode_id", rows[next] ?? 0));
    const { current } = box;
    if (!current) return;
    const [top, bottom] = [next * ROW_PX, (next + 2) * ROW_PX];
    if (top < current.scrollTop) current.scrollTop = top;
    if (bottom > current.scrollTop + current.clientHeight) current.scrollTop = bottom - current.clientHeight;
  };
  const row = place < 0 ? undefined : rows[place];
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    Enter: () => row !== undefined && go(links.episode(store.run, store.index.text("episode_id", row))),
    u: () => go(links.overview(store.run)),
    x: () => chosen !== null && setQuery(mark === null || mark === chosen ? "mark" : "and", mark === chosen ? null : chosen),
  });
  const shown = rows.slice(range[0], range[1]);
  return (
    <div class="grid" ref={box} onScroll={seen} role="grid" aria-rowcount={rows.length + 1} aria-label="episodes" tabIndex={0}>
      <div class="grid-head" role="row" aria-rowindex={1}>
        {columns.map((column) => (
          <HeadCell key={column.key} column={column} sort={sort} />
        ))}
        <span role="columnheader" class="grid-cell grow">
          last action
        </span>
      </div>
      <div class="grid-body" style={{ height: `${rows.length * ROW_PX}px` }}>
        {shown.map((each, k) => (
          <Row key={each} {...{ store, columns }} row={each} place={range[0] + k} chosen={each === row} />
        ))}
      </div>
    </div>
  );
}

function HeadCell({ column, sort }: { column: TableColumn; sort: string }): VNode {
  const isSorted = sort.replace(/^-/, "") === column.key;
  const isDown = sort.startsWith("-");
  // Numbers begin with the greatest, texts with the first.
  const first = column.isNumber ? `-${column.key}` : column.key;
  const second = column.isNumber ? column.key : `-${column.key}`;
  const next = !isSorted ? first : sort === first ? second : null;
  const width = { width: `${column.width}px` };
  const filter = STEP_COLUMNS.includes(column.key) ? "" : `; filter by ${oneLine(column.key)}`;
  return (
    <span
      role="columnheader"
      class={`grid-cell ${column.isNumber ? "right" : ""}`}
      style={width}
      aria-sort={isSorted ? (isDown ? "descending" : "ascending") : undefined}
    >
      <button type="button" title={`${column.title}; sort${filter}`} onClick={() => setQuery("sort", next)}>
        {column.name}
        {isSorted && <span aria-hidden="true">{isDown ? " \u2193" : " \u2191"}</span>}
      </button>
    </span>
  );
}

interface RowProps {
  store: RunStore;
  columns: TableColumn[];
  row: number;
  place: number;
  chosen: boolean;
}

function Row({ store, columns, row, place, chosen }: RowProps): VNode {
  const id = store.index.text("episode_id", row);
  const head = store.head(row);
  return (
    <div
      class={`grid-row ${chosen ? "chosen" : ""}`}
      role="row"
      aria-rowindex={place + 2}
      aria-selected={chosen}
      data-episode={id}
      style={{ top: `${place * ROW_PX}px` }}
      onClick={(event) => {
        if (!(event.target instanceof HTMLAnchorElement)) go(links.episode(store.run, id));
      }}
    >
      {columns.map((column) => (
        <span key={column.key} role="gridcell" class={`grid-cell ${column.isNumber ? "right" : ""}`} style={{ width: `${column.width}px` }}>
          {column.key === "reward" && <OutcomeMark outcome={outcomeOfRow(store, row)} />}
          {column.key === "episode" ? (
            <a class="mono" href={links.episode(store.run, id)}>
              <bdi>{oneLine(id)}</bdi>
            </a>
          ) : column.isNumber ? (
            column.text(row)
          ) : (
            <Text value={column.text(row) || "\u2014"} line />
          )}
        </span>
      ))}
      <span role="gridcell" class="grid-cell grow mono dim">
        {head?.error !== undefined ? head.error : <bdi>{oneLine(head?.last_action ?? "")}</bdi>}
      </span>
    </div>
  );
}
