// Siblings beside each other: a column for each strand, a row for each turn.
import { Fragment, type VNode } from "preact";
import { useMemo } from "preact/hooks";
import type { RunStore } from "../data/store";
import { number, plural, probability, signed } from "../lib/format";
import { type Parting, type Strand, partingOf, sharedUnits, unitLogprob, unitText } from "../lib/group";
import { contentText } from "../lib/messages";
import { outcomeOf } from "../lib/outcome";
import { links } from "../lib/router";
import { mean } from "../lib/stats";
import type { ColorBy } from "../lib/tokens";
import { quoted } from "../lib/visible";
import { OutcomeMark, SignedBar, Text } from "../ui/bits";
import { Tokens } from "../ui/tokens";

export interface ColumnsProps {
  store: RunStore;
  strands: Strand[];
  reference: Strand;
  color: ColorBy;
  newest: number;
  template: boolean;
  onlyDifferences: boolean;
  choose: (strand: Strand) => void;
}

/** Up to this many columns fit a screen of 1,440 pixels; more scroll, with the first one sticky. */
const FIT = 4;
const COLUMN_PX = 320;

/** Where the others part from the reference: its tokens, with what they say there. */
function marksOf(strands: Strand[], reference: Strand): Map<number, Map<number, string>> {
  const byTurn = new Map<number, Map<number, string>>();
  for (const strand of strands) {
    const parting = partingOf(reference, strand);
    const turn = parting ? reference.siblings[0]?.episode.record.turns[parting.turn] : undefined;
    if (!parting || !turn || parting.unit < 0) continue;
    const marks = byTurn.get(parting.turn) ?? new Map<number, string>();
    byTurn.set(parting.turn, marks);
    const token = turn.start + parting.unit;
    const told = `${strand.siblings[0]?.name ?? ""} says ${quoted(unitText(strand, parting) ?? "nothing")}`;
    marks.set(token, [marks.get(token), told].filter((each) => each).join("; "));
  }
  return byTurn;
}

export function StrandColumns(props: ColumnsProps): VNode {
  const { strands, reference } = props;
  const marks = useMemo(() => marksOf(strands, reference), [strands, reference]);
  const partings = useMemo(() => strands.map((strand) => partingOf(reference, strand)), [strands, reference]);
  const rewards = strands.flatMap((strand) => strand.siblings.flatMap(() => (strand.reward === null ? [] : [strand.reward])));
  const average = mean(rewards);
  const most = Math.max(...strands.map((strand) => Math.abs(worth(strand, average).value)).filter((each) => !Number.isNaN(each)), 0);
  const turns = Math.max(...strands.map((strand) => strand.turns.length), 0);
  const columns = `repeat(${strands.length}, minmax(0, 1fr))`;
  const width = strands.length > FIT ? `${strands.length * COLUMN_PX}px` : "auto";
  return (
    <div class={`strands ${strands.length > FIT ? "scrolls" : ""}`} tabIndex={strands.length > FIT ? 0 : undefined}>
      <div class="strand-grid" style={{ gridTemplateColumns: columns, minWidth: width }} role="group" aria-label="siblings, turn by turn">
        {strands.map((strand, k) => (
          <StrandHead key={k} {...props} strand={strand} parting={partings[k] ?? null} average={average} most={most} />
        ))}
        {Array.from({ length: turns }, (_, turn) => (
          <Fragment key={turn}>
            {strands.map((strand, k) => (
              <ActionCell key={k} {...props} {...{ strand, turn }} parting={partings[k] ?? null} marks={marks.get(turn)} />
            ))}
            {strands.map((strand, k) => (
              <FeedbackCell key={k} {...props} {...{ strand, turn }} />
            ))}
          </Fragment>
        ))}
      </div>
    </div>
  );
}

/** Return the advantage as trained, or else the distance to the group's mean. */
function worth(strand: Strand, average: number): { value: number; trained: boolean } {
  const known = strand.siblings[0]?.model.turnAdvantages.filter((each): each is number => each !== null) ?? [];
  if (known.length) return { value: mean(known), trained: true };
  return { value: strand.reward === null ? Number.NaN : strand.reward - average, trained: false };
}

interface CellProps extends ColumnsProps {
  strand: Strand;
}

function StrandHead(props: CellProps & { parting: Parting | null; average: number; most: number }): VNode {
  const { store, strand, reference, parting, average, most, choose } = props;
  const episode = strand.siblings[0]?.episode;
  const record = episode?.record;
  const value = worth(strand, average);
  const counts = episode?.view.turns.map((turn) => turn.num_action_tokens) ?? [];
  const tokens = counts.includes(null) ? null : counts.reduce<number>((sum, each) => sum + (each ?? 0), 0);
  const isReference = strand === reference;
  return (
    <header class={`strand-head ${isReference ? "reference" : ""}`} data-parts={parting ? `${parting.turn}:${parting.unit}` : ""}>
      <div class="strand-line">
        <OutcomeMark outcome={outcomeOf(strand.reward ?? Number.NaN, record?.score ?? Number.NaN, Boolean(record?.error), store.passScore)} />
        <strong>{number(strand.reward)}</strong>
        <span class="strand-ids">
          {strand.siblings.map((each) => (
            <a key={each.row} class="mono" href={links.episode(store.run, each.episode.record.episode_id)}>
              {each.name}
            </a>
          ))}
        </span>
      </div>
      {most > 0 && (
        <div class="strand-line dim">
          <span title={value.trained ? "advantage as trained, mean over turns" : "reward minus the group's mean"}>
            {value.trained ? "A" : "to the mean"}
          </span>
          <SignedBar value={value.value} most={most} />
        </div>
      )}
      <div class="dim">
        {plural(strand.turns.length, "turn")} · {tokens ? `${plural(tokens, "token")} \u00b7 ` : ""}{record?.stop_reason ?? "not ended"}
        {record?.error && ` \u00b7 ${record.error.kind ?? "error"}`}
      </div>
      {record?.error && (
        <div class="strand-error mono">
          <Text value={`${record.error.type ?? ""}: ${record.error.message ?? ""}`} line />
        </div>
      )}
      <div class="parting">
        {isReference ? (
          <span class="chip">reference</span>
        ) : (
          <>
            <PartingText {...{ strand, reference, parting }} />
            <button type="button" class="link-button" onClick={() => choose(strand)}>
              make it the reference
            </button>
          </>
        )}
      </div>
    </header>
  );
}

