// Places to look at in a training. A flag is no verdict.
import type { RunStore } from "../data/store";
import { sortedGroups } from "./groups";
import { number, percent, plural, signed } from "./format";
import { links } from "./router";
import { mean } from "./stats";

export interface Flag {
  title: string;
  /** What was seen. */
  text: string;
  /** Step since which it holds. */
  since: number | null;
  href: string | null;
}

/** Episodes that a window of steps holds at least. */
const WINDOW_EPISODES = 200;

interface Series {
  steps: number[];
  values: number[];
}

function series(store: RunStore, key: string): Series {
  const found: Series = { steps: [], values: [] };
  for (const step of [...store.metrics.keys()].sort((a, b) => a - b)) {
    const value = store.metrics.get(step)?.get(key);
    if (value === undefined) continue;
    found.steps.push(step);
    found.values.push(value);
  }
  return found;
}

/** Number of steps that hold enough episodes for a window. */
function windowOf(store: RunStore): number {
  const episodes = mean(series(store, "rollout/num_episodes").values) || 1;
  return Math.max(1, Math.ceil(WINDOW_EPISODES / episodes));
}

/** Return the address of the episodes that the weights of a step or later ones sampled. */
function episodesSince(store: RunStore, step: number | null, query: Record<string, string>): string {
  const version = store.steps.get(`train:${step}`)?.version;
  return links.episodes(store.run, { ...query, q: `${query["q"] ?? ""} ${version ? `version>=${version}` : ""}`.trim() });
}

function correlations(store: RunStore): Flag[] {
  const size = windowOf(store);
  return (["length", "format", "repetition"] as const).flatMap((name) => {
    const { steps, values } = series(store, `rollout/reward/${name}_correlation_in_group`);
    if (values.length < 2 * size) return [];
    const now = mean(values.slice(-size));
    const before = mean(values.slice(-2 * size, -size));
    if (Math.abs(now) < 0.3 || Math.abs(before) < 0.3 || now * before < 0) return [];
    let first = values.length - 2 * size;
    while (first > 0 && (values[first - 1] ?? 0) * Math.sign(now) >= 0.3) first--;
    const since = steps[first] ?? null;
    return [
      {
        title: `The reward goes by ${name === "format" ? "Markdown marks" : name}`,
        text: `correlation among siblings ${signed(now)}, before ${signed(before)}`,
        since,
        href: episodesSince(store, since, { sort: name === "repetition" ? "-repeated_share" : "-act" }),
      },
    ];
  });
}

function longer(store: RunStore): Flag[] {
  const { steps, values } = series(store, "rollout/action_tokens");
  const score = series(store, "eval/score").values;
  const part = Math.max(1, Math.floor(values.length / 10));
  if (values.length < 10 || score.length < 2) return [];
  const [first, last] = [mean(values.slice(0, part)), mean(values.slice(-part))];
  const rose = (score[score.length - 1] ?? 0) > (score[0] ?? 0);
  if (last < 1.2 * first || rose) return [];
  const since = steps[values.findIndex((value, k) => k >= part && value >= 1.2 * first)] ?? null;
  const text = `${number(first, 0)} sampled tokens became ${number(last, 0)}, and the held-out score did not rise`;
  return [{ title: "Episodes get longer", text, since, href: episodesSince(store, since, { sort: "-act" }) }];
}

/** Flag a metric whose recent mean meets a condition. */
function recent(
  store: RunStore,
  key: string,
  title: string,
  holds: (value: number, all: number[]) => boolean,
  tell: (value: number, all: number[]) => string,
  query: Record<string, string> | null = null,
): Flag[] {
  const { steps, values } = series(store, key);
  const size = Math.min(windowOf(store), Math.max(1, Math.floor(values.length / 3)));
  if (!values.length) return [];
  const now = mean(values.slice(-size));
  if (!holds(now, values)) return [];
  let first = values.length - 1;
  while (first > 0 && holds(values[first - 1] ?? Number.NaN, values)) first--;
  const since = steps[first] ?? null;
  return [{ title, text: tell(now, values), since, href: query && episodesSince(store, since, query) }];
}

const median = (values: number[]): number => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? Number.NaN;

function identical(store: RunStore): Flag[] {
  const groups = [...store.index.groups().values()].filter((group) => group.rows.length > 1);
  const same = sortedGroups(store).saidTheSame.length;
  if (!groups.length || same / groups.length < 0.5) return [];
  const text = `in ${percent(same / groups.length)} of the groups that were kept all siblings took the same actions`;
  return [{ title: "Siblings are identical", text, since: null, href: links.overview(store.run) }];
}

/** Return all flags of config.json. */
export function allFlags(config: unknown): [string, unknown][] {
  const inner = config && typeof config === "object" && "config" in config ? config.config : config;
  const flags = inner && typeof inner === "object" && "flags" in inner ? inner.flags : null;
  return flags && typeof flags === "object" ? Object.entries(flags) : [];
}

