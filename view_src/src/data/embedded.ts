// The host that is one file: everything lies in elements of the page.
import {
  type At,
  type EpisodesAnswer,
  type Head,
  type Meta,
  type Source,
  SourceError,
  type StreamEvents,
  type StreamName,
} from "./types";

interface FileGroup {
  element: string;
  group_id: string;
  at: At[];
}

interface FileMeta {
  version: string;
  note: string | null;
  /** Where to open, if the address says nothing. */
  go?: string;
  runs: (Meta & { groups: FileGroup[] })[];
  diffs: { a: number; b: number; by: string; cluster: string | null; value: unknown }[];
}

async function unpack(element: string): Promise<string> {
  const packed = document.getElementById(element)?.textContent?.trim() ?? "";
  if (!packed) return "";
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).text();
}

const key = (at: At): string => `${at[0]}:${at[1]}`;

/** Reads the groups of a run, each once. */
class Groups {
  private readonly elements = new Map<string, string>();
  private readonly loaded = new Map<string, Promise<EpisodesAnswer["episodes"]>>();
  private texts: Promise<Pick<EpisodesAnswer, "texts" | "special">> | null = null;

  constructor(
    private readonly run: number,
    groups: FileGroup[],
  ) {
    for (const group of groups) for (const at of group.at) this.elements.set(key(at), group.element);
  }

  has(at: At): boolean {
    return this.elements.has(key(at));
  }

  elementNames(): string[] {
    return [...new Set(this.elements.values())];
  }

  load(element: string): Promise<EpisodesAnswer["episodes"]> {
    const before = this.loaded.get(element);
    if (before) return before;
    const now = unpack(element).then((text) => (JSON.parse(text) as EpisodesAnswer).episodes);
    this.loaded.set(element, now);
    return now;
  }

  async episodes(at: At[]): Promise<EpisodesAnswer> {
    this.texts ??= unpack(`texts-${this.run}`).then((text) =>
      text ? (JSON.parse(text) as EpisodesAnswer) : { texts: [], special: [] },
    );
    const { texts, special } = await this.texts;
    const episodes = await Promise.all(at.map((each) => this.one(each)));
    return { texts, special, episodes };
  }

  private async one(at: At): Promise<EpisodesAnswer["episodes"][number]> {
    const element = this.elements.get(key(at));
    if (element === undefined) return { at, error: "This episode is not in this file." };
    const found = (await this.load(element)).find((each) => key(each.at) === key(at));
    return found ?? { at, error: "This episode is not in this file." };
  }
}

/** The texts of an episode as the server searches them: prompt, actions, observations. */
function searched(answer: EpisodesAnswer["episodes"][number]): string {
  if ("error" in answer) return "";
  const { record } = answer;
  const parts = [record.prompt || record.task?.prompt, ...record.turns.flatMap((t) => [t.action, t.result?.observation])];
  return parts.map((part) => (typeof part === "string" ? part : texts(part))).join("\n");
}

function texts(value: unknown): string {
  if (typeof value === "string") return value;
  if (Array.isArray(value)) return value.map(texts).join("\n");
  if (value && typeof value === "object") return Object.values(value).map(texts).join("\n");
  return "";
}

async function grepGroups(groups: Groups, text: string, fold: boolean, found: (at: At[]) => void, signal: AbortSignal) {
  const needle = fold ? text.toLowerCase() : text;
  for (const element of groups.elementNames()) {
    if (signal.aborted) return;
    const hits = (await groups.load(element)).filter((each) => {
      const own = searched(each);
      return (fold ? own.toLowerCase() : own).includes(needle);
    });
    if (hits.length) found(hits.map((each) => each.at));
  }
}

function play(run: number, name: StreamName, events: StreamEvents): () => void {
  let stopped = false;
  void unpack(`${name}-${run}`).then((text) => {
    if (stopped) return;
    const lines = text.split("\n").filter((line) => line);
    if (lines.length) events.lines(lines);
    events.end();
  });
  return () => {
    stopped = true;
  };
}

export function embeddedSource(metaElement: HTMLElement): Source {
  const file = JSON.parse(metaElement.textContent ?? "{}") as FileMeta;
  if (file.go && location.hash.length < 2) history.replaceState(null, "", `#${file.go}`);
  const groups = file.runs.map((run, index) => new Groups(index, run.groups));
  const heads = new Map<number, Promise<Map<string, Head>>>();
  const of = <T>(list: T[], run: number): T => {
    const one = list[run];
    if (one === undefined) throw new SourceError(`This file has no run ${run}.`, 404);
    return one;
  };
  const readHeads = async (run: number): Promise<Map<string, Head>> => {
    const text = await unpack(`heads-${run}`);
    const all = text ? (JSON.parse(text) as { heads: Head[] }).heads : [];
    return new Map(all.map((head) => [key(head.at), head]));
  };
  return {
    isFile: true,
    note: file.note,
    clusters: [...new Set(file.diffs.flatMap((each) => each.cluster ?? []))],
    runs: async () => ({
      runs: file.runs.map((each, run) => ({ run, name: each.name, kind: each.kind })),
      version: file.version,
    }),
    meta: async (run) => ({ ...of(file.runs, run), run }),
    stream: play,
    episodes: async (run, at) => of(groups, run).episodes(at),
    async heads(run, at) {
      const known = heads.get(run) ?? readHeads(run);
      heads.set(run, known);
      const map = await known;
      return at.map((each) => map.get(key(each)) ?? { at: each });
    },
    grep: (run, text, fold, found, signal) => grepGroups(of(groups, run), text, fold, found, signal),
    async diff(a, b, by, cluster) {
      const isIt = (each: FileMeta["diffs"][number]): boolean =>
        each.a === a && each.b === b && each.by === by && (each.cluster ?? "") === cluster;
      const one = file.diffs.find(isIt);
      if (!one) throw new SourceError("This file does not hold this comparison. Open the runs with agentenv view.", 404);
      return one.value;
    },
    has: (run, at) => groups[run]?.has(at) ?? false,
  };
}
