import type { Strand } from "../lib/group";
import { oneLine } from "../lib/visible";

/** Return the part of an episode's id that tells it from its siblings. */
export function shortId(episodeId: string): string {
  const at = episodeId.lastIndexOf("/");
  return oneLine(at >= 0 ? `#${episodeId.slice(at + 1)}` : episodeId);
}

/** Return the name of a strand: its first episode, and how many say the same. */
export function siblingName(strand: Strand): string {
  const [first, ...rest] = strand.siblings.map((each) => each.name);
  return rest.length ? `${first} and ${rest.length} more` : (first ?? "");
}