function PartingText({ strand, reference, parting }: { strand: Strand; reference: Strand; parting: Parting | null }): VNode {
  if (!parting) return <span>the same actions, another reward</span>;
  if (parting.unit < 0) return <span>parts after turn {parting.turn}: another observation</span>;
  const said = unitText(strand, parting);
  const logprob = unitLogprob(strand, parting);
  const there = unitText(reference, parting);
  return (
    <span>
      parts at turn {parting.turn}: {said === null ? "the end" : <bdi class="mono token-literal">{quoted(said)}</bdi>}
      {!Number.isNaN(logprob) && ` p ${probability(logprob)}`} for{" "}
      {there === null ? "the end" : <bdi class="mono token-literal">{quoted(there)}</bdi>}
    </span>
  );
}

function ActionCell(props: CellProps & { turn: number; parting: Parting | null; marks: Map<number, string> | undefined }): VNode {
  const { strand, turn, parting, marks, reference, color, newest, template, onlyDifferences } = props;
  const sibling = strand.siblings[0];
  const record = sibling?.episode.record.turns[turn];
  if (!sibling || !record) return <div class="strand-cell empty-cell" />;
  const segment = sibling.model.segments[record.segment];
  const shared = strand === reference ? 0 : sharedUnits(strand, parting, turn);
  const advantage = sibling.model.turnAdvantages[turn];
  const reward = record.result?.reward;
  const hidden = onlyDifferences && shared > 0;
  const tokens = sibling.episode.view.turns[turn]?.num_action_tokens;
  const parts = parting?.turn === turn && parting.unit >= 0 ? record.start + parting.unit : null;
  return (
    <div class="strand-cell action" data-turn={turn}>
      <div class="strand-turn">
        <strong>turn {turn}</strong>
        <span class={(reward ?? 0) > 0 ? "tone-pos" : (reward ?? 0) < 0 ? "tone-neg" : ""}>r {number(reward)}</span>
        {advantage !== null && advantage !== undefined && <span>A {signed(advantage)}</span>}
        {!!tokens && <span class="dim">{plural(tokens, "token")}</span>}
        {record.finish_reason && record.finish_reason !== "stop" && <span class="chip bad">{record.finish_reason}</span>}
      </div>
      {hidden && <span class="left-out dim">{shared === strand.turns[turn]?.length ? "the same" : `${shared} the same`} </span>}
      {segment?.ids.length ? (
        <Tokens
          {...{ segment, color, newest, template, shared, parts }}
          start={record.start}
          end={record.end}
          hideShared={onlyDifferences}
          {...(strand === reference && marks ? { marks } : {})}
        />
      ) : (
        <Words units={strand.turns[turn] ?? []} shared={shared} hide={hidden} />
      )}
    </div>
  );
}

/** An action of which the record has the text alone. */
function Words({ units, shared, hide }: { units: string[]; shared: number; hide: boolean }): VNode {
  return (
    <div class="tokens" dir="auto">
      {!hide && (
        <span class="t shared">
          <Text value={units.slice(0, shared).join("")} />
        </span>
      )}
      <Text value={units.slice(shared).join("")} />
    </div>
  );
}

function FeedbackCell({ strand, turn, template, newest, onlyDifferences, reference }: CellProps & { turn: number }): VNode {
  const sibling = strand.siblings[0];
  const record = sibling?.episode.record.turns[turn];
  const observation = record?.result?.observation;
  if (!sibling || !record || observation === undefined || observation === "" || observation === null) {
    return <div class="strand-cell empty-cell" />;
  }
  const other = reference.siblings[0]?.episode.record.turns[turn]?.result?.observation;
  const isShared = strand !== reference && JSON.stringify(other) === JSON.stringify(observation);
  const segment = sibling.model.segments[record.segment];
  const spans = segment?.spans.filter(([, , kind, of]) => of === turn && kind === "feedback") ?? [];
  const [first] = spans;
  const last = spans[spans.length - 1];
  return (
    <div class={`strand-cell feedback ${isShared ? "is-shared" : ""}`}>
      {onlyDifferences && isShared ? (
        <span class="dim">the same feedback</span>
      ) : segment && first && last ? (
        <Tokens {...{ segment, template, newest }} start={first[0]} end={last[1]} color="none" />
      ) : (
        <div class="tokens" dir="auto">
          <Text value={typeof observation === "string" ? observation : observationText(observation)} />
        </div>
      )}
    </div>
  );
}

function observationText(value: unknown): string {
  if (!Array.isArray(value)) return contentText(value);
  return value
    .map((each: unknown) => (each && typeof each === "object" && "content" in each ? contentText(each.content) : contentText(each)))
    .join("\n\n");
}
