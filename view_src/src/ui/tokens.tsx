// Tokens as text: a span each, in blocks that the browser lays out once they are in sight.
import type { VNode } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { type ColorBy, type Segment, colorClass } from "../lib/tokens";
import { visible } from "../lib/visible";

const BLOCK = 400;
/** Blocks that are drawn before the page is painted: a screen or two. */
const FIRST = 4;
/** Blocks of each piece that follows. */
const AT_ONCE = 12;

export interface TokensProps {
  segment: Segment;
  start: number;
  end: number;
  color: ColorBy;
  newest: number;
  template: boolean;
  /** Tokens from the start that a sibling shares. */
  shared?: number;
  /** Leave the shared ones out. */
  hideShared?: boolean;
  /** Token at which a sibling parts. */
  parts?: number | null;
  /** Tokens to be marked, with what a pointer over them tells. */
  marks?: Map<number, string>;
  selected?: number | null;
}

/** What has a sign of its own, or is shown by its number: seldom in a text. */
const PLAIN = /^[ -~\u00a1-\u00ac\u00ae-\u02ff]*$/;

function fill(node: HTMLElement, text: string): void {
  if (PLAIN.test(text)) {
    node.textContent = text;
    return;
  }
  // A newline is shown by a sign that is no text, so that copies of the text do not have it.
  text.split("\n").forEach((line, position) => {
    if (position) {
      const sign = document.createElement("i");
      sign.className = "newline";
      node.append(sign, "\n");
    }
    if (line) node.append(visible(line));
  });
}

function isShown(props: TokensProps, token: number): boolean {
  if (props.hideShared && token < props.start + (props.shared ?? 0)) return false;
  return props.template || props.segment.content[token] === 1;
}

function classOf(props: TokensProps, token: number): string {
  const { segment } = props;
  const color = colorClass(segment, token, props.color, props.newest);
  let classes = color ? `t ${color}` : "t";
  if (segment.isSpecial(token)) classes += " special";
  if (segment.content[token] !== 1) classes += " template";
  if (token < props.start + (props.shared ?? 0)) classes += " shared";
  if (props.parts === token) classes += " parts";
  if (props.marks?.has(token)) classes += " parts-here";
  return classes;
}

function seam(segment: Segment, before: number, token: number): HTMLElement | null {
  const [from, to] = [segment.versions[before] ?? -1, segment.versions[token] ?? -1];
  if (from < 0 || to < 0 || from === to) return null;
  const node = document.createElement("b");
  node.className = "seam";
  node.dataset["seam"] = `v${from}\u2502v${to}`;
  return node;
}

/** The tokens of a block: numbers, elements, and what their classes end with, whatever the color. */
interface Block {
  tokens: number[];
  elements: HTMLElement[];
  suffixes: string[];
}

function makeBlock(root: HTMLElement, props: TokensProps, tokens: number[], isLazy: boolean): Block {
  const { segment, start, marks } = props;
  const node = document.createElement("span");
  node.className = isLazy ? "block lazy" : "block";
  const block: Block = { tokens, elements: [], suffixes: [] };
  for (const token of tokens) {
    const between = token > start ? seam(segment, token - 1, token) : null;
    if (between) node.append(between);
    const element = document.createElement("span");
    element.setAttribute("data-k", String(token));
    const text = segment.text(token);
    fill(element, text);
    const told = marks?.get(token);
    if (told !== undefined) element.title = told;
    block.elements.push(element);
    block.suffixes.push(text === "" ? " no-text" : "");
    node.append(element);
  }
  colorBlock(block, props);
  root.append(node);
  return block;
}

function colorBlock({ tokens, elements, suffixes }: Block, props: TokensProps): void {
  tokens.forEach((token, place) => {
    const element = elements[place];
    const next = classOf(props, token) + (suffixes[place] ?? "") + (props.selected === token ? " selected" : "");
    if (element && element.className !== next) element.className = next;
  });
}

/** Return where a block ends that begins at a place: a block begins a line, so behind a newline if one is near, or a word. */
function blockEnd(segment: Segment, shown: number[], start: number): number {
  const end = start + BLOCK;
  if (end >= shown.length) return shown.length;
  const text = (place: number): string => segment.text(shown[place] ?? -1);
  for (let at = end; at > start + BLOCK / 4; at--) if (text(at - 1).endsWith("\n")) return at;
  for (let at = end; at > start + BLOCK / 4; at--) if (text(at).startsWith(" ")) return at;
  return end;
}

/** Draws tokens into an element: those at its top, and to the selected one, at once, the others in short pieces. */
class Drawing {
  private readonly blocks: Block[] = [];
  private readonly waiting: number[][] = [];
  private timer = 0;

  constructor(
    private readonly root: HTMLElement,
    private props: TokensProps,
  ) {
    const shown: number[] = [];
    for (let token = props.start; token < props.end; token++) if (isShown(props, token)) shown.push(token);
    for (let at = 0, end = 0; at < shown.length; at = end) {
      end = blockEnd(props.segment, shown, at);
      this.waiting.push(shown.slice(at, end));
    }
    root.replaceChildren();
    this.draw(FIRST);
    this.drawTo(props.selected ?? -1);
    this.later();
  }

  recolor(props: TokensProps): void {
    this.props = props;
    this.drawTo(props.selected ?? -1);
    for (const block of this.blocks) colorBlock(block, props);
  }

  stop(): void {
    clearTimeout(this.timer);
  }

  private draw(most: number): void {
    const isLazy = this.props.end - this.props.start > BLOCK;
    for (const tokens of this.waiting.splice(0, most)) this.blocks.push(makeBlock(this.root, this.props, tokens, isLazy));
  }

  private drawTo(token: number): void {
    if (token < this.props.start || token >= this.props.end) return;
    this.draw(this.waiting.findIndex((tokens) => (tokens[tokens.length - 1] ?? -1) >= token) + 1);
  }

  private later(): void {
    if (!this.waiting.length) return;
    this.timer = window.setTimeout(() => {
      this.draw(AT_ONCE);
      this.later();
    }, 0);
  }
}

export function Tokens(props: TokensProps): VNode {
  const root = useRef<HTMLDivElement>(null);
  const drawing = useRef<Drawing | null>(null);
  const drawn = useRef(props);
  const { segment, start, end, template, shared, hideShared, parts, marks, color, newest, selected } = props;
  useLayoutEffect(() => {
    if (!root.current) return undefined;
    const mine = new Drawing(root.current, props);
    drawing.current = mine;
    drawn.current = props;
    return () => mine.stop();
  }, [segment, start, end, template, hideShared, hideShared ? shared : 0, marks]);
  useLayoutEffect(() => {
    if (drawn.current !== props) drawing.current?.recolor(props);
  }, [segment, start, end, template, shared, hideShared, parts, marks, color, newest, selected]);
  return <div ref={root} class="tokens" data-segment={segment.index} dir="auto" />;
}

/** Return the token that an event is about. */
export function tokenOf(event: Event): { segment: number; token: number } | null {
  const target = event.target instanceof Element ? event.target.closest<HTMLElement>("[data-k]") : null;
  const owner = target?.closest<HTMLElement>("[data-segment]");
  if (!target || !owner) return null;
  return { segment: Number(owner.dataset["segment"]), token: Number(target.dataset["k"]) };
}
