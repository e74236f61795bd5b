// The conversation of an episode as it was said.
import type { EpisodeRecord } from "../data/types";

export interface Shown {
  role: string;
  text: string;
  reasoning: string;
  /** Tool calls, one text each. */
  calls: string[];
  turn: number;
}

/** Return the text of content: text, or parts of which some are not text. */
export function contentText(content: unknown): string {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  if (!Array.isArray(content)) return JSON.stringify(content);
  return content.map(partText).join("");
}

function partText(part: unknown): string {
  if (typeof part === "string") return part;
  if (part && typeof part === "object") {
    if ("text" in part && typeof part.text === "string") return part.text;
    if ("type" in part) return `[${String(part.type)}]`;
  }
  return JSON.stringify(part);
}

function messages(value: unknown, role: string, turn: number): Shown[] {
  if (value === null || value === undefined || value === "") return [];
  if (!Array.isArray(value)) return [{ role, text: contentText(value), reasoning: "", calls: [], turn }];
  return value.map((each) => message(each, role, turn));
}

function message(value: unknown, role: string, turn: number): Shown {
  if (!value || typeof value !== "object") return { role, text: contentText(value), reasoning: "", calls: [], turn };
  const fields = new Map(Object.entries(value));
  const calls = fields.get("tool_calls");
  const reasoning = fields.get("reasoning") ?? fields.get("reasoning_content");
  return {
    role: String(fields.get("role") ?? role),
    text: contentText(fields.get("content") ?? fields.get("text")),
    reasoning: typeof reasoning === "string" ? reasoning : "",
    calls: Array.isArray(calls) ? calls.map((call) => JSON.stringify(call, null, 1)) : [],
    turn,
  };
}

/** Return the texts of the prompt; of an episode that failed before it had one, that of its task. */
export function promptTexts(record: EpisodeRecord): string[] {
  return promptOf(record).map((each) => each.text);
}

function promptOf(record: EpisodeRecord): Shown[] {
  const own = messages(record.prompt, "user", -1);
  return own.length ? own : messages(record.task?.prompt, "user", -1);
}

/** Return what was said in an episode, in order; actions have the role assistant. */
export function conversation(record: EpisodeRecord): Shown[] {
  const said = promptOf(record);
  record.turns.forEach((turn, index) => {
    if (turn.answer && typeof turn.answer === "object") {
      const answer = message(turn.answer, "assistant", index);
      said.push({ ...answer, text: answer.text || (turn.action ?? "") });
    } else {
      said.push({ role: "assistant", text: turn.action ?? "", reasoning: "", calls: [], turn: index });
    }
    said.push(...messages(turn.result?.observation, "user", index));
  });
  return said;
}
