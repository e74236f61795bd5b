import type { VNode } from "preact";
import type { RunStore } from "../data/store";
import { setQuery } from "../lib/router";
import { useKeys } from "../lib/keys";
import { Empty } from "../ui/bits";
import { Siblings, useSiblings } from "./task";

/** Two marked episodes beside each other, aligned by turn. */
export function EpisodesPair({ store, ids }: { store: RunStore; ids: string[] }): VNode {
  const rows = ids.flatMap((id) => store.index.find(id) ?? []);
  const { siblings, failed, problem } = useSiblings(store, rows);
  const back = (): void => {
    setQuery("mark", null);
    setQuery("and", null);
  };
  useKeys({ u: back, Escape: back });
  const lost = problem ?? failed[0] ?? (rows.length < ids.length && store.complete.has("index") ? "One of them is not in this run" : null);
  return (
    <>
      <div class="headline">
        <button type="button" class="link-button" onClick={back}>
          ← all episodes
        </button>
        <h1>Two episodes</h1>
      </div>
      {lost !== null && <Empty title={lost} />}
      {lost === null && siblings && <Siblings store={store} siblings={siblings} />}
    </>
  );
}
