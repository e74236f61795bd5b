// What the page holds of one run; screens subscribe to its changes.
import { IndexTable, parsed } from "./table";
import type { At, Episode, EpisodeOrError, Head, Meta, Source, StepLine, StreamEvents, StreamName } from "./types";

const HEADS_A_REQUEST = 256;
const EPISODES_A_REQUEST = 64;
const KEPT_EPISODES = 512;
const NOTIFY_MS = 150;
/** Milliseconds between two drawings while the index is read. */
const FILLING_MS = 1000;

export type Metrics = Map<string, number>;

export class TextTable {
  private readonly texts = new Map<number, string>();
  private readonly special = new Set<number>();

  add(texts: [number, string][], special: number[]): void {
    for (const [id, text] of texts) this.texts.set(id, text);
    for (const id of special) this.special.add(id);
  }

  of(id: number): string | undefined {
    return this.texts.get(id);
  }

  isSpecial(id: number): boolean {
    return this.special.has(id);
  }
}

export class RunStore {
  readonly index = new IndexTable();
  readonly texts = new TextTable();
  /** Metrics by step; a step that comes again replaces the earlier one. */
  readonly metrics = new Map<number, Metrics>();
  /** Lines of steps.jsonl by kind and step. */
  readonly steps = new Map<string, StepLine>();
  meta: Meta | null = null;
  problem: string | null = null;
  progress: [number, number] | null = null;
  readonly complete = new Set<StreamName>();
  version = 0;

  private readonly listeners = new Set<() => void>();
  private readonly heads = new Map<number, Head>();
  private readonly wanted = new Map<number, At>();
  private readonly episodes = new Map<string, EpisodeOrError>();
  private readonly stops = new Map<StreamName, () => void>();
  private isOpen = false;
  private wasPeeked = false;
  private notifying: number | null = null;
  private metaTimer: number | null = null;
  private toldAt = Number.NEGATIVE_INFINITY;
  /** True if the subscribers were told, or will be, that the index is complete. */
  private isWhole = false;

  constructor(
    readonly source: Source,
    readonly run: number,
  ) {}

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Begin, or begin again, to follow the run; streams that are followed already go on. */
  async open(streams: StreamName[] = ["index", "metrics", "steps"]): Promise<void> {
    if (streams.includes("index")) this.follow("index");
    if (!this.isOpen) {
      this.isOpen = true;
      await this.readMeta();
    }
    // Closed meanwhile, or a run, which has no others.
    if (!this.isOpen || this.meta?.kind !== "train") return;
    for (const name of streams) this.follow(name);
  }

  /** Read the metrics once, for charts of another training: a browser has six connections, and each stream holds one. */
  async peek(): Promise<void> {
    if (this.wasPeeked || this.metrics.size) return;
    this.wasPeeked = true;
    await this.readMeta();
    const events = this.events("metrics");
    const stop = this.source.stream(this.run, "metrics", { ...events, end: () => (events.end(), stop()) });
  }

  /** Stop following, so that another run has the connections. */
  close(): void {
    for (const stop of this.stops.values()) stop();
    this.stops.clear();
    this.isOpen = false;
    if (this.metaTimer !== null) clearTimeout(this.metaTimer);
    this.metaTimer = null;
  }

  private async readMeta(): Promise<void> {
    try {
      this.meta = await this.source.meta(this.run);
      this.problem = null;
    } catch (error) {
      this.problem = error instanceof Error ? error.message : String(error);
    }
    this.changed();
    if (this.meta?.is_writing && !this.source.isFile && this.isOpen) {
      this.metaTimer = window.setTimeout(() => void this.readMeta(), 5000);
    }
  }

  private follow(name: StreamName): void {
    if (this.stops.has(name)) return;
    // A stream that is read again from its beginning must not add to what an earlier one told.
    this.reset(name);
    this.stops.set(name, this.source.stream(this.run, name, this.events(name)));
  }

  private reset(name: StreamName): void {
    if (name === "metrics") this.metrics.clear();
    if (name === "steps") this.steps.clear();
    if (name !== "index") return;
    this.index.clear();
    this.heads.clear();
    this.episodes.clear();
  }

  private events(name: StreamName): StreamEvents {
    const soon = (): void => this.changedSoon();
    return {
      lines: (lines) => {
        if (name === "index") this.index.add(lines);
        else for (const line of parsed(lines)) this.addLine(name, line);
        soon();
      },
      reset: () => {
        this.reset(name);
        soon();
      },
      progress: (done, all) => {
        this.progress = [done, all];
        soon();
      },
      end: () => {
        if (!this.complete.has(name)) this.progress = null;
        this.complete.add(name);
        soon();
      },
    };
  }

