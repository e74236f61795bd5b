// An episode as Markdown, for issues. Nothing of the data is read as Markdown, and nothing of it pings a person.
import type { Episode } from "../data/types";
import { fixed, number, signed } from "./format";
import { contentText, conversation } from "./messages";
import type { EpisodeModel } from "./tokens";
import { leastProbable } from "./tokens";
import { probability } from "./format";
import { quoted, visible } from "./visible";

/** Return text in a fence longer than any run of backticks in it. */
function fenced(text: string): string {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((found) => found[0].length));
  const fence = "`".repeat(longest + 1);
  return `${fence}text\n${visible(text)}\n${fence}`;
}

/** Return text for a line: no markup, no mention, no reference. */
function inline(text: string): string {
  return visible(text)
    .replace(/\s+/g, " ")
    .replace(/[\\`*_{}[\]<>|~]/g, "\\$&")
    .replace(/([@#])(?=\w)/g, "$1\u200d");
}

/** Return an episode with the facts of `agentenv view --md`. */
export function markdownOf(episode: Episode, model: EpisodeModel, run: string): string {
  const { record } = episode;
  const { error, task } = record;
  const label = task?.label ?? null;
  const lines = [
    `**${inline(record.episode_id)}**: reward ${number(record.reward ?? null)}, ${record.stop_reason ?? "not ended"}, ${record.turns.length} turns`,
    "",
    `Run ${inline(run)}${label === null ? "" : `, label ${inline(contentText(label))}`}`,
    "",
    ...(error ? [`Failed in ${inline(error.where ?? "?")}: ${inline(`${error.type ?? ""}: ${error.message ?? ""}`)}`, ""] : []),
    "| turn | reward | advantage | tokens | finish |",
    "|---|---|---|---|---|",
    ...record.turns.map(
      (turn, k) =>
        `| ${k} | ${number(turn.result?.reward)} | ${signed(model.turnAdvantages[k])} | ${episode.view.turns[k]?.num_action_tokens ?? ""} | ${inline(turn.finish_reason ?? "")} |`,
    ),
    "",
  ];
  for (const message of conversation(record)) {
    const name = message.turn < 0 ? inline(message.role) : `turn ${message.turn}, ${inline(message.role)}`;
    lines.push(`<details open><summary>${name}</summary>`, "", fenced(message.text), "", "</details>", "");
  }
  const least = leastProbable(model).filter((each) => each.logprob < -1);
  if (least.length) {
    const told = least.map((each) => {
      const token = quoted(model.segments[each.segment]?.text(each.token) ?? "");
      return `${inline(token)} p ${probability(each.logprob)} (turn ${each.turn}, ${fixed(each.logprob)})`;
    });
    lines.push(`Least probable: ${told.join(" \u00b7 ")}`, "");
  }
  return lines.join("\n");
}
