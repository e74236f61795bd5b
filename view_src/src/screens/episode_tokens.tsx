import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { RunStore } from "../data/store";
import type { Episode } from "../data/types";
import { number, probability } from "../lib/format";
import { type Route, go, links } from "../lib/router";
import { type ColorBy, type EpisodeModel, leastProbable, newestVersion } from "../lib/tokens";
import { quoted } from "../lib/visible";
import { useKeys } from "../lib/keys";
import { keep, kept } from "../lib/theme";
import { Card, Cells } from "../ui/bits";
import { ColorBar, isKnown, nextColor } from "../ui/color_bar";
import { Find } from "../ui/find";
import { Strip } from "../ui/strip";
import { TokenPanel } from "../ui/token_panel";
import { tokenOf } from "../ui/tokens";
import { SegmentView } from "./episode_segment";

interface Place {
  segment: number;
  token: number;
}

export interface TokenViewProps {
  store: RunStore;
  route: Route;
  row: number;
  episode: Episode;
  model: EpisodeModel;
  siblings: number[];
  say: (text: string) => void;
}

const IMPROBABLE = Math.log(0.05);

/** The choice of color and of template tokens, kept over screens. */
export function useTokenChoices(model: Parameters<typeof isKnown>[1]): { color: ColorBy; setColor: (by: ColorBy) => void; template: boolean; setTemplate: (on: boolean) => void } {
  const [color, chooseColor] = useState<ColorBy>((kept("agentenv.color") as ColorBy | null) ?? "logprob");
  const [template, chooseTemplate] = useState(kept("agentenv.template") === "1");
  return {
    color: isKnown(color, model) ? color : "logprob",
    setColor: (by) => (keep("agentenv.color", by), chooseColor(by)),
    template,
    setTemplate: (on) => (keep("agentenv.template", on ? "1" : "0"), chooseTemplate(on)),
  };
}

export function TokenView({ store, route, row, episode, model, siblings, say }: TokenViewProps): VNode {
  const { color, setColor, template, setTemplate } = useTokenChoices(model);
  const [hovered, setHovered] = useState<Place | null>(null);
  const selected = selectedPlace(route, model);
  const newest = newestVersion(model);
  const least = leastProbable(model);
  const center = useRef<HTMLDivElement>(null);
  const open = (place: Place): void => {
    const turn = model.segments[place.segment]?.turns[place.token] ?? -1;
    const where = turn < 0 ? { token: place.token } : { turn, token: place.token };
    go(links.episode(store.run, route.id, where, { segment: place.segment || null }), true);
  };
  useEffect(() => {
    const target =
      selected !== null
        ? center.current?.querySelector(`[data-segment="${selected.segment}"] [data-k="${selected.token}"]`)
        : route.turn !== null
          ? center.current?.querySelector(`[data-turn="${route.turn}"]`)
          : null;
    target?.scrollIntoView({ block: "center" });
  }, [route.token, route.turn, episode, selected?.segment]);
  const walk = (by: number): void => {
    const next = improbable(model, selected, by);
    if (next) open(next);
    else say(`no ${by > 0 ? "later" : "earlier"} token below p = .05`);
  };
  const turns = episode.record.turns.length;
  const turn = (by: number): void => {
    const now = route.turn ?? (by > 0 ? -1 : turns);
    const next = Math.min(turns - 1, Math.max(0, now + by));
    go(links.episode(store.run, route.id, { turn: next }), true);
  };
  useKeys({
    n: () => walk(1),
    N: () => walk(-1),
    "]": () => turn(1),
    "[": () => turn(-1),
    c: () => setColor(nextColor(color, 1, model)),
    C: () => setColor(nextColor(color, -1, model)),
    t: () => setTemplate(!template),
  });
  const shown = hovered ?? selected ?? least[0] ?? null;
  return (
    <>
      <div class="token-bar">
        <ColorBar {...{ color, setColor, template, setTemplate, model, newest }} />
        <Find {...{ model, open }} />
      </div>
      <Strip model={model} selected={selected} open={open} />
      <div class="episode-columns">
        <aside class="side left">
          <TurnList {...{ store, route, episode, model }} />
          {siblings.length > 1 && (
            <Card title="Siblings">
              <Cells store={store} rows={siblings} chosen={row} />
            </Card>
          )}
        </aside>
        <div
          ref={center}
          class="center"
          onPointerOver={(event) => setHovered(tokenOf(event))}
          onPointerLeave={() => setHovered(null)}
          onClick={(event) => {
            const place = tokenOf(event);
            if (place && String(getSelection() ?? "") === "") open(place);
          }}
        >
          {model.segments.map((segment) => (
            <SegmentView key={segment.index} {...{ segment, episode, model, color, newest, template, selected }} />
          ))}
        </div>
        <aside class="side facts-side">
          {shown && <TokenPanel {...{ model, episode }} place={shown} pinned={hovered === null && selected !== null} />}
          <Card title="Least probable" note="n: next below .05">
            <ul class="plain-list">
              {least.map((each) => (
                <li key={`${each.segment}:${each.token}`}>
                  <button type="button" class="row-button" onClick={() => open(each)}>
                    <bdi class="mono">{quoted(model.segments[each.segment]?.text(each.token) ?? "")}</bdi>
                    <span class="dim">turn {each.turn}</span>
                    <span class="right">p {probability(each.logprob)}</span>
                  </button>
                </li>
              ))}
            </ul>
            {least.length === 0 && <p class="dim">The record has no log-probabilities.</p>}
          </Card>
        </aside>
      </div>
    </>
  );
}

function selectedPlace(route: Route, model: EpisodeModel): Place | null {
  if (route.token === null) return null;
  const segment = Number(route.query.get("segment") ?? 0);
  return (model.segments[segment]?.ids.length ?? 0) > route.token ? { segment, token: route.token } : null;
}

/** Return the next token below p = .05 from a place on, in reading order. */
function improbable(model: EpisodeModel, from: Place | null, by: number): Place | null {
  const places: Place[] = [];
  for (const segment of model.segments) {
    segment.logprobs.forEach((logprob, token) => {
      if (logprob < IMPROBABLE) places.push({ segment: segment.index, token });
    });
  }
  if (by < 0) places.reverse();
  const order = (place: Place): number => by * (place.segment * 1e9 + place.token);
  return places.find((place) => from === null || order(place) > order(from)) ?? null;
}

function TurnList({ store, route, episode, model }: Pick<TokenViewProps, "store" | "route" | "episode" | "model">): VNode {
  const entries = model.segments.flatMap((segment) =>
    segment.spans.map((span) => ({ span, segment: segment.index })),
  );
  return (
    <Card title="Turns">
      <ul class="plain-list turns">
        {entries.map(({ span: [start, end, kind, turn], segment }) => {
          const name = kind === "action" ? `turn ${turn}` : kind === "close" ? "close" : kind;
          const reward = kind === "action" ? episode.record.turns[turn]?.result?.reward : undefined;
          const where = kind === "action" ? { turn } : turn < 0 ? { token: start } : { turn, token: start };
          return (
            <li key={`${segment}:${start}`}>
              <a
                class={`row-button k-${kind} ${kind === "action" && route.turn === turn ? "chosen" : ""}`}
                href={links.episode(store.run, route.id, where, { segment: segment || null })}
              >
                <span>{name}</span>
                <span class="dim">{end - start}</span>
                <span class="right">{reward === null || reward === undefined ? "" : `r ${number(reward)}`}</span>
              </a>
            </li>
          );
        })}
      </ul>
    </Card>
  );
}
