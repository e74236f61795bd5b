// Keys. The latest layer that knows a key has it; typing in a field is left alone, but for Escape.
import { useEffect, useRef } from "preact/hooks";

export type KeyMap = Record<string, (event: KeyboardEvent) => void>;

const layers: { current: KeyMap }[] = [];
let pending = "";
let pendingTimer = 0;

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.matches("input:not([type=checkbox]), textarea, select");
}

export function pressed(event: KeyboardEvent): void {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (isTyping(event.target) && event.key !== "Escape") return;
  // A focused link or button keeps its own Enter.
  if (event.key === "Enter" && event.target instanceof HTMLElement && event.target.matches("a, button, summary")) return;
  const name = pending + event.key;
  pending = "";
  for (const layer of [...layers].reverse()) {
    const action = Object.hasOwn(layer.current, name) ? layer.current[name] : undefined;
    if (!action) continue;
    event.preventDefault();
    action(event);
    return;
  }
  if (event.key === "g") {
    pending = "g ";
    clearTimeout(pendingTimer);
    pendingTimer = window.setTimeout(() => {
      pending = "";
    }, 1500);
  }
}

/** Have keys for as long as the component is shown. */
export function useKeys(map: KeyMap): void {
  const latest = useRef(map);
  latest.current = map;
  useEffect(() => {
    const layer = latest;
    layers.push(layer);
    return () => {
      layers.splice(layers.indexOf(layer), 1);
    };
  }, []);
}

export const HELP: [string, string][] = [
  ["j k", "next, previous row, episode or step"],
  ["J K", "next, previous task"],
  ["Enter", "open"],
  ["u", "up: episode, task, overview"],
  ["[ ]", "previous, next turn"],
  ["n N", "next, previous improbable token"],
  ["c C", "next, previous color"],
  ["t", "template tokens"],
  ["d", "only what differs"],
  ["x", "mark an episode; with a second one, both beside each other"],
  ["/", "filter, or find"],
  ["g o  g e  g t  g c", "overview, episodes, training, compare"],
  ["y", "copy the address"],
  ["m", "copy the episode as Markdown"],
  ["b", "dark or light"],
  ["?", "this list"],
  ["Esc", "close, or leave the field"],
];
