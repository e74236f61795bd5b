import type { VNode } from "preact";
import type { RunStore } from "../data/store";
import type { StepLine } from "../data/types";
import { count, fixed, number, plural, signed } from "../lib/format";
import { GLYPHS, OUTCOME_NAMES, outcomeOf } from "../lib/outcome";
import { links, setQuery } from "../lib/router";
import { histogram, mean, spread } from "../lib/stats";
import { type Trained, episodesOf, meanAdvantage } from "../lib/trained";
import { oneLine } from "../lib/visible";
import { Card, Empty, Folded, OutcomeMark, SignedBar, Text } from "../ui/bits";
import { Histogram } from "../ui/histogram";
import { Lanes } from "../ui/lanes";

interface StepProps {
  store: RunStore;
  step: number;
  steps: number[];
  walk: (by: number) => void;
  /** Step whose numbers these are compared with; null for the one before. */
  since: number | null;
  /** Steps of a mean, as in the curves. */
  smooth: number;
}

export function StepView({ store, step, steps, walk, since, smooth }: StepProps): VNode {
  const line = store.steps.get(`train:${step}`);
  const place = steps.indexOf(step);
  const trained = line ? episodesOf(line) : [];
  const kept = trained.filter((each) => each.kept).length;
  const rejected = line?.groups.filter((group) => group.rejected !== null) ?? [];
  return (
    <>
      <div class="headline step-head">
        <h1>Step {step}</h1>
        {line && (
          <>
            <span class="fact">{plural(trained.length, "episode")}, {count(kept)} kept</span>
            <span class="fact"><span class="dim">weights</span> {number(line.version ?? null)}</span>
            <span class="fact"><span class="dim">advantages by</span> <Text value={line.estimator ?? "\u2014"} line /></span>
            <span class="fact"><span class="dim">credit</span> <Text value={line.credit ?? "\u2014"} line /></span>
            {rejected.length > 0 && <span class="chip bad">{plural(rejected.length, "group")} rejected</span>}
          </>
        )}
        <span class="top-space" />
        <span class="walk">
          <button type="button" class="button" aria-label="previous step" disabled={place <= 0} onClick={() => walk(-1)}>
            ‹
          </button>
          <span class="dim">
            {step} of {steps[steps.length - 1]}
          </span>
          <button type="button" class="button" aria-label="next step" disabled={place >= steps.length - 1} onClick={() => walk(1)}>
            ›
          </button>
        </span>
      </div>
      <div class="overview-columns">
        {line ? (
          <div class="overview-side">
            <Card title="Episodes, by advantage">
              <StepEpisodes store={store} trained={trained} />
            </Card>
            <Lanes store={store} rows={trained.flatMap((each) => store.index.find(each.episodeId) ?? [])} />
          </div>
        ) : (
          <Card>
            <Empty title="The episodes of this step are not recorded">
              Trainings write steps.jsonl; this one has no line for step {step}.
            </Empty>
          </Card>
        )}
        <div class="overview-side">
          {line && <StepGroups store={store} line={line} />}
          {line && <Advantages trained={trained} />}
          <Numbers store={store} step={step} before={since ?? steps[place - 1]} {...{ steps, smooth }} />
        </div>
      </div>
    </>
  );
}

function StepEpisodes({ store, trained }: { store: RunStore; trained: Trained[] }): VNode {
  const value = (each: Trained): number => meanAdvantage(each);
  const most = Math.max(...trained.map((each) => Math.abs(value(each))).filter((each) => !Number.isNaN(each)), 0);
  // Whitening over the batch leaves groups without spread with a small advantage.
  const isMoved = (each: Trained): boolean => Math.abs(value(each)) > 0.05 * most;
  const moved = trained.filter(isMoved).sort((a, b) => value(b) - value(a));
  const rest = trained.filter((each) => !isMoved(each));
  const groups = new Set(rest.map((each) => each.groupId)).size;
  const largest = Math.max(...rest.map((each) => Math.abs(value(each))).filter((each) => !Number.isNaN(each)), 0);
  return (
    <>
      {moved.length > 0 && (
        <table class="table">
          <thead>
            <tr>
              <th>episode</th>
              <th>A</th>
              <th>turn by turn</th>
              <th class="right">reward</th>
              <th class="right">tokens</th>
              <th class="right">staleness</th>
              <th>last action</th>
            </tr>
          </thead>
          <tbody>
            <Folded items={moved} most={48} name="episodes" each={(each) => <EpisodeRow key={each.episodeId} {...{ store, most }} trained={each} />} />
          </tbody>
        </table>
      )}
      {rest.length > 0 && (
        <p class="nothing">
          {plural(rest.length, "episode")} in {plural(groups, "group")} had an advantage of{" "}
          {largest > 0 ? `at most ${fixed(largest, 3)}` : "0"}: next to nothing was learned from them.
        </p>
      )}
    </>
  );
}

