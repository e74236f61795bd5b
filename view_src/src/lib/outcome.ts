export type Outcome = "pass" | "part" | "fail" | "none" | "error";

export const GLYPHS: Record<Outcome, string> = {
  pass: "\u2713", part: "\u25d0", fail: "\u2717", none: "?", error: "!",
};
export const OUTCOME_NAMES: Record<Outcome, string> = {
  pass: "passed", part: "partly", fail: "failed", none: "no reward", error: "error",
};

/** Return the outcome of an episode: passed from `passScore` of its score on, or of its reward if it has no score. */
export function outcomeOf(reward: number, score: number, hasError: boolean, passScore: number): Outcome {
  if (hasError) return "error";
  const quality = Number.isNaN(score) ? reward : score;
  if (Number.isNaN(quality)) return "none";
  if (quality >= passScore) return "pass";
  return quality > 0 ? "part" : "fail";
}
