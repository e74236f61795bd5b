"""An environment, an episode, its record: everything agentenv does, on one page and without a model.

python examples/hello.py
expected last line: reward 1.0, score 1.0, terminated
"""

import asyncio
from functools import partial

from agentenv import AgentInstance, Limits, SamplingParams, StepResult, Task
from agentenv.agent import create
from agentenv.chat import Chat
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode import run_episode
from agentenv.testing.tokenizers import CharTokenizer


class GuessNumber(AgentInstance):
    """Guess a number; hear whether it is larger or smaller."""

    async def step(self, states):
        guess, number = int(states["action_text"]), int(states["label"])
        if guess == number:
            return StepResult(reward=1.0, score=1.0, terminated=True)
        hint = "larger" if guess < number else "smaller"
        return StepResult([{"role": "user", "content": f"It is {hint}."}], score=0.0)


async def main():
    tokenizer = CharTokenizer()
    task = Task([{"role": "user", "content": "Guess my number."}], label="7")
    trajectory = await run_episode(
        partial(create, GuessNumber, {}),
        task,
        engine=ScriptedEngine(["5", "9", "7"], tokenizer),  # a policy that says these, turn by turn
        chat=Chat(tokenizer),
        sampling=SamplingParams(max_tokens=8),
        limits=Limits(max_length=400, max_turns=5),
    )
    print(tokenizer.decode(trajectory.token_ids))
    for turn in trajectory.turns:
        print(f"tokens {turn.start}..{turn.end} were sampled: {turn.action!r}, reward {turn.result.reward}")
    print(f"reward {trajectory.reward}, score {trajectory.score}, {trajectory.stop_reason}")


if __name__ == "__main__":
    asyncio.run(main())