/** Flag episodes that mostly were as old as an asynchronous training allows; with a bound of 1, all are that old. */
function stale(store: RunStore): Flag[] {
  const flags = new Map(allFlags(store.meta?.config));
  const bound = flags.get("max_staleness") ?? flags.get("async_queue_size");
  if (flags.get("async_train") !== true || typeof bound !== "number" || bound <= 1) return [];
  const tell = (mean: number): string => `${number(mean, 2)} policy updates between sampling and training, of at most ${bound}`;
  return recent(store, "rollout/staleness_mean", "Staleness at its bound", (value) => value >= 0.9 * bound, tell, { sort: "-step" });
}

/** Return an object that is one, or that JSON text describes; otherwise an empty one. */
function asObject(value: unknown): Record<string, unknown> {
  try {
    const found: unknown = typeof value === "string" ? JSON.parse(value) : value;
    return found && typeof found === "object" ? (found as Record<string, unknown>) : {};
  } catch {
    return {};
  }
}

/** Return the names of the parts of a reward that is a sum. */
function partsOf(config: unknown): string[] {
  const flags = new Map(allFlags(config));
  const options = asObject(flags.get("env_kwargs"));
  const reward = asObject(flags.get("reward") ?? options["reward"]);
  const sum = reward["sum"];
  return sum && typeof sum === "object" ? Object.keys(sum) : [];
}

/** Return the share of the variance within groups of a reward that goes by a number of `info`. */
function explained(store: RunStore, key: string): number {
  const { index } = store;
  let [xx, yy, xy] = [0, 0, 0];
  for (const group of index.groups().values()) {
    const rows = group.rows.filter((row) => typeof index.info(key, row) === "number" && !Number.isNaN(index.number("reward", row)));
    const [xs, ys] = [rows.map((row) => index.info(key, row) as number), rows.map((row) => index.number("reward", row))];
    const [x, y] = [mean(xs), mean(ys)];
    xs.forEach((value, place) => {
      const [dx, dy] = [value - x, (ys[place] ?? y) - y];
      xx += dx * dx;
      yy += dy * dy;
      xy += dx * dy;
    });
  }
  return xx && yy ? (xy * xy) / (xx * yy) : 0;
}

/** Flag a reward of several parts of which one alone tells siblings from each other. */
export function onePart(store: RunStore): Flag[] {
  const parts = partsOf(store.meta?.config);
  if (parts.length < 2) return [];
  return parts.flatMap((part): Flag[] => {
    const key = store.index.infoKeys().find((each) => each === part || each.endsWith(`/${part}`));
    const share = key === undefined ? 0 : explained(store, key);
    if (key === undefined || share < 0.9) return [];
    const text = `${percent(share)} of the variance among siblings goes by ${part}, one of ${parts.length} parts`;
    return [{ title: "One part of the reward decides", text, since: null, href: links.episodes(store.run, { sort: `-info.${key}` }) }];
  });
}

/** Return what a reader of the training should look at. */
export function flagsOf(store: RunStore): Flag[] {
  const of = (key: string, step: number): number => store.metrics.get(step)?.get(`rollout/${key}`) ?? 0;
  const steps = [...store.metrics.keys()].sort((a, b) => a - b);
  const broken = steps.filter((step) => of("num_failed", step) + of("num_rejected_failed", step) > 0);
  const leftOut = steps.reduce((sum, step) => sum + of("num_rejected_failed", step), 0);
  const failed = `in ${broken.length} of ${steps.length} steps${leftOut ? `, ${plural(leftOut, "group")} left out` : ""}`;
  return [
    ...correlations(store),
    ...longer(store),
    ...recent(store, "rollout/reward/zero_spread_share", "Groups without spread", (v) => v >= 0.7, (v) => `${percent(v)} of the groups tell no action from another`, { q: "group.spread=0" }),
    ...recent(store, "train/entropy", "Little entropy", (v, all) => v < 0.1 * (all[0] ?? 0), (v, all) => `${number(v, 4)} nats a token, ${number(all[0], 4)} at the start`),
    ...recent(store, "train/logprob_diff", "Learner and engine differ", (v, all) => all.length > 4 && v > 10 * median(all), (v, all) => `${number(v, 5)} a token, median ${number(median(all), 5)}`),
    ...recent(store, "rollout/truncated_share", "More episodes are cut off", (v, all) => v - (all[0] ?? 0) >= 0.1, (v, all) => `${percent(v)}, ${percent(all[0])} at the start`, { q: "-stop=terminated" }),
    ...recent(store, "rollout/reward_std", "All rewards are the same", (v) => v === 0, () => "the reward of a step has one value"),
    ...(broken.length
      ? [{ title: "Episodes failed", text: failed, since: broken[0] ?? null, href: links.episodes(store.run, { q: "-error_kind=none" }) }]
      : []),
    ...stale(store),
    ...onePart(store),
    ...identical(store),
  ];
}
