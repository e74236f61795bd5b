// The index of a run: one row a line of trajectories.jsonl, a column an array.

import { wellFormed } from "../lib/router";

/** Lines that are parsed at once. */
const PART = 1000;

/** A growing column: numbers in a typed array as long as it holds only numbers and nulls, anything else in a list. */
class Column {
  private numbers: Float64Array | null = new Float64Array(1024).fill(Number.NaN);
  private values: unknown[] = [];

  set(row: number, value: unknown): void {
    if (this.numbers === null) {
      this.values[row] = value;
    } else if (typeof value === "number" || value === null || value === undefined) {
      if (row >= this.numbers.length) this.grow(row);
      this.numbers[row] = typeof value === "number" ? value : Number.NaN;
    } else {
      this.values = Array.from(this.numbers.subarray(0, row), (each) => (Number.isNaN(each) ? null : each));
      this.numbers = null;
      this.values[row] = value;
    }
  }

  get(row: number): unknown {
    if (this.numbers === null) return this.values[row] ?? null;
    const value = this.numbers[row];
    return value === undefined || Number.isNaN(value) ? null : value;
  }

  /** The number of a row; NaN if there is none. */
  number(row: number): number {
    if (this.numbers !== null) return this.numbers[row] ?? Number.NaN;
    const value = this.values[row];
    return typeof value === "number" ? value : Number.NaN;
  }

  private grow(row: number): void {
    const wider = new Float64Array(Math.max(row + 1, (this.numbers?.length ?? 0) * 2)).fill(Number.NaN);
    if (this.numbers) wider.set(this.numbers);
    this.numbers = wider;
  }
}

export interface Group {
  id: string;
  /** Rows of the episodes that count, by episode id. */
  rows: number[];
}

const byNumberThenText = new Intl.Collator("en", { numeric: true });
/** Fields that no screen shows. What is not kept costs no memory. */
const LEFT_OUT = new Set([
  "bridges",
  "refusals",
  "refusal_reasons",
  "finish",
  "marks",
  "input_tokens",
  "cached_tokens",
  "crc",
  "check",
]);

/** Fields whose values are not known where a server did not count tokens. */
const COUNTS = ["prompt_tokens", "action_tokens"];

export class IndexTable {
  private columns = new Map<string, Column>();
  private infos = new Map<string, Column>();
  /** Places in a line of the index, with their columns. */
  private kept: [number, Column][] = [];
  private places = new Map<string, number>();
  private rowOf = new Map<string, number>();
  private counted: Uint8Array = new Uint8Array(1024);
  private rowsInOrder: number[] = [];
  private groupsById = new Map<string, Group>();
  /** Groups whose rows may be out of order. */
  private unsorted = new Set<Group>();
  /** True if a row that counted does so no more. */
  private isStale = false;
  size = 0;
  version = 0;

  clear(): void {
    this.columns = new Map();
    this.infos = new Map();
    this.kept = [];
    this.places = new Map();
    this.rowOf = new Map();
    this.counted = new Uint8Array(1024);
    this.size = 0;
    this.forgetOrder();
    this.version++;
  }

  /** Add lines of the index; lines that are not JSON are skipped, as a torn last line is. */
  add(lines: string[]): void {
    // Parts of the lines, so that what is parsed is dropped soon: what lives longer is costly to collect.
    for (let start = 0; start < lines.length; start += PART) {
      for (const row of parsed(lines.slice(start, start + PART))) {
        if (Array.isArray(row)) this.push(row);
        else if (row && typeof row === "object" && "fields" in row) this.name((row.fields as unknown[]).map(String));
      }
    }
    this.version++;
  }

  /** Make the columns of fields. */
  private name(fields: string[]): void {
    this.places = new Map(fields.map((field, place) => [field, place]));
    this.kept = [];
    for (const [field, place] of this.places) {
      if (LEFT_OUT.has(field) || field === "info") continue;
      let column = this.columns.get(field);
      if (!column) this.columns.set(field, (column = new Column()));
      this.kept.push([place, column]);
    }
  }

  private push(values: unknown[]): void {
    const row = this.size++;
    for (const [place, column] of this.kept) column.set(row, values[place]);
    if (values[this.places.get("uncounted") ?? -1]) for (const name of COUNTS) this.columns.get(name)?.set(row, null);
    this.pushInfo(row, values[this.places.get("info") ?? -1]);
    if (row >= this.counted.length) {
      const wider = new Uint8Array(this.counted.length * 2);
      wider.set(this.counted);
      this.counted = wider;
    }
    const id = this.text("episode_id", row);
    const before = this.rowOf.get(id);
    if (before !== undefined) {
      // Of several lines of an episode the first without an error counts, else the last.
      if (this.value("error", before) === null) return;
      this.counted[before] = 0;
      this.isStale = true;
    }
    this.counted[row] = 1;
    this.rowOf.set(id, row);
    if (!this.isStale) this.order(row);
  }