function EpisodeRow({ store, trained, most }: { store: RunStore; trained: Trained; most: number }): VNode {
  const row = store.index.find(trained.episodeId);
  const head = row === undefined ? undefined : store.head(row);
  const { stalenessMin: low, stalenessMax: high } = trained;
  return (
    <tr data-episode={trained.episodeId}>
      <td class="mono">
        {row === undefined ? (
          <span title="not kept" class="dim">
            <Text value={trained.episodeId} line />
          </span>
        ) : (
          <a href={links.episode(store.run, trained.episodeId)}>
            <Text value={trained.episodeId} line />
          </a>
        )}
      </td>
      <td>
        <SignedBar value={meanAdvantage(trained)} most={most} />
      </td>
      <td class="dim">{trained.advantages.map((each) => signed(each)).join(" ")}</td>
      <td class="right nowrap">
        <OutcomeMark outcome={outcomeOf(trained.reward ?? Number.NaN, trained.score ?? Number.NaN, false, store.passScore)} />
        {number(trained.reward)}
      </td>
      <td class="right">{count(trained.tokens)}</td>
      <td class="right">{low === high ? number(low) : `${number(low)}\u2013${number(high)}`}</td>
      <td class="mono dim clip">
        <bdi>{oneLine(head?.last_action ?? (row === undefined ? "not kept" : ""))}</bdi>
      </td>
    </tr>
  );
}

function StepGroups({ store, line }: { store: RunStore; line: StepLine }): VNode {
  const byGroup = new Map<string, Trained[]>();
  for (const each of episodesOf(line)) byGroup.set(each.groupId, [...(byGroup.get(each.groupId) ?? []), each]);
  const groups = line.groups.map((group) => {
    const trained = byGroup.get(group.group_id) ?? [];
    const rewards = trained.length ? trained.map((each) => each.reward) : (group.rewards ?? []);
    const known = rewards.filter((each): each is number => each !== null);
    return { group, trained, known, spread: known.length > 1 ? spread(known) : 0 };
  });
  groups.sort((a, b) => b.spread - a.spread);
  return (
    <Card title="Groups of the step" note={String(groups.length)}>
      <Folded
        items={groups}
        most={24}
        name="groups"
        each={({ group, trained, known }) => (
          <div class="step-group" key={group.group_id}>
            <a class="mono" href={links.task(store.run, group.group_id)}>
              <Text value={group.group_id} line />
            </a>
            <span class="right">{fixed(mean(known))}</span>
            {group.rejected === null ? <TrainedCells store={store} trained={trained} /> : <span class="chip bad">rejected: {oneLine(group.rejected)}</span>}
          </div>
        )}
      />
    </Card>
  );
}

function TrainedCells({ store, trained }: { store: RunStore; trained: Trained[] }): VNode {
  const sorted = [...trained].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  return (
    <span class="cells">
      {sorted.map((each) => {
        const outcome = outcomeOf(each.reward ?? Number.NaN, each.score ?? Number.NaN, false, store.passScore);
        const told = `episode ${oneLine(each.episodeId)}, ${OUTCOME_NAMES[outcome]}, reward ${number(each.reward)}`;
        return store.index.find(each.episodeId) === undefined ? (
          <span key={each.episodeId} class={`cell not-kept o-${outcome}`} title={`${told}, not kept`}>
            {GLYPHS[outcome]}
          </span>
        ) : (
          <a key={each.episodeId} class={`cell o-${outcome}`} href={links.episode(store.run, each.episodeId)} title={told} aria-label={told}>
            {GLYPHS[outcome]}
          </a>
        );
      })}
    </span>
  );
}

function Advantages({ trained }: { trained: Trained[] }): VNode | null {
  const values = trained.flatMap((each) => each.advantages).filter((each): each is number => each !== null);
  if (!values.length) return null;
  const bins = histogram(values, 21);
  return (
    <Card title="Advantages" note="of the turns">
      {bins.length > 1 ? <Histogram bins={bins} name="turns" /> : <p class="hint">That of all {plural(values.length, "turn")} is {number(values[0])}.</p>}
    </Card>
  );
}

/** Return the mean of each number of a step over the steps up to it that have the number. */
function meansUpTo(store: RunStore, steps: number[], step: number, smooth: number): Map<string, number> {
  const end = steps.indexOf(step) + 1;
  const rows = steps.slice(Math.max(0, end - smooth), end).map((each) => store.metrics.get(each) ?? new Map<string, number>());
  const known = (key: string): number[] => rows.flatMap((row) => row.get(key) ?? []);
  return new Map([...(store.metrics.get(step) ?? [])].map(([key]) => [key, mean(known(key))]));
}

interface NumbersProps {
  store: RunStore;
  step: number;
  before: number | undefined;
  steps: number[];
  /** Steps of a mean, as in the curves. */
  smooth: number;
}

/** All numbers of the step, and their change since another one; means over the last steps, as the curves have them. */
function Numbers({ store, step, before, steps, smooth }: NumbersProps): VNode {
  const row = meansUpTo(store, steps, step, smooth);
  const earlier = before === undefined ? undefined : meansUpTo(store, steps, before, smooth);
  return (
    <Card title={smooth > 1 ? `Means of the last ${smooth} steps` : "Numbers of the step"} note={
        <label>
          change since step{" "}
          <select value={String(before ?? "")} onChange={(event) => setQuery("since", event.currentTarget.value)}>
            {before === undefined && <option value="" />}
            {steps.map((each) => (
              <option key={each} value={String(each)}>
                {each}
              </option>
            ))}
          </select>
        </label>
      }>
      <table class="table numbers">
        <tbody>
          {[...row].filter(([key]) => key !== "step").map(([key, value]) => {
            const old = earlier?.get(key);
            return (
              <tr key={key}>
                <td class="mono">
                  <Text value={key} line />
                </td>
                <td class="right">{number(value, 4)}</td>
                <td class="right dim">{old === undefined || old === value ? "" : `${value > old ? "+" : ""}${number(value - old, 4)}`}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </Card>
  );
}
