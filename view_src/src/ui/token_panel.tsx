import type { VNode } from "preact";
import type { Episode } from "../data/types";
import { fixed, number, probability, signed } from "../lib/format";
import { ACTION, type EpisodeModel, KINDS, isTrained } from "../lib/tokens";
import { quoted } from "../lib/visible";
import { Card } from "./bits";

interface PanelProps {
  model: EpisodeModel;
  episode: Episode;
  place: { segment: number; token: number };
  pinned: boolean;
}

function factsOf({ model, episode, place }: PanelProps): [string, string][] {
  const segment = model.segments[place.segment];
  if (!segment) return [];
  const { token } = place;
  const kind = segment.kinds[token] ?? 0;
  const turn = segment.turns[token] ?? -1;
  const facts: [string, string][] = [
    ["id", String(segment.ids[token])],
    ["position", model.segments.length > 1 ? `segment ${place.segment}, ${token}` : String(token)],
    ["who", turn < 0 ? (KINDS[kind] ?? "") : `${KINDS[kind]}, turn ${turn}`],
    ["trained on", isTrained(segment, token) ? "yes" : segment.forced[token] ? "no: a constraint forced it" : "no"],
  ];
  if (kind !== ACTION) return facts;
  const logprob = segment.logprobs[token] ?? Number.NaN;
  facts.push(["log-prob", Number.isNaN(logprob) ? "missing" : fixed(logprob, 4)]);
  if (!Number.isNaN(logprob)) facts.push(["p", probability(logprob)]);
  const learned = segment.learned[token] ?? Number.NaN;
  if (!Number.isNaN(learned)) facts.push(["learner", fixed(learned, 4)], ["ratio", fixed(Math.exp(learned - logprob), 3)]);
  const advantage = segment.advantages[token] ?? Number.NaN;
  facts.push(["advantage", Number.isNaN(advantage) ? "not recorded" : signed(advantage, 3)]);
  const version = segment.versions[token] ?? -1;
  if (version >= 0) facts.push(["policy version", number(version)]);
  const turnRecord = episode.record.turns[turn];
  if (turnRecord && turnRecord.end - 1 === token) facts.push(["reward here", number(turnRecord.result?.reward)]);
  return facts;
}

export function TokenPanel(props: PanelProps): VNode {
  const segment = props.model.segments[props.place.segment];
  return (
    <Card title="Token" note={props.pinned ? "chosen" : undefined}>
      <p class="token-text mono">
        <bdi>{quoted(segment?.text(props.place.token) ?? "")}</bdi>
      </p>
      <dl class="facts">
        {factsOf(props).map(([name, text]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
    </Card>
  );
}
