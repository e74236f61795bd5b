import type { VNode } from "preact";
import type { Episode } from "../data/types";
import { visible } from "../lib/visible";
import { CopyButton } from "../ui/bits";

const MOST = 2_000_000;

/** JSON with lists of plain values on one line. */
function pretty(value: unknown, indent = ""): string {
  const inner = `${indent}  `;
  if (Array.isArray(value)) {
    if (value.every((each) => each === null || typeof each !== "object")) return JSON.stringify(value).replaceAll(",", ", ");
    return `[\n${value.map((each) => inner + pretty(each, inner)).join(",\n")}\n${indent}]`;
  }
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const entries = Object.entries(value);
  if (!entries.length) return "{}";
  return `{\n${entries.map(([key, each]) => `${inner}${JSON.stringify(key)}: ${pretty(each, inner)}`).join(",\n")}\n${indent}}`;
}

export function RecordView({ episode }: { episode: Episode }): VNode {
  const text = pretty(episode.record);
  return (
    <section class="card">
      <header class="card-head">
        <h2>Record</h2>
        <span class="dim">
          trajectories.jsonl, {episode.at[1].toLocaleString("en-US")} bytes at {episode.at[0].toLocaleString("en-US")}
        </span>
        <span class="card-actions">
          <CopyButton text={JSON.stringify(episode.record)} name="copy JSON" />
        </span>
      </header>
      <pre class="text json">
        <bdi>{visible(text.slice(0, MOST))}</bdi>
      </pre>
      {text.length > MOST && <p class="dim">The rest is left out here; the copy has it.</p>}
    </section>
  );
}
