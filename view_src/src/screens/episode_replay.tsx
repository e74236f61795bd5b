import type { VNode } from "preact";
import type { Episode, Meta } from "../data/types";
import { allFlags } from "../lib/flags";
import { visible } from "../lib/visible";
import { Card, CopyButton } from "../ui/bits";

/** Quote an argument for a POSIX shell. */
function shell(text: string): string {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, `'\\''`)}'`;
}

/** Return arguments that are no flags, behind `--` where one could be taken for a flag. */
function words(...args: string[]): string {
  return [...(args.some((each) => each.startsWith("-")) ? ["--"] : []), ...args.map(shell)].join(" ");
}

export function Replay({ meta, episode }: { meta: Meta; episode: Episode }): VNode {
  const run = meta.path ?? meta.name;
  const id = episode.record.episode_id;
  const engine = new Map(allFlags(meta.config)).get("engine");
  const commands: [string, string][] = [];
  if (engine !== "chat") commands.push(["Show its tokens in the terminal", `agentenv tokens show ${words(run, id)}`]);
  if (meta.kind === "run" && engine !== "scripted" && engine !== "chat") {
    commands.push([
      "Score the run's tokens again, and compare with the recorded log-probabilities",
      `agentenv tokens replay ${words(run)}`,
    ]);
  }
  const view = `agentenv view ${shell(`--episode=${id}`)}`;
  commands.push(["Open this page; with --md=FILE write the episode as Markdown, with --html=FILE the page", `${view} -- ${shell(run)}`]);
  return (
    <Card title="Commands" note="for the folder in which the run was recorded">
      <ul class="plain-list commands">
        {commands.map(([what, command]) => (
          <li key={what}>
            <p>{what}</p>
            <code class="command">
              <bdi>{visible(command)}</bdi>
            </code>
            <CopyButton text={command} name="copy" />
          </li>
        ))}
      </ul>
    </Card>
  );
}
