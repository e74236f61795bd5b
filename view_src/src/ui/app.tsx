import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { RunStore, Stores } from "../data/store";
import type { Runs } from "../data/types";
import { type Route, go, links } from "../lib/router";
import { useKeys } from "../lib/keys";
import { toggleTheme } from "../lib/theme";
import { Compare } from "../screens/compare";
import { EpisodeScreen } from "../screens/episode";
import { Episodes } from "../screens/episodes";
import { Overview } from "../screens/overview";
import { RunList } from "../screens/runs";
import { TaskScreen } from "../screens/task";
import { Training } from "../screens/training";
import { Empty, copyText } from "./bits";
import { Header, compareLink } from "./header";
import { Help } from "./help";
import { useLoaded, useRoute, useStore } from "./hooks";

/** What is painted before any data is read. */
export function Shell(): VNode {
  return (
    <>
      <header class="top">
        <span class="brand">agentenv view</span>
      </header>
      <main id="main">
        <Empty title="Reading the run" />
      </main>
    </>
  );
}

const titles: Record<Route["screen"], string> = {
  runs: "runs", overview: "overview", episodes: "episodes", task: "task", episode: "episode", training: "training",
  compare: "compare",
};

export function App({ stores }: { stores: Stores }): VNode {
  const route = useRoute();
  const runs = useLoaded("runs", () => stores.source.runs());
  const [help, setHelp] = useState(false);
  const [said, setSaid] = useState("");
  const say = (text: string): void => {
    setSaid(text);
    setTimeout(() => setSaid(""), 2000);
  };
  useKeys({
    "?": () => setHelp(true),
    b: () => toggleTheme(),
    y: () => void copyText(location.href).then(() => say("address copied")),
    "g o": () => go(links.overview(route.run)),
    "g e": () => go(links.episodes(route.run)),
    "g t": () => go(links.training(route.run)),
    "g c": () => runs.value && go(compareLink(runs.value, route.run)),
  });
  const where = `${route.screen}/${route.run}/${route.id}`;
  const main = useRef<HTMLElement>(null);
  const first = useRef(true);
  useEffect(() => {
    const named = route.id ? ` ${route.id}` : "";
    document.title = `${titles[route.screen]}${named} \u2013 agentenv view`;
    // A new screen begins at its top, and with the focus on it; the first one keeps what the browser restored.
    if (!first.current) {
      window.scrollTo(0, 0);
      main.current?.focus({ preventScroll: true });
    }
    first.current = false;
  }, [where]);
  if (runs.problem !== null) return <Problem text={runs.problem} />;
  if (runs.value === null) return <Shell />;
  return (
    <>
      <a class="skip" href={location.hash} onClick={(event) => (event.preventDefault(), main.current?.focus())}>
        to the content
      </a>
      <Inside key={route.screen === "compare" ? "compare" : route.run} {...{ stores, route, runs: runs.value, main }} help={() => setHelp(true)} say={say} />
      {help && <Help close={() => setHelp(false)} />}
      <div class={`toast ${said ? "shown" : ""}`} role="status">
        {said}
      </div>
    </>
  );
}

function Problem({ text }: { text: string }): VNode {
  return (
    <>
      <header class="top">
        <span class="brand">agentenv view</span>
      </header>
      <main id="main">
        <Empty title={text} />
      </main>
    </>
  );
}

interface InsideProps {
  stores: Stores;
  route: Route;
  runs: Runs;
  main: { current: HTMLElement | null };
  help: () => void;
  say: (text: string) => void;
}

function Inside({ stores, route, runs, main, help, say }: InsideProps): VNode {
  const many = runs.runs.length > 1;
  const listed = route.screen === "runs" && many;
  const known = runs.runs.some((each) => each.run === route.run);
  if (listed || !known) {
    return (
      <>
        <Header {...{ route, runs, help }} store={null} />
        <main id="main" tabIndex={-1} ref={main}>
          <RunList stores={stores} runs={runs} unknown={known ? null : route.run} />
        </main>
      </>
    );
  }
  const screen = route.screen === "runs" ? { ...route, screen: "overview" as const } : route;
  const isCompared = screen.screen === "compare";
  const store = stores.open(route.run, isCompared ? [route.other] : [], isCompared ? ["index", "steps"] : undefined);
  return <WithStore {...{ stores, runs, main, help, say, store }} route={screen} />;
}

function WithStore({ stores, route, runs, main, help, say, store }: InsideProps & { store: RunStore }): VNode {
  useStore(store);
  return (
    <>
      <Header {...{ route, runs, help, store }} />
      {stores.source.note !== null && <p class="notice">{stores.source.note}</p>}
      {store.problem !== null && <p class="notice bad">{store.problem}</p>}
      <main id="main" tabIndex={-1} ref={main} class={`screen-${route.screen}`}>
        <Chosen {...{ stores, route, runs, store, say }} />
      </main>
    </>
  );
}

function Chosen({ stores, route, runs, store, say }: Omit<InsideProps, "main" | "help"> & { store: RunStore }): VNode {
  switch (route.screen) {
    case "episodes":
      return <Episodes {...{ store, route, say }} />;
    case "episode":
      return <EpisodeScreen key={route.id} {...{ store, route, say }} />;
    case "task":
      return <TaskScreen key={route.id} {...{ store, route }} />;
    case "training":
      return <Training {...{ stores, store, route, runs }} />;
    case "compare":
      return <Compare {...{ stores, route, runs }} />;
    default:
      return <Overview {...{ store, route }} />;
  }
}
