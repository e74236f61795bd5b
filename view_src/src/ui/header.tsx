import type { VNode } from "preact";
import type { RunStore } from "../data/store";
import type { Runs } from "../data/types";
import { comparable } from "../lib/comparison";
import { bytes, count } from "../lib/format";
import { type Route, go, links } from "../lib/router";
import { toggleTheme } from "../lib/theme";
import { oneLine } from "../lib/visible";
import { Text } from "./bits";

interface HeaderProps {
  route: Route;
  runs: Runs;
  store: RunStore | null;
  help: () => void;
}

export function Header({ route, runs, store, help }: HeaderProps): VNode {
  return (
    <header class="top">
      <a class="brand" href={links.runs()}>
        agentenv view
      </a>
      {store && <RunName {...{ route, runs, store }} />}
      {store && <Tabs {...{ route, runs, store }} />}
      <span class="top-space" />
      {store && <State store={store} />}
      <button type="button" class="button icon" title="dark or light (b)" aria-label="dark or light" onClick={toggleTheme}>
        ◐
      </button>
      <button type="button" class="button icon" title="keys (?)" aria-label="keys" onClick={help}>
        ?
      </button>
    </header>
  );
}

function RunName({ route, runs, store }: { route: Route; runs: Runs; store: RunStore }): VNode {
  const change = (event: Event): void => {
    if (event.currentTarget instanceof HTMLSelectElement) go(links.overview(Number(event.currentTarget.value)));
  };
  const { meta } = store;
  const about = [meta?.env, meta?.model].filter((each): each is string => Boolean(each));
  const hash = meta?.tokenizer?.sha256;
  const name = runs.runs.find((each) => each.run === route.run)?.name ?? "";
  return (
    <span class="run-name">
      <strong class="print-only">
        <Text value={name} line />
      </strong>
      {runs.runs.length > 1 ? (
        <select aria-label="run" value={String(route.run)} onChange={change}>
          {runs.runs.map((each) => (
            <option key={each.run} value={String(each.run)}>
              {oneLine(each.name)}
            </option>
          ))}
        </select>
      ) : (
        <strong title={meta ? oneLine(meta.path) : ""}>
          <Text value={runs.runs[0]?.name ?? ""} line />
        </strong>
      )}
      <span class="dim run-about" title={hash ? `tokenizer ${hash}` : undefined}>
        <Text value={about.join(" \u00b7 ")} line />
      </span>
    </span>
  );
}

function Tabs({ route, runs, store }: { route: Route; runs: Runs; store: RunStore }): VNode {
  const { run } = route;
  const tabs: [string, string, boolean][] = [
    ["Overview", links.overview(run), route.screen === "overview"],
    ["Episodes", links.episodes(run), route.screen === "episodes"],
  ];
  if (store.meta?.kind === "train") tabs.push(["Training", links.training(run), route.screen === "training"]);
  if (comparable(runs).length > 1) {
    tabs.push(["Compare", compareLink(runs, run), route.screen === "compare"]);
  }
  return (
    <nav class="tabs" aria-label="screens">
      {tabs.map(([name, href, here]) => (
        <a key={name} href={href} aria-current={here ? "page" : undefined}>
          {name}
        </a>
      ))}
    </nav>
  );
}

/**
 * Return the address that compares a run with its neighbor of the same kind, if there is one: the earlier one as A.
 * Numbers of runs may have gaps.
 */
export function compareLink(runs: Runs, run: number): string {
  const kind = runs.runs.find((each) => each.run === run)?.kind;
  const all = comparable(runs);
  const alike = all.filter((each) => each.kind === kind);
  const numbers = (alike.length > 1 ? alike : all).map((each) => each.run);
  const place = Math.max(0, numbers.indexOf(run));
  const first = place === 0 ? 0 : place - 1;
  return links.compare(numbers[first] ?? run, numbers[first + 1] ?? run);
}

/** What goes on: reading, or a run that is being written. */
function State({ store }: { store: RunStore }): VNode {
  const { progress, meta, index } = store;
  const planned = meta?.metrics?.num_episodes;
  let text = "";
  if (progress) text = `indexing ${bytes(progress[0])} of ${bytes(progress[1])}`;
  else if (meta?.is_writing) text = `live \u00b7 ${count(index.rows().length)}${planned ? ` of ${count(planned)}` : ""}`;
  return (
    <span class={`state ${meta?.is_writing ? "live" : ""}`} role="status" aria-live="polite">
      {text}
    </span>
  );
}
