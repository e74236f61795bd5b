"""An environment, an episode and its record, on one page and without a model.

python examples/hello.py
expected last line: reward 1.0, score 1.0, terminated
"""

import asyncio

from agentenv import AgentInstance, ScriptedEngine, StepResult, Task, run_episode


class GuessNumber(AgentInstance):
    """Guess a number; hear whether it is larger or smaller. Four guesses."""

    async def step(self, states):
        guess, number = states["action_text"].strip(), states["label"]
        if guess == number:
            return StepResult(reward=1.0, score=1.0, terminated=True)
        if states["turn_index"] == 3 or not (guess.isdecimal() and len(guess) < 4):
            return StepResult(score=0.0, terminated=True)
        hint = "larger" if int(guess) < int(number) else "smaller"
        return StepResult(f"\nIt is {hint}. Guess again: ", score=0.0)


async def main():
    engine = ScriptedEngine(["5", "9", "7"])  # a policy that answers this, turn by turn; a character is a token
    trajectory = await run_episode(GuessNumber, Task("Guess my number: ", label="7"), engine=engine)
    print(engine.tokenizer.decode(trajectory.token_ids))
    for turn in trajectory.turns:
        print(f"tokens {turn.start}..{turn.end} were sampled: {turn.action!r}, reward {turn.result.reward}")
    print(f"reward {trajectory.reward}, score {trajectory.score}, {trajectory.stop_reason}")


if __name__ == "__main__":
    asyncio.run(main())
