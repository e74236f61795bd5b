import type { VNode } from "preact";
import { useMemo, useState } from "preact/hooks";
import type { RunStore } from "../data/store";
import { count, fixed, number, plural } from "../lib/format";
import { type Sibling, type Strand, strandsOf } from "../lib/group";
import { contentText, promptTexts } from "../lib/messages";
import { type Route, go, links } from "../lib/router";
import { mean, spread } from "../lib/stats";
import { episodeModel, newestVersion } from "../lib/tokens";
import { trainedById } from "../lib/trained";
import { oneLine } from "../lib/visible";
import { useKeys } from "../lib/keys";
import { Empty, Text } from "../ui/bits";
import { ColorBar, nextColor } from "../ui/color_bar";
import { useEpisodes } from "../ui/hooks";
import { Unknown } from "./episode";
import { useTokenChoices } from "./episode_tokens";
import { Decided } from "./task_decided";
import { StrandColumns } from "./task_columns";
import { shortId } from "./task_names";
import { StrandTable } from "./task_table";
import { OverTraining } from "./task_training";

/** From this many different strands on, two are open beside each other, and the others in a table. */
const MOST_OPEN = 8;

/** The episodes of rows with the models of their tokens; null while they are read. */
export function useSiblings(store: RunStore, rows: number[]): { siblings: Sibling[] | null; failed: string[]; problem: string | null } {
  const { value, problem } = useEpisodes(store, rows);
  const trained = trainedById(store);
  const isOneGroup = new Set(rows.map((row) => store.index.text("group_id", row))).size < 2;
  const siblings = useMemo(
    () =>
      value?.episodes.map(
        (episode, k): Sibling => ({
          row: value.rows[k] ?? -1,
          name: isOneGroup ? shortId(episode.record.episode_id) : oneLine(episode.record.episode_id),
          episode,
          model: episodeModel(episode, store.texts, trained.get(episode.record.episode_id)?.advantages),
        }),
      ) ?? null,
    [value, trained, isOneGroup],
  );
  return { siblings, failed: value?.failed ?? [], problem };
}

export function TaskScreen({ store, route }: { store: RunStore; route: Route }): VNode {
  const group = store.index.group(route.id);
  const { siblings, failed, problem } = useSiblings(store, group?.rows ?? []);
  const ids = [...store.index.groups().keys()];
  const place = ids.indexOf(group?.id ?? route.id);
  const walk = (by: number): void => {
    const next = ids[place + by];
    if (next !== undefined) go(links.task(store.run, next));
  };
  useKeys({ J: () => walk(1), j: () => walk(1), K: () => walk(-1), k: () => walk(-1), u: () => go(links.overview(store.run)) });
  if (!group) return <Unknown store={store} id={route.id} what="task" />;
  if (problem !== null) return <Empty title={problem} />;
  if (!siblings) return <Empty title="Reading the siblings" />;
  return (
    <>
      <TaskHead {...{ store, siblings, walk, place }} id={route.id} all={ids.length} />
      {failed.length > 0 && (
        <p class="failure">
          {plural(failed.length, "sibling")} cannot be read: <Text value={failed[0] ?? ""} />
        </p>
      )}
      {siblings.length > 0 && <Siblings store={store} siblings={siblings} />}
      <OverTraining store={store} id={route.id} />
    </>
  );
}

interface HeadProps {
  store: RunStore;
  id: string;
  siblings: Sibling[];
  place: number;
  all: number;
  walk: (by: number) => void;
}

