"""An agent with its own loop, over OpenAI's SDK, that rewrites its history; its record token by token.

pip install openai 'agentenv-rl[endpoint]'
python examples/own_loop.py
expected last line: reward 1.0 on turn 2, terminated; 2 segments, the second started because: dropped
"""

import asyncio

from openai import AsyncOpenAI

from agentenv import Limits, SamplingParams, Task
from agentenv.chat.chat import Chat
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.endpoint.agent import ChatAgentSource
from agentenv.episode.setup import EpisodeKey, EpisodeSetup


class Forgetful:
    """Guess three times. Before the third guess, keep only the question and the last hint."""

    async def run(self, context):
        question, messages = context.messages, context.messages
        async with AsyncOpenAI(base_url=context.base_url, api_key=context.api_key) as client:
            for _ in range(3):
                answer = await client.chat.completions.create(model=context.model, messages=messages)
                guess = answer.choices[0].message.content
                if guess == context.label:
                    return 1.0
                hint = {"role": "user", "content": f"{guess} is wrong."}
                messages = [*messages, {"role": "assistant", "content": guess}, hint]
                if len(messages) > 4:
                    messages = [*question, hint]
        return 0.0


async def main():
    tokenizer = load_tokenizer(resolve_model("tiny-math"))
    trajectory = await ChatAgentSource(Forgetful).run(
        Task("Guess my number.", label="7"),
        EpisodeSetup(
            engine=ScriptedEngine(lambda request: ["5", "9", "7"][request.turn_index], tokenizer),
            chat=Chat(tokenizer),
            sampling=SamplingParams(max_tokens=8),
            limits=Limits(max_length=400, max_turns=5),
        ),
        EpisodeKey(),
    )
    for number, segment in enumerate(trajectory.segments):
        print(f"segment {number}: {tokenizer.decode(segment.token_ids)!r}")
    for number, turn in enumerate(trajectory.turns):
        print(f"turn {number}: segment {turn.segment}, tokens {turn.start}..{turn.end}: {turn.action!r}")
    why = [turn.result.info["mismatch"] for turn in trajectory.turns if "mismatch" in turn.result.info]
    print(
        f"reward {trajectory.reward} on turn {len(trajectory.turns) - 1}, {trajectory.stop_reason}; "
        f"{len(trajectory.segments)} segments, the second started because: {', '.join(why)}"
    )


if __name__ == "__main__":
    asyncio.run(main())
