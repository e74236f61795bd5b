import type { ComponentChildren, VNode } from "preact";
import { useState } from "preact/hooks";
import type { RunStore } from "../data/store";
import { count, number, signed } from "../lib/format";
import { GLYPHS, OUTCOME_NAMES, type Outcome, outcomeOf } from "../lib/outcome";
import { links } from "../lib/router";
import { oneLine, visible } from "../lib/visible";

/** Text from data: each character can be seen, and its direction stays inside. */
export function Text({ value, line = false }: { value: string; line?: boolean }): VNode {
  return <bdi>{line ? oneLine(value) : visible(value)}</bdi>;
}

export function Card(props: {
  title?: ComponentChildren;
  note?: ComponentChildren;
  actions?: ComponentChildren;
  children: ComponentChildren;
  className?: string;
}): VNode {
  return (
    <section class={`card ${props.className ?? ""}`}>
      {props.title !== undefined && (
        <header class="card-head">
          <h2>{props.title}</h2>
          {props.note !== undefined && <span class="dim">{props.note}</span>}
          {props.actions !== undefined && <span class="card-actions">{props.actions}</span>}
        </header>
      )}
      {props.children}
    </section>
  );
}

export function Tile(props: { value: ComponentChildren; name: string; note?: ComponentChildren; tone?: string }): VNode {
  return (
    <div class={`tile ${props.tone ?? ""}`}>
      <div class="tile-value">{props.value}</div>
      <div class="tile-name">{props.name}</div>
      <div class="tile-note">{props.note}</div>
    </div>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }): VNode {
  return (
    <div class="empty" role="status">
      <p class="empty-title">{title}</p>
      {children !== undefined && <div class="empty-text">{children}</div>}
    </div>
  );
}

export function outcomeOfRow(store: RunStore, row: number): Outcome {
  const { index } = store;
  const hasError = index.value("error", row) !== null;
  return outcomeOf(index.number("reward", row), index.number("score", row), hasError, store.passScore);
}

export function OutcomeMark({ outcome }: { outcome: Outcome }): VNode {
  return (
    <span class={`mark o-${outcome}`} title={OUTCOME_NAMES[outcome]}>
      {GLYPHS[outcome]}
    </span>
  );
}

/** An episode as a cell: a glyph and a color, a link to it. */
export function EpisodeCell({ store, row, chosen = false }: { store: RunStore; row: number; chosen?: boolean }): VNode {
  const id = store.index.text("episode_id", row);
  const outcome = outcomeOfRow(store, row);
  const reward = store.index.number("reward", row);
  const told = `episode ${oneLine(id)}, ${OUTCOME_NAMES[outcome]}, reward ${number(reward)}`;
  return (
    <a
      class={`cell o-${outcome} ${chosen ? "chosen" : ""}`}
      href={links.episode(store.run, id)}
      title={told}
      aria-label={told}
      aria-current={chosen ? "true" : undefined}
    >
      {GLYPHS[outcome]}
    </a>
  );
}

export function Cells({ store, rows, chosen }: { store: RunStore; rows: number[]; chosen?: number }): VNode {
  return (
    <span class="cells">
      {rows.map((row) => (
        <EpisodeCell key={row} store={store} row={row} chosen={row === chosen} />
      ))}
    </span>
  );
}

/** A number about zero as a bar to its left or right, with its sign. */
export function SignedBar({ value, most, digits = 2 }: { value: number; most: number; digits?: number }): VNode {
  const share = Number.isNaN(value) || most === 0 ? 0 : Math.min(1, Math.abs(value) / most);
  const tone = value > 0 ? "pos" : value < 0 ? "neg" : "";
  return (
    <span class="signed">
      <span class={`signed-text ${tone}`}>{signed(value, digits)}</span>
      <svg class="signed-bar" viewBox="-50 0 100 8" preserveAspectRatio="none" aria-hidden="true">
        <line x1="0" y1="0" x2="0" y2="8" />
        <rect class={tone} x={value < 0 ? -50 * share : 0} y="1" width={50 * share} height="6" />
      </svg>
    </span>
  );
}

export interface Part {
  name: string;
  value: number;
  text: string;
  href?: string;
}

/** Shares of a whole as one bar, with a legend. */
export function Shares({ parts }: { parts: Part[] }): VNode {
  const sum = parts.reduce((total, part) => total + part.value, 0);
  let x = 0;
  return (
    <div class="shares">
      <svg viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">
        {parts.map((part, k) => {
          const width = sum ? (part.value / sum) * 1000 : 0;
          x += width;
          return <rect key={part.name} class={`series${k % 7}`} x={x - width} y="0" width={width} height="10" />;
        })}
      </svg>
      <ul>
        {parts.map((part, k) => (
          <li key={part.name}>
            <span class={`swatch series${k % 7}`} aria-hidden="true" />
            {part.href ? (
              <a href={part.href}>
                <Text value={part.name} line />
              </a>
            ) : (
              <Text value={part.name} line />
            )}
            <span class="dim">{part.text}</span>
          </li>
        ))}
      </ul>
    </div>
  );
}

/** A list that begins folded after its first items, if more than one follows. */
export function Folded<T>(props: { items: T[]; most: number; each: (item: T) => VNode; name: string }): VNode {
  const [open, setOpen] = useState(false);
  const shown = open || props.items.length === props.most + 1 ? props.items : props.items.slice(0, props.most);
  const rest = props.items.length - shown.length;
  return (
    <>
      {shown.map(props.each)}
      {rest > 0 && (
        <button type="button" class="more" onClick={() => setOpen(true)}>
          {count(rest)} more {props.name}
        </button>
      )}
    </>
  );
}

export function CopyButton({ text, name }: { text: string; name: string }): VNode {
  const [said, setSaid] = useState(false);
  const copy = async (): Promise<void> => {
    await copyText(text);
    setSaid(true);
    setTimeout(() => setSaid(false), 1500);
  };
  return (
    <button type="button" class="button small" onClick={() => void copy()}>
      {said ? "copied" : name}
    </button>
  );
}

export async function copyText(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
