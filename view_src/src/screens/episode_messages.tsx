import type { VNode } from "preact";
import { useState } from "preact/hooks";
import type { Episode } from "../data/types";
import { number, plural } from "../lib/format";
import { type Shown, conversation } from "../lib/messages";
import { CopyButton, Text } from "../ui/bits";
import { Info, Retries } from "./episode_segment";

export function Messages({ episode }: { episode: Episode }): VNode {
  const said = conversation(episode.record);
  const { tools } = episode.record;
  return (
    <div class="messages">
      {tools && tools.length > 0 && (
        <details class="reasoning">
          <summary>{plural(tools.length, "tool")} of the prompt</summary>
          <pre class="text">
            <Text value={JSON.stringify(tools, null, 1)} />
          </pre>
        </details>
      )}
      {said.map((message, place) => (
        <Message key={place} message={message} episode={episode} />
      ))}
    </div>
  );
}

function Message({ message, episode }: { message: Shown; episode: Episode }): VNode {
  const [raw, setRaw] = useState(false);
  const isAction = message.role === "assistant" && message.turn >= 0;
  const turn = isAction ? episode.record.turns[message.turn] : undefined;
  const reward = turn?.result?.reward;
  return (
    <article class={`message role-${isAction ? "assistant" : message.role === "system" ? "system" : "user"}`}>
      <header class="span-head">
        <strong>
          <Text value={message.role} line />
        </strong>
        {isAction && <span class="dim">turn {message.turn}</span>}
        {reward !== undefined && reward !== null && (
          <span class={reward > 0 ? "tone-pos" : reward < 0 ? "tone-neg" : ""}>reward {number(reward)}</span>
        )}
        {turn && <Retries record={turn} />}
        <span class="top-space" />
        <button type="button" class="button small" aria-pressed={raw} onClick={() => setRaw(!raw)}>
          raw
        </button>
        <CopyButton text={message.text} name="copy" />
      </header>
      {turn && <Info record={turn} />}
      {raw ? (
        <pre class="text">{JSON.stringify(turn ? (turn.answer ?? turn.action) : message.text, null, 1)}</pre>
      ) : (
        <>
          {message.reasoning && (
            <details class="reasoning">
              <summary>reasoning, {message.reasoning.length} characters</summary>
              <div class="text">
                <Text value={message.reasoning} />
              </div>
            </details>
          )}
          <div class="text" dir="auto">
            {message.text ? <Text value={message.text} /> : <span class="dim">no text</span>}
          </div>
          {message.calls.map((call, place) => (
            <details key={place} class="reasoning" open>
              <summary>tool call</summary>
              <pre class="text">
                <Text value={call} />
              </pre>
            </details>
          ))}
        </>
      )}
    </article>
  );
}
