import type { VNode } from "preact";
import { useMemo } from "preact/hooks";
import type { RunStore } from "../data/store";
import type { Episode } from "../data/types";
import { decimals, fixed, number, seconds, signed } from "../lib/format";
import { near } from "../lib/near";
import { type Route, go, links, setQuery } from "../lib/router";
import { episodeModel } from "../lib/tokens";
import { trainedById } from "../lib/trained";
import { useKeys } from "../lib/keys";
import { markdownOf } from "../lib/markdown";
import { Empty, OutcomeMark, Text, copyText, outcomeOfRow } from "../ui/bits";
import { useEpisodes } from "../ui/hooks";
import { Messages } from "./episode_messages";
import { RecordView } from "./episode_record";
import { Replay } from "./episode_replay";
import { TokenView } from "./episode_tokens";

interface ScreenProps {
  store: RunStore;
  route: Route;
  say: (text: string) => void;
}

export function EpisodeScreen({ store, route, say }: ScreenProps): VNode {
  const row = store.index.find(route.id);
  const { value, problem } = useEpisodes(store, row === undefined ? [] : [row]);
  useKeys({ u: () => go(links.overview(store.run)) });
  if (row === undefined) return <Unknown store={store} id={route.id} />;
  if (problem !== null) return <Empty title={problem} />;
  const failed = value?.failed[0];
  if (failed !== undefined) {
    return (
      <Empty title="This episode cannot be read">
        <Text value={failed} />
      </Empty>
    );
  }
  const episode = value?.episodes[0];
  if (!episode) return <Empty title="Reading the episode" />;
  return <Loaded {...{ store, route, say, row, episode }} />;
}

export function Unknown({ store, id, what = "episode" }: { store: RunStore; id: string; what?: "episode" | "task" }): VNode {
  if (!store.complete.has("index")) return <Empty title="Reading the index" />;
  const ids = what === "episode" ? store.index.episodeIds() : [...store.index.groups().keys()];
  const close = near(id, ids.slice(0, 20000), 5);
  const link = what === "episode" ? links.episode : links.task;
  return (
    <Empty title={`There is no ${what} with this id`}>
      <p>
        <code>
          <Text value={id} line />
        </code>{" "}
        is not among the {ids.length} of this run.
      </p>
      {close.length > 0 && (
        <p>
          Near:{" "}
          {close.map((each) => (
            <a key={each} class="mono near" href={link(store.run, each)}>
              <Text value={each} line />
            </a>
          ))}
        </p>
      )}
      <p>
        <a class="up" href={links.overview(store.run)}>
          ← overview
        </a>
      </p>
    </Empty>
  );
}

const STEP = "learned at step";

const TABS = [
  ["tokens", "Tokens"],
  ["messages", "Messages"],
  ["record", "Record"],
  ["replay", "Replay"],
] as const;

function Loaded({ store, route, say, row, episode }: ScreenProps & { row: number; episode: Episode }): VNode {
  const trained = trainedById(store).get(route.id);
  const model = useMemo(
    () => episodeModel(episode, store.texts, trained?.advantages),
    [episode, trained],
  );
  const groupId = store.index.text("group_id", row);
  const siblings = store.index.groups().get(groupId)?.rows ?? [row];
  const hasTokens = model.numTokens > 0;
  const asked = route.query.get("tab") ?? (hasTokens ? "tokens" : "messages");
  const place = siblings.indexOf(row);
  const sibling = (by: number): void => {
    const next = siblings[place + by];
    if (next !== undefined) go(links.episode(store.run, store.index.text("episode_id", next)));
  };
  useKeys({
    j: () => sibling(1),
    k: () => sibling(-1),
    J: () => goTask(store, groupId, 1),
    K: () => goTask(store, groupId, -1),
    u: () => go(links.task(store.run, groupId)),
    m: () => void copyText(markdownOf(episode, model, store.meta?.name ?? "")).then(() => say("episode copied as Markdown")),
  });
  return (
    <>
      <Head {...{ store, row, episode }} model={model} />
      {episode.record.error && <Failure episode={episode} />}
      <div class="subtabs" role="tablist" aria-label="views of the episode">
        {TABS.map(([key, name]) => (
          <button
            key={key}
            type="button"
            role="tab"
            aria-selected={asked === key}
            disabled={key === "tokens" && !hasTokens}
            onClick={() => setQuery("tab", key)}
          >
            {name}
          </button>
        ))}
        <span class="top-space" />
        <span class="dim sibling-walk">
          {siblings.length > 1 && `sibling ${place + 1} of ${siblings.length}`}
        </span>
      </div>
      {asked === "messages" && <Messages episode={episode} />}
      {asked === "record" && <RecordView episode={episode} />}
      {asked === "replay" && store.meta !== null && <Replay meta={store.meta} episode={episode} />}
      {asked !== "messages" && asked !== "record" && asked !== "replay" && (
        <TokenView {...{ store, route, row, episode, model, siblings, say }} />
      )}
    </>
  );
}

