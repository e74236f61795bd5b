import type { VNode } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { RunStore } from "../data/store";
import { type Choice, choose } from "../lib/choose";
import { asCsv, sortRows, tableColumns } from "../lib/columns";
import { COLUMN_NAMES, FilterError, parseFilter } from "../lib/filter";
import { count, number, plural } from "../lib/format";
import { type Route, setQuery } from "../lib/router";
import { mean } from "../lib/stats";
import { useKeys } from "../lib/keys";
import { EpisodeTable } from "../ui/episode_table";
import { Empty, Text, copyText } from "../ui/bits";
import { EpisodesPair } from "./episodes_pair";

interface Chosen {
  choice: Choice | null;
  /** The filter that made it. */
  query: string;
  problem: string | null;
  reading: string | null;
}

/** The rows that the filter of the address keeps, again whenever the run grows. */
function useChoice(store: RunStore, query: string): Chosen {
  const [state, setState] = useState<Chosen>({ choice: null, query, problem: null, reading: null });
  useEffect(() => {
    const stop = new AbortController();
    const fail = (error: unknown): void => {
      if (stop.signal.aborted) return;
      const text = error instanceof Error ? error.message : String(error);
      // Rows of an earlier filter would pass for those of this one.
      setState({ choice: null, query, problem: error instanceof FilterError ? `filter: ${text}` : text, reading: null });
    };
    try {
      const told = (reading: string): void => {
        if (!stop.signal.aborted) setState((before) => ({ ...before, problem: null, reading }));
      };
      choose(store, parseFilter(query), stop.signal, told).then((choice) => {
        if (!stop.signal.aborted) setState({ choice, query, problem: null, reading: null });
      }, fail);
    } catch (error) {
      fail(error);
    }
    return () => stop.abort();
  }, [store, query, store.index.version, store.meta?.kind]);
  return state;
}

export function Episodes({ store, route, say }: { store: RunStore; route: Route; say: (text: string) => void }): VNode {
  const query = route.query.get("q") ?? "";
  const sort = route.query.get("sort") ?? "";
  const { choice, problem, reading, query: applied } = useChoice(store, query);
  const columns = tableColumns(store).filter((column) => !column.pending);
  const rows = useMemo(
    () => (choice ? sortRows(choice.rows, columns, sort) : []),
    [choice, sort, store.version],
  );
  const field = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => field.current?.focus() });
  const [mark, and] = [route.query.get("mark"), route.query.get("and")];
  if (mark !== null && and !== null) return <EpisodesPair store={store} ids={[mark, and]} />;
  const rewards = rows.map((row) => store.index.number("reward", row)).filter((each) => !Number.isNaN(each));
  const all = store.index.rows().length;
  const summary = choice
    ? `${query ? `${count(rows.length)} of ${plural(all, "episode")}` : plural(all, "episode")} \u00b7 mean reward over episodes ${number(mean(rewards))}`
    : "";
  const copyCsv = (): void => void copyText(asCsv(rows, columns)).then(() => say("rows copied as CSV"));
  return (
    <div class="episodes">
      <div class="toolbar">
        <FilterField query={query} problem={problem} field={field} />
        <span class="dim summary" role="status" aria-live="polite" data-ms={choice?.ms.toFixed(2)} data-query={applied}>
          {reading ?? summary}
        </span>
        <span class="top-space" />
        {mark !== null && (
          <span class="dim">
            marked <Text value={mark} line />: x on another opens both
          </span>
        )}
        <button type="button" class="button" onClick={copyCsv}>
          Copy CSV
        </button>
      </div>
      {problem !== null && (
        <p class="filter-problem" role="alert" id="filter-problem">
          {problem}
        </p>
      )}
      {problem === null && <Rows {...{ store, rows, columns, sort, all, mark, query }} ready={choice !== null} />}
    </div>
  );
}

interface RowsProps {
  store: RunStore;
  rows: number[];
  columns: ReturnType<typeof tableColumns>;
  sort: string;
  all: number;
  mark: string | null;
  query: string;
  ready: boolean;
}

function Rows({ store, rows, columns, sort, all, mark, query, ready }: RowsProps): VNode {
  if (rows.length) return <EpisodeTable {...{ store, rows, columns, sort, mark }} />;
  if (!ready || !store.complete.has("index")) return <Empty title="Reading the index" />;
  if (query && all) {
    const isExact = store.meta?.kind !== "run" && /\b(task|group)(_id)?=/.test(query);
    return (
      <Empty title="No episode matches">
        {isExact && <p>In a training, @ and a number follow the id of a task: task:000004* finds all of them.</p>}
        <button type="button" class="button" onClick={() => setQuery("q", null)}>
          Clear the filter
        </button>
      </Empty>
    );
  }
  return <Empty title="No episode yet">The first one appears here once it has ended.</Empty>;
}

interface FieldProps {
  query: string;
  problem: string | null;
  field: { current: HTMLInputElement | null };
}

function FilterField({ query, problem, field }: FieldProps): VNode {
  const [text, setText] = useState(query);
  const timer = useRef(0);
  useEffect(() => {
    if (document.activeElement !== field.current) setText(query);
  }, [query]);
  const typed = (value: string, now = false): void => {
    setText(value);
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setQuery("q", value.trim()), now ? 0 : 200);
  };
  const keyed = (event: KeyboardEvent): void => {
    const input = event.currentTarget as HTMLInputElement;
    if (event.key === "Enter") typed(input.value, true);
    if (event.key === "Escape") input.blur();
    if (event.key !== "Tab" || event.shiftKey) return;
    const completed = completion(input.value.slice(0, input.selectionStart ?? input.value.length));
    if (completed === null) return;
    event.preventDefault();
    typed(completed + input.value.slice(input.selectionStart ?? input.value.length));
  };
  return (
    <input
      ref={field}
      class="filter"
      type="search"
      spellcheck={false}
      autocomplete="off"
      aria-label="filter"
      aria-invalid={problem !== null}
      aria-describedby={problem !== null ? "filter-problem" : undefined}
      placeholder={'filter: reward<1 -stop=terminated act>400 "apples"'}
      title={'COLUMN<VALUE, COLUMN:PATTERN*, "text", i:"text"; - negates, or joins. Tab completes a column. "text" is searched in prompts, actions and observations, error:*text* in errors.'}
      value={text}
      onInput={(event) => typed(event.currentTarget.value)}
      onKeyDown={keyed}
    />
  );
}

/** Return the text with its last word completed to the one column that begins with it, or null. */
function completion(text: string): string | null {
  const word = /(?:^|[\s-])([A-Za-z_][\w.]*)$/.exec(text)?.[1];
  if (!word) return null;
  const fitting = COLUMN_NAMES.filter((name) => name.startsWith(word) && name !== word);
  const [first] = fitting;
  if (first === undefined) return null;
  let end = first.length;
  for (const name of fitting) while (!name.startsWith(first.slice(0, end))) end--;
  return end > word.length ? text.slice(0, text.length - word.length) + first.slice(0, end).replace("KEY", "") : null;
}
