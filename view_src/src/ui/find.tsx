// Finds a text in the tokens of an episode, also where it goes over several of them.
import type { VNode } from "preact";
import { useMemo, useRef, useState } from "preact/hooks";
import { count } from "../lib/format";
import { useKeys } from "../lib/keys";
import type { EpisodeModel, Segment } from "../lib/tokens";

interface Place {
  segment: number;
  token: number;
}

/** Return the tokens in which an occurrence of a text begins; case does not matter. */
export function occurrences(segment: Segment, text: string): number[] {
  const wanted = text.toLowerCase();
  const starts: number[] = [];
  let whole = "";
  for (let token = 0; token < segment.ids.length; token++) {
    starts.push(whole.length);
    // Lower case of few characters is longer than the character: those would move all places behind them.
    const own = segment.text(token);
    const lower = own.toLowerCase();
    whole += lower.length === own.length ? lower : own;
  }
  const found: number[] = [];
  let token = 0;
  for (let at = whole.indexOf(wanted); at >= 0; at = whole.indexOf(wanted, at + wanted.length)) {
    while ((starts[token + 1] ?? Number.POSITIVE_INFINITY) <= at) token++;
    found.push(token);
  }
  return found;
}

export function Find({ model, open }: { model: EpisodeModel; open: (place: Place) => void }): VNode {
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const field = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => field.current?.select() });
  const found = useMemo(
    () => (text ? model.segments.flatMap((segment) => occurrences(segment, text).map((token) => ({ segment: segment.index, token }))) : []),
    [model, text],
  );
  const show = (next: number): void => {
    const place = found[(next + found.length) % found.length];
    if (!place) return;
    setAt((next + found.length) % found.length);
    open(place);
  };
  const keyed = (event: KeyboardEvent): void => {
    if (event.key === "Escape") field.current?.blur();
    if (event.key === "Enter") show(event.shiftKey ? at - 1 : at + 1);
  };
  const changed = (value: string): void => {
    setText(value);
    setAt(-1);
  };
  return (
    <span class="find">
      <input
        ref={field}
        class="short-field"
        type="search"
        spellcheck={false}
        aria-label="find in the episode"
        placeholder="find ( / )"
        title="Enter: next, Shift Enter: previous"
        value={text}
        onInput={(event) => changed(event.currentTarget.value)}
        onKeyDown={keyed}
      />
      <span class="dim" role="status">
        {text ? (found.length && at >= 0 ? `${count(at + 1)} of ${count(found.length)}` : `${count(found.length)} found`) : ""}
      </span>
    </span>
  );
}
