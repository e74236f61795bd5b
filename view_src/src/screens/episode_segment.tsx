import type { VNode } from "preact";
import type { Episode, Span, TurnRecord } from "../data/types";
import { fixed, number, plain, plural, seconds, signed } from "../lib/format";
import type { ColorBy, EpisodeModel, Segment } from "../lib/tokens";
import { Text } from "../ui/bits";
import { Tokens } from "../ui/tokens";

interface SegmentProps {
  segment: Segment;
  episode: Episode;
  model: EpisodeModel;
  color: ColorBy;
  newest: number;
  template: boolean;
  selected: { segment: number; token: number } | null;
}

export function SegmentView(props: SegmentProps): VNode {
  const { segment, model, selected } = props;
  const token = selected?.segment === segment.index ? selected.token : null;
  return (
    <section class="segment" aria-label={`segment ${segment.index}`}>
      {model.segments.length > 1 && (
        <h3 class="segment-head">
          segment {segment.index} <span class="dim">{plural(segment.ids.length, "token")}</span>
        </h3>
      )}
      {segment.spans.map((span) => (
        <SpanView key={span[0]} {...props} span={span} token={token} />
      ))}
    </section>
  );
}

function SpanView(props: SegmentProps & { span: Span; token: number | null }): VNode {
  const { segment, episode, model, color, newest, template, span, token } = props;
  const [start, end, kind, turn] = span;
  const record = episode.record.turns[turn];
  return (
    <section class={`span k-${kind}`} data-turn={kind === "action" ? turn : undefined} data-kind={kind}>
      <header class="span-head">
        <strong>{kind === "action" ? `turn ${turn}` : kind === "close" ? "synthesized close" : kind}</strong>
        {kind === "action" && record && <ActionFacts {...{ record, model, turn, segment }} />}
        {kind !== "action" && <span class="dim">{plural(end - start, "token")}</span>}
        {kind === "feedback" && record?.bridge && <span class="dim">bridge {record.bridge}</span>}
        {kind === "feedback" && record?.observation_cut && <span class="chip bad">cut to fit</span>}
      </header>
      {kind === "action" && record && <Info record={record} />}
      <Tokens {...{ segment, start, end, color, newest, template }} selected={token} />
    </section>
  );
}

function ActionFacts(props: { record: TurnRecord; model: EpisodeModel; turn: number; segment: Segment }): VNode {
  const { record, model, turn, segment } = props;
  const { result } = record;
  const own = segment.logprobs.subarray(record.start, record.end).filter((value) => !Number.isNaN(value));
  const mean = own.length ? own.reduce((sum, value) => sum + value, 0) / own.length : Number.NaN;
  const advantage = model.turnAdvantages[turn];
  return (
    <>
      <span class={(result?.reward ?? 0) > 0 ? "tone-pos" : (result?.reward ?? 0) < 0 ? "tone-neg" : ""}>
        reward {number(result?.reward)}
      </span>
      {advantage !== null && advantage !== undefined && <span>A {signed(advantage)}</span>}
      <span class="dim">{plural(record.end - record.start, "token")}</span>
      <span class="dim">mean lp {fixed(mean)}</span>
      <span class="dim">{seconds(record.generate_s)}</span>
      {record.finish_reason && record.finish_reason !== "stop" && <span class="chip bad">{record.finish_reason}</span>}
      {result?.terminated && <span class="chip">terminated</span>}
      {result?.truncated && <span class="chip bad">truncated</span>}
      {!result && <span class="chip bad">no result</span>}
      <Retries record={record} />
    </>
  );
}

/** What ran again for the turn. */
export function Retries({ record }: { record: TurnRecord }): VNode {
  const { num_retries: steps = 0, num_request_retries: requests = 0, num_failovers: failovers = 0 } = record;
  return (
    <>
      {steps > 0 && <span class="chip bad">{plural(steps, "step retry", "step retries")}</span>}
      {requests > 0 && <span class="chip bad">{plural(requests, "request retry", "request retries")}</span>}
      {failovers > 0 && <span class="chip bad">{plural(failovers, "failover")}</span>}
    </>
  );
}

/** What the environment said about the turn: the author's order, texts before numbers. */
export function Info({ record }: { record: TurnRecord }): VNode | null {
  const entries = Object.entries(record.result?.info ?? {});
  if (!entries.length) return null;
  const ordered = [
    ...entries.filter(([, value]) => typeof value !== "number"),
    ...entries.filter(([, value]) => typeof value === "number"),
  ];
  return (
    <p class="info">
      {ordered.map(([key, value]) => (
        <span key={key} class="info-item">
          <span class="dim">
            <Text value={key} line />
          </span>{" "}
          <Text value={plain(value)} line />
        </span>
      ))}
    </p>
  );
}
