"""Agent frameworks as they come, each in a process that knows OpenAI's variables and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from agentenv.core.types import Limits, StopReason
from tests.episode.endpoint.test_endpoint_agent import episode

FOLDER = Path(os.environ.get("AGENTENV_AGENTS") or Path(sys.prefix) / "agents")
"""Made by `pip install --no-deps --target .venv/agents openai-agents==0.24.0 …`, as the Makefile has it."""
INSTALL = "pip install --no-deps --target .venv/agents openai-agents pydantic-ai-slim pydantic-graph genai-prices"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not ((FOLDER / "agents").is_dir() and (FOLDER / "pydantic_ai").is_dir()),
        reason=f"openai-agents and pydantic-ai are not in {FOLDER}: {INSTALL} logfire-api griffelib",
    ),
]

OPENAI_AGENTS = '''
import asyncio
from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)

@function_tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b

agent = Agent(name="adder", instructions="Be brief.", tools=[add])

async def main():
    STREAMED
    print(result.final_output)

asyncio.run(main())
'''
PYDANTIC_AI = '''
from pydantic_ai import Agent

agent = Agent("MODEL", instructions="Be brief.")

@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add."""
    return a + b

print(agent.run_sync("Add 1 and 2, then 3 and 4.").output)
'''
PLAIN = 'result = await Runner.run(agent, "Add 1 and 2, then 3 and 4.")'
STREAMED = """result = Runner.run_streamed(agent, "Add 1 and 2, then 3 and 4.")
    async for _ in result.stream_events():
        pass"""
PROGRAMS = {
    "openai-agents": OPENAI_AGENTS.replace("STREAMED", PLAIN),
    "openai-agents, streamed": OPENAI_AGENTS.replace("STREAMED", STREAMED),
    "pydantic-ai, responses": PYDANTIC_AI.replace("MODEL", "openai-responses:policy"),
    "pydantic-ai, chat completions": PYDANTIC_AI.replace("MODEL", "openai-chat:policy"),
    "pydantic-ai, typed": PYDANTIC_AI.replace('"MODEL"', '"openai:policy", output_type=Out').replace(
        "agent =", "from pydantic import BaseModel\n\nclass Out(BaseModel):\n    sums: str\n\nagent ="
    ),
}


def called(a, b):
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': a, 'b': b}})}\n</tool_call>"


SCRIPT = [called(1, 2), called(3, 4), "The sums are 3 and 7."]
TYPED = [*SCRIPT[:2], '<tool_call>\n{"name": "final_result", "arguments": {"sums": "3 and 7"}}\n</tool_call>']


class Framework:
    def __init__(self, program):
        self.program = program

    async def run(self, context):
        path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", self.program, env={**os.environ, "PYTHONPATH": path, **context.environ},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, errors = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(errors.decode()[-2000:])
        return float("3 and 7" in said.decode())


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_framework_with_its_default_settings_is_one_segment(program):
    script = TYPED if "typed" in program else SCRIPT
    trajectory, engine = await episode(
        Framework, script, limits=Limits(max_length=4096, episode_timeout_s=300), program=PROGRAMS[program]
    )
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward) == (None, StopReason.TERMINATED, 1.0)
    assert (len(trajectory.segments), len(trajectory.turns), trajectory.refusals) == (1, 3, {})
    assert "7" in engine.requests[2].prompt[len(engine.requests[1].prompt) :]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("limits", "reason", "code"),
    [
        ({"max_turns": 2}, StopReason.MAX_TURNS, "max_turns_exceeded"),
        ({"max_length": 64}, StopReason.MAX_LENGTH, "context_length_exceeded"),
    ],
)
async def test_a_framework_does_not_ask_again_at_the_end_of_the_budget(program, limits, reason, code):
    limits = Limits(**{"max_length": 4096, "episode_timeout_s": 300, **limits})
    trajectory, _ = await episode(Framework, SCRIPT, limits=limits, program=PROGRAMS[program])
    assert (trajectory.error, trajectory.stop_reason, trajectory.refusals) == (None, reason, {code: 1})
