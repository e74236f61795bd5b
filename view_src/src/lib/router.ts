// Addresses. Ids, never numbers of rows: numbers change while a run grows.

export type Screen = "runs" | "overview" | "episodes" | "task" | "episode" | "training" | "compare";

export interface Route {
  screen: Screen;
  run: number;
  /** Second run of a comparison. */
  other: number;
  id: string;
  turn: number | null;
  token: number | null;
  query: URLSearchParams;
}

const SCREENS = new Set<string>(["overview", "episodes", "task", "episode", "training"]);

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const whole = (text: string | undefined): number => (text && /^\d+$/.test(text) ? Number(text) : 0);

/** Return the screen that an address names; an unknown one leads to the list of runs. */
export function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const parts = path.split("/").filter((part) => part).map(decoded);
  const route: Route = {
    screen: "runs", run: 0, other: 0, id: "", turn: null, token: null, query: new URLSearchParams(query),
  };
  const [first, screen, id] = parts;
  if (first === "compare") return { ...route, screen: "compare", run: whole(parts[1]), other: whole(parts[2]) };
  if (first === undefined || !/^\d+$/.test(first)) return route;
  route.run = Number(first);
  route.screen = screen !== undefined && SCREENS.has(screen) ? (screen as Screen) : "overview";
  route.id = id ?? "";
  for (const part of parts.slice(3)) {
    if (/^t\d+$/.test(part)) route.turn = Number(part.slice(1));
    if (/^k\d+$/.test(part)) route.token = Number(part.slice(1));
  }
  return route;
}

const LONE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** Return an id without the lone surrogates that no address can hold. */
export function wellFormed(id: string): string {
  return id.replace(LONE, "\ufffd");
}

const encoded = (id: string): string => encodeURIComponent(wellFormed(id));

type Query = Record<string, string | number | null | undefined>;

function withQuery(path: string, query: Query = {}): string {
  const fields = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") fields.set(name, String(value));
  }
  const text = fields.toString();
  return text ? `${path}?${text}` : path;
}

export const links = {
  runs: (): string => "#/",
  overview: (run: number): string => `#/${run}/overview`,
  episodes: (run: number, query: Query = {}): string => withQuery(`#/${run}/episodes`, query),
  task: (run: number, id: string, query: Query = {}): string =>
    withQuery(`#/${run}/task/${encoded(id)}`, query),
  episode: (run: number, id: string, token: { turn?: number; token?: number } = {}, query: Query = {}): string => {
    const turn = token.turn === undefined ? "" : `/t${token.turn}`;
    const place = token.token === undefined ? "" : `/k${token.token}`;
    return withQuery(`#/${run}/episode/${encoded(id)}${turn}${place}`, query);
  },
  training: (run: number, query: Query = {}): string => withQuery(`#/${run}/training`, query),
  compare: (a: number, b: number, query: Query = {}): string => withQuery(`#/compare/${a}/${b}`, query),
};

export function go(address: string, replace = false): void {
  if (replace) {
    history.replaceState(null, "", address);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = address;
  }
}

/** Change one field of the address without a step in the history. */
export function setQuery(name: string, value: string | null): void {
  const [path = "", query = ""] = location.hash.split(/\?(.*)/s);
  const fields = new URLSearchParams(query);
  if (value === null || value === "") fields.delete(name);
  else fields.set(name, value);
  const text = fields.toString();
  go(text ? `${path}?${text}` : path, true);
}
