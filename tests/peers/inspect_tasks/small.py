"""Tasks in Inspect's own format: one answer, a choice, tools, several turns, and a grader."""

import random

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser, ModelAPI, ModelOutput, ModelUsage, get_model, modelapi
from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    PARTIAL,
    Score,
    accuracy,
    choice,
    includes,
    match,
    mean,
    model_graded_qa,
    scorer,
)
from inspect_ai.solver import basic_agent, generate, multiple_choice, solver, system_message
from inspect_ai.tool import ToolError, tool


def _sums(text):
    rows = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    return MemoryDataset([Sample(input=text.format(a=a, b=b), target=str(a + b), id=f"{a}+{b}") for a, b in rows])


@task
def arithmetic(system="Answer with a number."):
    return Task(dataset=_sums("What is {a} + {b}?"), solver=[system_message(system), generate()], scorer=match())


@task
def capitals():
    rows = [("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo")]
    cities = [city for _, city in rows]
    samples = [
        Sample(input=f"What is the capital of {country}?", choices=cities, target="ABC"[cities.index(city)])
        for country, city in rows
    ]
    return Task(dataset=samples, solver=multiple_choice(), scorer=choice())


@tool
def add():
    async def execute(x: int, y: int):
        """Add two numbers.

        Args:
            x: First number.
            y: Second number.
        """
        if x == 13:
            raise OSError("the calculator is away")
        if x > 99:
            raise ToolError("too large")
        return x + y

    return execute


@task
def adding():
    return Task(
        dataset=_sums("Add {a} and {b} with the tool, and submit the sum."),
        solver=basic_agent(tools=[add()], max_attempts=2),
        scorer=includes(),
    )


@task
def reacting():
    return Task(dataset=_sums("Add {a} and {b}, and submit the sum."), solver=react(tools=[add()]), scorer=includes())


@solver
def guesses(attempts):
    async def solve(state, generate):
        for _ in range(attempts):
            state = await generate(state)
            if state.output.completion.strip() == state.target.text:
                break
            state.messages.append(ChatMessageUser(content="No. Again."))
        return state

    return solve


@scorer(metrics=[accuracy()])
def close():
    async def score(state, target):
        if state.output.completion == "crash":
            raise ValueError("the scorer broke")
        num = sum(message.role == "assistant" for message in state.messages)
        right = state.output.completion.strip() == target.text
        return Score(value=CORRECT if right and num == 1 else PARTIAL if right else INCORRECT)

    return score


@task
def guessing(attempts=3):
    return Task(dataset=_sums("Guess {a} + {b}."), solver=guesses(attempts), scorer=[close(), match()])


@modelapi(name="stand_in")
class StandIn(ModelAPI):
    """A grader that finds every answer right."""

    async def generate(self, input, tools, tool_choice, config):
        output = ModelOutput.from_content("stand_in", "GRADE: C")
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
        return output


@task
def graded():
    return Task(dataset=_sums("What is {a} + {b}?"), solver=generate(), scorer=model_graded_qa())


@scorer(metrics=[mean()])
def asks():
    async def score(state, target):
        return Score(value=(await get_model().generate("Is it right?")).completion)

    return score


@task
def self_graded():
    return Task(dataset=_sums("What is {a} + {b}?"), solver=generate(), scorer=asks())


@scorer(metrics={"*": [mean()]})
def several():
    async def score(state, target):
        return Score(value={"length": 1, "style": 0})

    return score


@task
def two_values():
    return Task(dataset=_sums("What is {a} + {b}?"), solver=generate(), scorer=several())


@task
def boxed():
    return Task(dataset=_sums("What is {a} + {b}?"), solver=generate(), scorer=match(), sandbox="local")


@task
def unscored():
    return Task(dataset=_sums("What is {a} + {b}?"), solver=generate())


@task
def shuffled():
    samples = list(_sums("What is {a} + {b}?"))
    random.shuffle(samples)
    return Task(dataset=samples, solver=generate(), scorer=match())
