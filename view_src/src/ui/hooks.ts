import { useEffect, useState } from "preact/hooks";
import { type RunStore, isEpisode } from "../data/store";
import type { Episode } from "../data/types";
import { type Route, parseRoute } from "../lib/router";

/** The route of the address, as it changes. */
export function useRoute(): Route {
  const [route, setRoute] = useState(() => parseRoute(location.hash));
  useEffect(() => {
    const changed = (): void => setRoute(parseRoute(location.hash));
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return route;
}

/** Render again when the store changes; returns its version. */
export function useStore(store: RunStore): number {
  const [version, setVersion] = useState(store.version);
  useEffect(() => {
    setVersion(store.version);
    return store.subscribe(() => setVersion(store.version));
  }, [store]);
  return version;
}

/** Render again when one of some stores changes; returns their versions. */
export function useStores(stores: RunStore[]): string {
  const version = stores.map((store) => `${store.run}:${store.version}`).join();
  const [, setVersion] = useState(version);
  useEffect(() => {
    const changed = (): void => setVersion(stores.map((store) => `${store.run}:${store.version}`).join());
    changed();
    const stops = stores.map((store) => store.subscribe(changed));
    return () => stops.forEach((stop) => stop());
  }, [stores.map((store) => store.run).join()]);
  return version;
}

export interface Loaded<T> {
  value: T | null;
  problem: string | null;
}

/** Read something whenever the key changes; what an older key asked for is dropped. */
export function useLoaded<T>(key: string | null, read: () => Promise<T>): Loaded<T> {
  const [state, setState] = useState<Loaded<T> & { key: string | null }>({ key: null, value: null, problem: null });
  useEffect(() => {
    if (key === null) return undefined;
    let dropped = false;
    read().then(
      (value) => dropped || setState({ key, value, problem: null }),
      (error: unknown) =>
        dropped || setState({ key, value: null, problem: error instanceof Error ? error.message : String(error) }),
    );
    return () => {
      dropped = true;
    };
  }, [key]);
  // The earlier value stays until the next one is here, so that nothing flickers.
  return { value: state.value, problem: state.key === key ? state.problem : null };
}

/** The episodes of rows; those that cannot be read are left out, with the first reason. */
export function useEpisodes(store: RunStore, rows: number[]): Loaded<{ rows: number[]; episodes: Episode[]; failed: string[] }> {
  const key = rows.length ? rows.map((row) => store.index.at(row).join(":")).join(",") : null;
  return useLoaded(key, async () => {
    const answers = await store.readEpisodes(rows);
    const read: number[] = [];
    const episodes: Episode[] = [];
    const failed: string[] = [];
    answers.forEach((answer, position) => {
      if (isEpisode(answer)) {
        read.push(rows[position] ?? -1);
        episodes.push(answer);
      } else {
        failed.push(answer.error);
      }
    });
    return { rows: read, episodes, failed };
  });
}