  private addLine(name: StreamName, line: unknown): void {
    if (!line || typeof line !== "object" || !("step" in line) || typeof line.step !== "number") return;
    if (name === "steps") {
      const step = line as unknown as StepLine;
      this.steps.set(`${step.kind}:${step.step}`, step);
      return;
    }
    const row: Metrics = new Map();
    for (const [key, value] of Object.entries(line)) if (typeof value === "number") row.set(key, value);
    this.metrics.set(line.step, row);
  }

  /** Tell the subscribers at once, but not more often than they can draw: seldom while many rows come. */
  private changedSoon(): void {
    if (this.notifying !== null && !this.isUrgent()) return;
    if (this.notifying !== null) clearTimeout(this.notifying);
    const pause = this.complete.has("index") ? NOTIFY_MS : FILLING_MS;
    const wait = this.isUrgent() ? 0 : Math.max(0, this.toldAt + pause - performance.now());
    this.isWhole = this.complete.has("index");
    this.notifying = window.setTimeout(() => this.changed(), wait);
  }

  /** True if the last row of the index came just now. */
  private isUrgent(): boolean {
    return this.complete.has("index") && !this.isWhole;
  }

  private changed(): void {
    if (this.notifying !== null) clearTimeout(this.notifying);
    this.notifying = null;
    this.toldAt = performance.now();
    this.version++;
    for (const listener of this.listeners) listener();
  }

  /** The head of a row if it is here; else it is asked for, and subscribers hear when it comes. */
  head(row: number): Head | undefined {
    const known = this.heads.get(row);
    if (known || !this.source.has(this.run, this.index.at(row))) return known;
    if (this.wanted.size === 0) setTimeout(() => void this.readWanted(), 0);
    this.wanted.set(row, this.index.at(row));
    return undefined;
  }

  private async readWanted(): Promise<void> {
    const rows = [...this.wanted.keys()];
    this.wanted.clear();
    await this.readHeads(rows).catch(() => undefined);
    this.changed();
  }

  /** Read the heads of rows that are not here yet. */
  async readHeads(rows: number[], told?: (done: number) => void): Promise<void> {
    const missing = rows.filter((row) => !this.heads.has(row));
    for (let start = 0; start < missing.length; start += HEADS_A_REQUEST) {
      // An index that began again may have fewer rows.
      const part = missing.slice(start, start + HEADS_A_REQUEST).filter((row) => row < this.index.size);
      const heads = part.length ? await this.source.heads(this.run, part.map((row) => this.index.at(row))) : [];
      part.forEach((row, position) => this.heads.set(row, heads[position] ?? { at: this.index.at(row) }));
      told?.(start + part.length);
    }
  }

  /** Read the episodes of rows, in their order. */
  async readEpisodes(rows: number[], told?: (done: number) => void): Promise<EpisodeOrError[]> {
    const places = rows.map((row) => this.index.at(row));
    const missing = places.filter((at) => !this.episodes.has(at.join(":")));
    const all = new Map(places.map((at) => [at.join(":"), this.episodes.get(at.join(":"))]));
    for (let start = 0; start < missing.length; start += EPISODES_A_REQUEST) {
      const answer = await this.source.episodes(this.run, missing.slice(start, start + EPISODES_A_REQUEST));
      this.texts.add(answer.texts, answer.special);
      for (const episode of answer.episodes) {
        all.set(episode.at.join(":"), episode);
        this.keep(episode);
      }
      told?.(start + answer.episodes.length);
    }
    return places.map((at) => all.get(at.join(":")) ?? { at, error: "The host did not send this episode." });
  }

  private keep(episode: EpisodeOrError): void {
    if (this.episodes.size >= KEPT_EPISODES) {
      const oldest = this.episodes.keys().next();
      if (!oldest.done) this.episodes.delete(oldest.value);
    }
    this.episodes.set(episode.at.join(":"), episode);
  }

  get passScore(): number {
    return this.meta?.metrics?.pass_score ?? 1;
  }
}

export function isEpisode(episode: EpisodeOrError): episode is Episode {
  return !("error" in episode);
}

/** The stores of all runs; one of them, or two in a comparison, are open at a time. */
export class Stores {
  private readonly stores = new Map<number, RunStore>();

  constructor(readonly source: Source) {}

  /** Return the store of a run, which is followed from now on; those of others are closed. */
  open(run: number, beside: number[] = [], streams?: StreamName[]): RunStore {
    for (const [other, store] of this.stores) if (other !== run && !beside.includes(other)) store.close();
    const store = this.of(run);
    void store.open(streams);
    return store;
  }

  /** Return the store of a run whose metrics are read once. */
  peek(run: number): RunStore {
    const store = this.of(run);
    void store.peek();
    return store;
  }

  private of(run: number): RunStore {
    const known = this.stores.get(run) ?? new RunStore(this.source, run);
    this.stores.set(run, known);
    return known;
  }
}