/** Go to the first episode of a neighboring task. */
function goTask(store: RunStore, groupId: string, by: number): void {
  const ids = [...store.index.groups().keys()];
  const next = ids[ids.indexOf(groupId) + by];
  const row = next === undefined ? undefined : store.index.groups().get(next)?.rows[0];
  if (row !== undefined) go(links.episode(store.run, store.index.text("episode_id", row)));
}

interface HeadProps {
  store: RunStore;
  row: number;
  episode: Episode;
  model: ReturnType<typeof episodeModel>;
}

function Head({ store, row, episode, model }: HeadProps): VNode {
  const { record, view } = episode;
  const trained = trainedById(store).get(record.episode_id);
  const versions = record.segments.flatMap((segment) => segment.policy_versions.map(([version]) => version));
  const [oldest, newest] = [Math.min(...versions), Math.max(...versions)];
  const known = model.turnAdvantages.filter((value): value is number => value !== null);
  const facts: [string, string][] = [];
  if (known.length) facts.push(["advantage", signed(known.reduce((sum, value) => sum + value, 0) / known.length)]);
  if (record.score !== null && record.score !== undefined && record.score !== record.reward) facts.push(["score", number(record.score)]);
  const label = record.task?.label;
  if (label !== null && label !== undefined) facts.push(["label", typeof label === "string" ? label : JSON.stringify(label)]);
  const step = trained?.step ?? view.learned?.step;
  if (step !== undefined) facts.push([STEP, String(step)]);
  if (versions.length && store.meta?.kind !== "run") facts.push(["weights", oldest === newest ? `${newest}` : `${oldest}\u2192${newest}`]);
  const duration = record.turns.reduce((sum, turn) => sum + (turn.generate_s ?? 0) + (turn.step_s ?? 0), 0);
  facts.push(["turns", String(record.turns.length)], ["time", seconds(duration)]);
  const cost = store.index.number("cost_usd", row);
  if (!Number.isNaN(cost)) facts.push(["cost", `$${fixed(cost, decimals(cost, 4))}`]);
  const requests = store.index.number("request_retries", row);
  if (requests > 0) facts.push(["request retries", String(requests)]);
  if (record.attempt) facts.push(["earlier attempts", String(record.attempt)]);
  const retries = store.index.number("step_retries", row);
  if (retries > 0) facts.push(["step retries", String(retries)]);
  return (
    <div class="headline">
      <a class="up" href={links.task(store.run, store.index.text("group_id", row))} title="the task (u)">
        ← task <Text value={store.index.text("group_id", row)} line />
      </a>
      <h1 class="mono">
        <Text value={record.episode_id} line />
      </h1>
      <span class={`verdict o-text-${outcomeOfRow(store, row)}`}>
        <OutcomeMark outcome={outcomeOfRow(store, row)} /> reward {number(record.reward ?? null)}
      </span>
      <span class="chip">{record.stop_reason ?? "not ended"}</span>
      {facts.map(([name, text]) => (
        <span key={name} class="fact">
          <span class="dim">{name}</span>{" "}
          {name === STEP ? <a href={links.training(store.run, { step: text })}>{text}</a> : <Text value={text} line />}
        </span>
      ))}
    </div>
  );
}

function Failure({ episode }: { episode: Episode }): VNode {
  const { error, attempt } = episode.record;
  return (
    <div class="failure" role="note">
      <strong>{error?.kind ?? "error"}</strong>
      {attempt ? ` after ${attempt} earlier attempt${attempt > 1 ? "s" : ""}` : ""}:{" "}
      <code>
        <Text value={`${error?.type ?? ""}: ${error?.message ?? ""}`} />
      </code>
      {error?.place && (
        <span class="dim">
          {" at "}
          <Text value={error.place} line />
        </span>
      )}
    </div>
  );
}
