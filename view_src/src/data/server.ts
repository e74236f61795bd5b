// The host that answers requests.
import {
  type At,
  type EpisodesAnswer,
  type Head,
  type Meta,
  type Runs,
  type Source,
  SourceError,
  type StreamEvents,
  type StreamName,
} from "./types";

const TOKEN_KEY = "agentenv.token";

/** Take the token out of the address, so that no copy of the address carries it. */
export function takeToken(): void {
  const fragment = location.hash.slice(1);
  if (!fragment.startsWith("token=") && !fragment.startsWith("go=")) return;
  const fields = new URLSearchParams(fragment);
  const token = fields.get("token");
  try {
    if (token) localStorage.setItem(TOKEN_KEY, token);
  } catch {
    // A file or a browser without storage: the token holds until the page is closed.
  }
  if (token) held = token;
  history.replaceState(null, "", `#${fields.get("go") ?? "/"}`);
}

let held: string | null = null;

function token(): string | null {
  try {
    return held ?? localStorage.getItem(TOKEN_KEY);
  } catch {
    return held;
  }
}

async function ask(path: string, signal?: AbortSignal): Promise<Response> {
  const mine = token();
  const headers: HeadersInit = mine ? { Authorization: `Bearer ${mine}` } : {};
  let answer: Response;
  try {
    answer = await fetch(path, { headers, ...(signal ? { signal } : {}) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new SourceError("The server does not answer. Is agentenv view still running?", 0);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) throw new SourceError("Open the address that the command printed: it holds the token.", 401);
  const body: unknown = await answer.json().catch(() => null);
  const detail = body && typeof body === "object" && "detail" in body ? String(body.detail) : `status ${answer.status}`;
  throw new SourceError(detail, answer.status);
}

async function askJson<T>(path: string): Promise<T> {
  return (await (await ask(path)).json()) as T;
}

/** Call `each` with the complete lines of a body, a chunk of the network at a time. */
async function readLines(answer: Response, each: (lines: string[]) => void): Promise<void> {
  const reader = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (reader) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    if (lines.length) each(lines);
  }
}

interface Controls {
  next?: string;
  progress?: [number, number];
  reset?: boolean;
  end?: boolean;
  error?: string;
}

/** Hand lines to the events in their order; returns the controls' last `next`. */
export function dispatch(lines: string[], events: StreamEvents): string | null {
  let next: string | null = null;
  let data: string[] = [];
  const flush = (): void => {
    if (data.length) events.lines(data);
    data = [];
  };
  for (const line of lines) {
    if (!line.startsWith("!")) {
      if (line) data.push(line);
      continue;
    }
    flush();
    const control = JSON.parse(line.slice(1)) as Controls;
    if (control.next !== undefined) next = control.next;
    if (control.progress) events.progress(control.progress[0], control.progress[1]);
    if (control.reset) events.reset();
    if (control.end) events.end();
    if (control.error) throw new SourceError(control.error, 500);
  }
  flush();
  return next;
}

async function follow(run: number, name: StreamName, events: StreamEvents, signal: AbortSignal): Promise<void> {
  let next: string | null = null;
  while (!signal.aborted) {
    try {
      const from: string = next === null ? "" : `&from=${encodeURIComponent(next)}`;
      const answer = await ask(`/api/${name}?run=${run}&follow=1${from}`, signal);
      await readLines(answer, (lines) => {
        if (signal.aborted) return;
        next = dispatch(lines, events) ?? next;
      });
    } catch (error) {
      if (signal.aborted) return;
      events.end();
      if (error instanceof SourceError && [401, 403, 404].includes(error.status)) return;
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

async function grepSlices(
  run: number,
  text: string,
  fold: boolean,
  found: (at: At[]) => void,
  signal: AbortSignal,
): Promise<void> {
  let from: number | null = 0;
  while (from !== null && !signal.aborted) {
    const start: number = from;
    from = null;
    const query = `run=${run}&q=${encodeURIComponent(text)}&fold=${fold ? 1 : 0}&from=${start}`;
    await readLines(await ask(`/api/grep?${query}`, signal), (lines) => {
      const data = lines.filter((line) => line.startsWith("["));
      if (data.length) found(JSON.parse(`[${data.join(",")}]`) as At[]);
      for (const line of lines) {
        if (!line.startsWith("!")) continue;
        const control = JSON.parse(line.slice(1)) as { next?: number };
        if (control.next !== undefined) from = control.next;
      }
    });
  }
}

const places = (at: At[]): string => at.map(([offset, length]) => `${offset}:${length}`).join(",");

export function serverSource(): Source {
  return {
    isFile: false,
    note: null,
    clusters: null,
    runs: () => askJson<Runs>("/api/runs"),
    meta: (run) => askJson<Meta>(`/api/meta?run=${run}`),
    stream(run, name, events) {
      const stop = new AbortController();
      void follow(run, name, events, stop.signal);
      return () => stop.abort();
    },
    episodes: (run, at) => askJson<EpisodesAnswer>(`/api/episodes?run=${run}&at=${places(at)}`),
    heads: async (run, at) => (await askJson<{ heads: Head[] }>(`/api/heads?run=${run}&at=${places(at)}`)).heads,
    grep: grepSlices,
    diff: (a, b, by, cluster) => {
      const query = new URLSearchParams({ a: String(a), b: String(b), by, ...(cluster ? { cluster } : {}) });
      return askJson<unknown>(`/api/diff?${query.toString()}`);
    },
    has: () => true,
  };
}