  /** Keep the numbers of `info`: the last one of each key, of which the index may have the sum over turns too. */
  private pushInfo(row: number, info: unknown): void {
    if (!info || typeof info !== "object") return;
    for (const [key, value] of Object.entries(info)) {
      let column = this.infos.get(key);
      if (!column) this.infos.set(key, (column = new Column()));
      column.set(row, Array.isArray(value) ? value[0] : value);
    }
  }

  has(column: string): boolean {
    return this.size > 0 && this.columns.has(column);
  }

  value(column: string, row: number): unknown {
    return this.columns.get(column)?.get(row) ?? null;
  }

  number(column: string, row: number): number {
    return this.columns.get(column)?.number(row) ?? Number.NaN;
  }

  /** Return the numbers of a column for the rows that count, without rows that have none. */
  numbers(column: string): Float64Array {
    const from = this.columns.get(column);
    const found = new Float64Array(this.rows().length);
    let size = 0;
    for (const row of this.rows()) {
      const value = from?.number(row) ?? Number.NaN;
      if (!Number.isNaN(value)) found[size++] = value;
    }
    return found.subarray(0, size);
  }

  /** Return how to read the values of a column; null if the index lacks it. */
  reader(column: string): ((row: number) => unknown) | null {
    const from = this.columns.get(column);
    return from ? (row) => from.get(row) : null;
  }

  text(column: string, row: number): string {
    const value = this.value(column, row);
    return value === null ? "" : String(value);
  }

  /** Return the keys of `info` that have numbers, in the order in which they came. */
  infoKeys(): string[] {
    return [...this.infos.keys()];
  }

  /** Return the last number of a key of `info` in an episode; null if there is none. */
  info(key: string, row: number): unknown {
    return this.infos.get(key)?.get(row) ?? null;
  }

  at(row: number): [number, number] {
    return [this.number("offset", row), this.number("length", row)];
  }

  /** The row of an episode; its id may come from an address, which has no lone surrogates. */
  find(episodeId: string): number | undefined {
    const row = this.rowOf.get(episodeId);
    if (row !== undefined || !episodeId.includes("\ufffd")) return row;
    return [...this.rowOf].find(([id]) => wellFormed(id) === episodeId)?.[1];
  }

  /** The group of an id, which may come from an address. */
  group(id: string): Group | undefined {
    const groups = this.groups();
    const group = groups.get(id);
    if (group || !id.includes("\ufffd")) return group;
    return [...groups.values()].find((each) => wellFormed(each.id) === id);
  }

  /** Rows that count, in the order of the record. */
  rows(): number[] {
    this.putInOrder();
    return this.rowsInOrder;
  }

  /** Groups in the order of their first episode. */
  groups(): Map<string, Group> {
    this.putInOrder();
    return this.groupsById;
  }

  episodeIds(): string[] {
    return [...this.rowOf.keys()];
  }

  private forgetOrder(): void {
    this.rowsInOrder = [];
    this.groupsById = new Map();
    this.unsorted = new Set();
    this.isStale = false;
  }

  /** Add a row that counts behind the others. */
  private order(row: number): void {
    this.rowsInOrder.push(row);
    const id = this.text("group_id", row);
    const group = this.groupsById.get(id);
    if (!group) {
      this.groupsById.set(id, { id, rows: [row] });
      return;
    }
    if (!this.follows(group.rows[group.rows.length - 1] ?? row, row)) this.unsorted.add(group);
    group.rows.push(row);
  }

  /** True if the ids of two rows are surely in order: ids of one length differ in the digits of a number. */
  private follows(before: number, row: number): boolean {
    const [first, second] = [this.text("episode_id", before), this.text("episode_id", row)];
    return first.length === second.length && first <= second;
  }

  private putInOrder(): void {
    if (this.isStale) {
      this.forgetOrder();
      for (let row = 0; row < this.size; row++) if (this.counted[row]) this.order(row);
    }
    for (const group of this.unsorted) {
      group.rows.sort((a, b) => byNumberThenText.compare(this.text("episode_id", a), this.text("episode_id", b)));
    }
    this.unsorted.clear();
  }
}

/** Parse lines at once, which is several times faster than one at a time; line by line where one of them is not JSON. */
export function parsed(lines: string[]): unknown[] {
  try {
    return JSON.parse(`[${lines.join(",")}]`) as unknown[];
  } catch {
    return lines.flatMap((line) => {
      try {
        return [JSON.parse(line) as unknown];
      } catch {
        return [];
      }
    });
  }
}
