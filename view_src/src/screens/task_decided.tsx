import type { VNode } from "preact";
import type { RunStore } from "../data/store";
import { number, probability } from "../lib/format";
import { type Decision, decisionsOf } from "../lib/decided";
import type { Strand } from "../lib/group";
import { links } from "../lib/router";
import { oneLine, quoted } from "../lib/visible";
import { Folded } from "../ui/bits";
import { siblingName } from "./task_names";

/** In words: where each sibling with less reward leaves a better one. */
export function Decided({ store, strands }: { store: RunStore; strands: Strand[] }): VNode | null {
  const decisions = decisionsOf(strands);
  if (!decisions.length) return null;
  return (
    <section class="decided" aria-label="where siblings with less reward part from better ones">
      <Folded
        items={decisions}
        most={4}
        name="siblings"
        each={(decision) => <Sentence key={namesOf(decision.worse)} store={store} decision={decision} />}
      />
    </section>
  );
}

function namesOf(strands: Strand[]): string {
  return strands.map(siblingName).join(", ");
}

function Token({ text, logprob }: { text: string | null; logprob: number }): VNode {
  if (text === null) return <em>the end</em>;
  return (
    <>
      <bdi class="token-literal mono">{quoted(text)}</bdi>
      {!Number.isNaN(logprob) && <span class="dim"> p {probability(logprob)}</span>}
    </>
  );
}

function Sentence({ store, decision }: { store: RunStore; decision: Decision }): VNode {
  const { worse, better, parting, isLater, said, logprob, context } = decision;
  const sibling = worse[0]?.siblings[0];
  const { start = 0, segment = 0 } = sibling?.episode.record.turns[parting.turn] ?? {};
  const where = parting.unit < 0 ? { turn: parting.turn } : { turn: parting.turn, token: start + parting.unit };
  const href = links.episode(store.run, sibling?.episode.record.episode_id ?? "", where, { segment: segment || null });
  return (
    <p class="decision" data-turn={parting.turn} data-unit={parting.unit}>
      <span class="mark o-fail">✗</span>
      <span>
        <strong class="mono">{namesOf(worse)}</strong> got {number(worse[0]?.reward)} and {isLater ? "parted earlier from" : "left"}{" "}
        <strong class="mono">{siblingName(better)}</strong>, which got {number(better.reward)}{isLater ? "; their rewards differ from" : ", at"}{" "}
        <a href={href}>turn {parting.turn}</a>{isLater && " on"}
        {parting.unit < 0 ? (
          ": the same action, another observation."
        ) : (
          <>
            {context.trim() ? (
              <>
                , after <bdi class="mono dim">{oneLine(context)}</bdi>
              </>
            ) : (
              ""
            )}
            : <Token text={said.worse} logprob={logprob.worse} /> instead of <Token text={said.better} logprob={logprob.better} />.
          </>
        )}
      </span>
    </p>
  );
}
