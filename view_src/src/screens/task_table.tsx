import type { VNode } from "preact";
import type { RunStore } from "../data/store";
import { number } from "../lib/format";
import { type Strand, partingOf, unitText } from "../lib/group";
import { outcomeOf } from "../lib/outcome";
import { links } from "../lib/router";
import { quoted } from "../lib/visible";
import { Card, Folded, OutcomeMark } from "../ui/bits";

interface TableProps {
  store: RunStore;
  strands: Strand[];
  reference: Strand;
  /** Places of the strands that are open beside each other. */
  open: number[];
  setOpen: (open: number[]) => void;
}

/** Heads of many strands; those that are chosen stand beside each other below. */
export function StrandTable(props: TableProps): VNode {
  const { strands } = props;
  return (
    <Card title={`${strands.length} different`} note="choose which to read beside the reference" className="strand-table">
      <div class="strand-rows">
        <Folded
          items={strands.map((strand, place) => ({ strand, place }))}
          most={16}
          name="different ones"
          each={({ strand, place }) => <Row key={place} {...props} {...{ strand, place }} />}
        />
      </div>
    </Card>
  );
}

function Row({ store, strand, place, reference, open, setOpen }: TableProps & { strand: Strand; place: number }): VNode {
  const record = strand.siblings[0]?.episode.record;
  const parting = partingOf(reference, strand);
  const isOpen = strand === reference || open.includes(place);
  const toggle = (): void => setOpen(isOpen ? open.filter((each) => each !== place) : [...open, place].slice(-4));
  const said = parting && parting.unit >= 0 ? unitText(strand, parting) : null;
  return (
    <div class="strand-row">
      <label class="check">
        <input type="checkbox" checked={isOpen} disabled={strand === reference} onChange={toggle} aria-label="read it" />
        <OutcomeMark outcome={outcomeOf(strand.reward ?? Number.NaN, record?.score ?? Number.NaN, Boolean(record?.error), store.passScore)} />
        {number(strand.reward)}
      </label>
      <span class="strand-ids">
        {strand.siblings.map((each) => (
          <a key={each.row} class="mono" href={links.episode(store.run, each.episode.record.episode_id)}>
            {each.name}
          </a>
        ))}
      </span>
      <span class="dim">
        {strand === reference ? "reference" : parting ? `parts at turn ${parting.turn}` : "the same actions"}{" "}
        {said !== null && <bdi class="mono">{quoted(said)}</bdi>}
      </span>
    </div>
  );
}
