import type { VNode } from "preact";
import { useMemo } from "preact/hooks";
import type { RunStore } from "../data/store";
import { count, decimals, fixed, number, percent, plain, seconds, signed } from "../lib/format";
import { allFlags, onePart } from "../lib/flags";
import { atOnce } from "../lib/lanes";
import { links } from "../lib/router";
import { histogram } from "../lib/stats";
import { Card, type Part, Shares, Text } from "../ui/bits";
import { Histogram } from "../ui/histogram";

export function OverviewSide({ store }: { store: RunStore }): VNode {
  return (
    <div class="overview-side">
      <Environments store={store} />
      <StopReasons store={store} />
      <Lengths store={store} />
      <GoesBy store={store} />
      <Seconds store={store} />
      <AtOnce store={store} />
      <Cost store={store} />
      <Flags store={store} />
    </div>
  );
}

/** The numbers of each environment of a mixture. */
function Environments({ store }: { store: RunStore }): VNode | null {
  const found = Object.entries(store.meta?.metrics?.environments ?? {});
  if (!found.length) return null;
  return (
    <Card title="Environments" className="environments">
      <table class="table">
        <thead>
          <tr>
            <th>environment</th>
            <th class="right">tasks</th>
            <th class="right">reward</th>
            <th class="right">pass@1</th>
            <th class="right">turns</th>
          </tr>
        </thead>
        <tbody>
          {found.map(([name, metrics]) => (
            <tr key={name}>
              <td class="clip">
                <a href={links.episodes(store.run, { q: `env=${name}` })}>
                  <Text value={name} line />
                </a>
              </td>
              <td class="right">{count(metrics.num_tasks)}</td>
              <td class="right">{fixed(metrics.reward?.mean, 3)}</td>
              <td class="right">{fixed(metrics.pass_at_k?.["1"]?.mean, 3)}</td>
              <td class="right">{number(metrics.turns_mean, 2)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Card>
  );
}

function StopReasons({ store }: { store: RunStore }): VNode {
  const counts = new Map<string, number>();
  for (const row of store.index.rows()) {
    const reason = store.index.text("stop_reason", row) || "not ended";
    counts.set(reason, (counts.get(reason) ?? 0) + 1);
  }
  const all = store.index.rows().length;
  const parts: Part[] = [...counts]
    .sort((a, b) => b[1] - a[1])
    .map(([name, value]) => ({
      name,
      value,
      text: `${count(value)} \u00b7 ${percent(value / all)}`,
      href: links.episodes(store.run, { q: name === "not ended" ? "stop=none" : `stop=${name}` }),
    }));
  return (
    <Card title="Stop reasons">
      <Shares parts={parts} />
    </Card>
  );
}

function Lengths({ store }: { store: RunStore }): VNode | null {
  const tokens = store.index.numbers("action_tokens");
  if (!tokens.some((each) => each > 0)) return null;
  return (
    <Card title="Sampled tokens" note="click a bar for its episodes">
      <Histogram
        bins={histogram(tokens)}
        href={(bin) => links.episodes(store.run, { q: `act>=${bin.from} act<${bin.to}`, sort: "-act" })}
        name="episodes"
      />
    </Card>
  );
}

const GOES_BY: [string, string, string][] = [
  ["length_correlation", "length", "number of sampled tokens"],
  ["format_correlation", "Markdown marks", "number of headings, list items, fences, table rows and bold words"],
  ["repetition_correlation", "repetition", "share of repeated word 4-grams"],
];

/** What the reward goes by, within groups: a place to look, no verdict. */
function GoesBy({ store }: { store: RunStore }): VNode | null {
  const hygiene = new Map(Object.entries(store.meta?.metrics?.hygiene ?? {}));
  const known = GOES_BY.filter(([key]) => typeof hygiene.get(`${key}_in_group`) === "number");
  const decides = onePart(store);
  if (!known.length && !decides.length) return null;
  const value = (key: string): number => hygiene.get(`${key}_in_group`) ?? Number.NaN;
  const looks = known.some(([key]) => Math.abs(value(key)) >= 0.3);
  return (
    <Card title="What the reward goes by" note="correlation among siblings">
      <table class="table">
        <tbody>
          {known.map(([key, name, title]) => (
            <tr key={key}>
              <td title={title}>{name}</td>
              <td>
                <Correlation value={value(key)} />
              </td>
              <td class="right">{Math.abs(value(key)) >= 0.3 && <span class="chip flag">⚑ look</span>}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {decides.map((flag) => (
        <p key={flag.text} class="hint">
          <span class="chip flag">⚑ {flag.title}</span> <Text value={flag.text} line />
        </p>
      ))}
      {looks && <p class="hint">A correlation is a place to look, no verdict.</p>}
    </Card>
  );
}

function Correlation({ value }: { value: number }): VNode {
  return (
    <span class="signed">
      <span class="signed-text">{signed(value)}</span>
      <svg class="signed-bar wide" viewBox="-50 0 100 8" preserveAspectRatio="none" aria-hidden="true">
        <line x1="0" y1="0" x2="0" y2="8" />
        <rect class="neutral" x={value < 0 ? 50 * value : 0} y="1" width={Math.abs(50 * value)} height="6" />
      </svg>
    </span>
  );
}

function Seconds({ store }: { store: RunStore }): VNode | null {
  const { time, tokens } = store.meta?.metrics ?? {};
  const [generate, step, wait] = [time?.["generate_share"], time?.["step_share"], time?.["wait_share"]];
  if (typeof generate !== "number") return null;
  const speed = tokens?.["num_uncounted"] ? "" : ` \u00b7 ${number(time?.["action_tokens_per_s"], 0)} tokens/s`;
  const parts = [
    ["generate", generate], ["step", step ?? 0], ["wait", wait ?? 0],
  ] as [string, number][];
  return (
    <Card title="Where the seconds went" note={`of the episodes' time; in all ${seconds(time?.["wall_s"])}${speed}`}>
      <Shares parts={parts.map(([name, value]) => ({ name, value, text: percent(value, value < 0.1 ? 1 : 0) }))} />
    </Card>
  );
}

/** How many episodes ran at once. A training keeps too few of its episodes for that. */
function AtOnce({ store }: { store: RunStore }): VNode | null {
  const found = useMemo(() => (store.meta?.kind === "run" ? atOnce(store) : null), [store.index.version, store.meta?.kind]);
  if (!found) return null;
  return (
    <Card title="Episodes at once" note={`at most ${count(found.most)}, by seconds`}>
      <Histogram bins={found.bins} name="episodes at once" />
    </Card>
  );
}

function Cost({ store }: { store: RunStore }): VNode | null {
  const metrics = store.meta?.metrics;
  const tokens = metrics?.tokens;
  if (!tokens) return null;
  const facts: [string, string][] = [
    ["tokens in", count(tokens["num_input"])],
    ["of these cached", percent(tokens["cached_share"])],
    ["tokens out", count(tokens["num_action"])],
  ];
  if (tokens["num_uncounted"]) facts.push(["answers without counts", count(tokens["num_uncounted"])]);
  for (const [name, cost] of [["policy cost, dollars", metrics?.cost_usd], ["judge cost", metrics?.judge_cost]] as const) {
    if (typeof cost === "number") facts.push([name, fixed(cost, decimals(cost, 4))]);
  }
  return (
    <Card title="What it cost">
      <dl class="facts">
        {facts.map(([name, text]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
    </Card>
  );
}

function Flags({ store }: { store: RunStore }): VNode | null {
  const changed = store.meta?.changed_flags ?? [];
  const all = allFlags(store.meta?.config);
  if (!changed.length && !all.length) return null;
  return (
    <Card title="Flags not at their defaults" note={`${changed.length}`}>
      <FlagList flags={changed} />
      {all.length > 0 && (
        <details class="fold">
          <summary>all {all.length}</summary>
          <FlagList flags={all} />
        </details>
      )}
    </Card>
  );
}

function FlagList({ flags }: { flags: [string, unknown][] }): VNode {
  return (
    <dl class="facts mono flags">
      {flags.map(([name, value]) => (
        <div key={name}>
          <dt>
            --
            <Text value={name} line />
          </dt>
          <dd>
            <Text value={plain(value)} line />
          </dd>
        </div>
      ))}
    </dl>
  );
}