function TaskHead({ store, id, siblings, place, all, walk }: HeadProps): VNode {
  const record = siblings[0]?.episode.record;
  const label = record?.task?.label;
  const rewards = siblings.flatMap(({ episode }) => (typeof episode.record.reward === "number" ? [episode.record.reward] : []));
  const step = siblings.map(({ episode }) => trainedById(store).get(episode.record.episode_id)?.step).find((each) => each !== undefined);
  return (
    <>
      <div class="headline">
        <a class="up" href={links.overview(store.run)} title="overview (u)">
          ← overview
        </a>
        <h1 class="mono">
          <Text value={id} line />
        </h1>
        {label !== undefined && label !== null && (
          <span class="fact">
            <span class="dim">label</span> <strong class="mono">
              <Text value={contentText(label)} line />
            </strong>
          </span>
        )}
        <span class="fact">{plural(siblings.length, "sibling")}</span>
        <span class="fact">
          <span class="dim">mean</span> {fixed(mean(rewards), 3)} <span class="dim">spread</span> {fixed(rewards.length > 1 ? spread(rewards) : null, 3)}
        </span>
        {step !== undefined && (
          <a class="fact" href={links.training(store.run, { step })}>
            step {step}
          </a>
        )}
        <span class="top-space" />
        <span class="walk">
          <button type="button" class="button" aria-label="previous task" disabled={place <= 0} onClick={() => walk(-1)}>
            ‹
          </button>
          <span class="dim">
            task {count(place + 1)} of {count(all)}
          </span>
          <button type="button" class="button" aria-label="next task" disabled={place >= all - 1} onClick={() => walk(1)}>
            ›
          </button>
        </span>
      </div>
      {record && <Prompt texts={promptTexts(record)} />}
    </>
  );
}

const LONG = 1200;

function Prompt({ texts }: { texts: string[] }): VNode {
  const [open, setOpen] = useState(false);
  const all = texts.join("\n\n");
  const isLong = all.length > LONG;
  return (
    <div class="task-prompt text mono" dir="auto">
      <Text value={isLong && !open ? `${all.slice(0, LONG)} \u2026` : all} />
      {isLong && (
        <button type="button" class="more" onClick={() => setOpen(!open)}>
          {open ? "less" : "all of it"}
        </button>
      )}
    </div>
  );
}

export function Siblings({ store, siblings }: { store: RunStore; siblings: Sibling[] }): VNode {
  const strands = useMemo(() => strandsOf(siblings), [siblings]);
  const [onlyDifferences, setOnly] = useState(false);
  const [reference, setReference] = useState(0);
  const [open, setOpen] = useState<number[]>([0, strands.length - 1]);
  const model = {
    hasLearner: siblings.some((each) => each.model.hasLearner),
    hasAdvantages: siblings.some((each) => each.model.hasAdvantages),
  };
  const choices = useTokenChoices(model);
  const newest = Math.max(...siblings.map((each) => newestVersion(each.model)));
  useKeys({
    c: () => choices.setColor(nextColor(choices.color, 1, model)),
    C: () => choices.setColor(nextColor(choices.color, -1, model)),
    t: () => choices.setTemplate(!choices.template),
    d: () => setOnly(!onlyDifferences),
  });
  const first = strands[reference] ?? strands[0];
  if (!first) return <Empty title="No sibling can be read" />;
  const many = strands.length > MOST_OPEN;
  const shown = many ? strands.filter((strand, k) => strand === first || open.includes(k)) : strands;
  const choose = (strand: Strand): void => setReference(strands.indexOf(strand));
  return (
    <>
      <Decided store={store} strands={strands} />
      {many && <StrandTable {...{ store, strands, open, setOpen }} reference={first} />}
      {siblings.some((each) => each.model.numTokens > 0) && <ColorBar {...choices} {...{ model, newest }} />}
      <div class="differences">
        <strong>
          {strands.length === 1
            ? siblings.length > 1
              ? "All took the same actions."
              : "One episode."
            : `${number(strands.length)} different of ${siblings.length}`}
        </strong>
        {strands.length > 1 && (
          <>
            <span class="dim">
              gray is shared with the reference, <span class="t parts">underlined</span> is where a sibling parts from it
            </span>
            <label class="check">
              <input type="checkbox" checked={onlyDifferences} onChange={(event) => setOnly(event.currentTarget.checked)} /> only
              what differs
            </label>
          </>
        )}
      </div>
      <StrandColumns
        {...{ store, strands: shown, newest, onlyDifferences, choose }}
        reference={first}
        color={choices.color}
        template={choices.template}
      />
    </>
  );
}
