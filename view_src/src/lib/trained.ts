// What the train steps say about episodes.
import type { RunStore } from "../data/store";
import type { StepLine } from "../data/types";

/** An episode as a train step lists it. */
export interface Trained {
  step: number;
  episodeId: string;
  groupId: string;
  rejected: string | null;
  reward: number | null;
  score: number | null;
  /** Advantage of each turn. */
  advantages: (number | null)[];
  stalenessMin: number | null;
  stalenessMax: number | null;
  tokens: number | null;
  kept: boolean;
  line: StepLine;
}

const asNumber = (value: unknown): number | null => (typeof value === "number" ? value : null);

/** Return the episodes of a line of steps.jsonl. */
export function episodesOf(line: StepLine): Trained[] {
  const places = new Map(line.episode_fields.map((field, place) => [field, place]));
  const cell = (row: unknown[], field: string): unknown => row[places.get(field) ?? -1];
  return line.groups.flatMap((group) =>
    group.episodes.map((row) => {
      const advantages = cell(row, "advantages");
      return {
        step: line.step,
        episodeId: String(cell(row, "episode_id")),
        groupId: group.group_id,
        rejected: group.rejected,
        reward: asNumber(cell(row, "reward")),
        score: asNumber(cell(row, "score")),
        advantages: Array.isArray(advantages) ? advantages.map(asNumber) : [],
        stalenessMin: asNumber(cell(row, "staleness_min")),
        stalenessMax: asNumber(cell(row, "staleness_max")),
        tokens: asNumber(cell(row, "trained_tokens")),
        kept: cell(row, "kept") === true,
        line,
      };
    }),
  );
}

const caches = new WeakMap<RunStore, { version: number; byId: Map<string, Trained> }>();

/** Return what is known of each episode that a step trained on, by episode id. */
export function trainedById(store: RunStore): Map<string, Trained> {
  const known = caches.get(store);
  if (known?.version === store.version) return known.byId;
  const byId = new Map<string, Trained>();
  for (const line of store.steps.values()) {
    if (line.kind !== "train") continue;
    for (const each of episodesOf(line)) byId.set(each.episodeId, each);
  }
  caches.set(store, { version: store.version, byId });
  return byId;
}

/** Return the mean advantage of an episode; NaN if it is not known. */
export function meanAdvantage(trained: Trained | undefined): number {
  const known = (trained?.advantages ?? []).filter((value): value is number => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : Number.NaN;
}

/** Return the task of a group: its id without the pass over the data. */
export function taskOf(groupId: string): string {
  return groupId.replace(/@\d+$/, "");
}
