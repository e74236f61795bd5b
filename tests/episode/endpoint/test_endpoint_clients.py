"""Clients as they come from their registries, each in a process that knows OpenAI's variables and nothing else.

`clients/clients.toml` lists them, `clients/install.py` installs them, `docs/reference/clients.md` shows their programs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from agentenv.core.types import Limits, StopReason
from tests.episode.endpoint.clients.install import CLIENTS, environment_of, is_installed, program_of
from tests.episode.endpoint.scenes import assert_exact
from tests.episode.endpoint.test_endpoint_agent import episode

FOLDER = Path(os.environ.get("AGENTENV_CLIENTS") or Path(sys.prefix) / "clients")
"""Made by `make test-clients`; `make test-slow` makes the environment `slow` of it."""
EPISODE = {"max_length": 32768, "episode_timeout_s": 300}


def installed(name):
    is_missing = not is_installed(FOLDER, name)
    return pytest.param(name, marks=pytest.mark.skipif(is_missing, reason=f"{name} is not in {FOLDER}: see Makefile"))


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TASKS = pytest.mark.parametrize("name", [installed(name) for name in CLIENTS if name != "anthropic"])


def called(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(command):
    return called("bash", command=command)


def fields(**texts):
    """An answer in the form that dspy's prompts demand."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in {**texts, "completed": ""}.items())


END = "The sums are 3 and 7."
SUMS = [called("add", a=1, b=2), called("add", a=3, b=4)]
SCRIPTS = defaultdict(lambda: [*SUMS, END]) | {
    "pydantic-ai": [*SUMS, called("final_result", first=3, second=7)],
    "instructor": [called("Sums", first=first, second=second) for first, second in [(1, 2), (3, 2), (3, 7)]],
    "smolagents": [*SUMS, called("final_answer", answer=END)],
    "mini-swe-agent": [
        *(shell(f"echo $(({numbers}))") for numbers in ("1 + 2", "3 + 4")),
        shell(f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{END}'"),
    ],
    "dspy": [
        fields(next_thought="First.", next_tool_name="add", next_tool_args='{"a": 1, "b": 2}'),
        fields(next_thought="Second.", next_tool_name="add", next_tool_args='{"a": 3, "b": 4}'),
        fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}"),
        fields(reasoning="Both are known.", answer=END),
    ],
}


async def copied(reader, writer, log):
    """Pass bytes on, as a proxy."""
    while data := await reader.read(1 << 16):
        log += data
        writer.write(data)
        await writer.drain()
    writer.close()


class Client:
    """A program of the list, behind a proxy that keeps what the endpoint answers."""

    def __init__(self, name, home):
        self.name, self.home = name, home

    async def run(self, context):
        (port,) = re.findall(r"127\.0\.0\.1:(\d+)", context.base_url)
        answered = bytearray()

        async def serve(reader, writer):
            answers, requests = await asyncio.open_connection("127.0.0.1", int(port))
            await asyncio.gather(
                copied(reader, requests, bytearray()), copied(answers, writer, answered), return_exceptions=True
            )

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as proxy:
            own = proxy.sockets[0].getsockname()[1]
            url = context.base_url.replace(port, str(own), 1)
            process = await self.started({**context.environ, "OPENAI_BASE_URL": url})
            said, errors = await process.communicate()
        (self.home / "answers").write_bytes(answered)
        if process.returncode != 0:
            raise RuntimeError(errors.decode()[-2000:])
        return float("3 and 7" in said.decode())

    async def started(self, environ):
        folder, path = FOLDER / environment_of(self.name), program_of(self.name)
        is_node = path.suffix == ".mjs"  # it looks for packages from its folder, if the program is its input
        command = ["node", "--input-type=module", "-"] if is_node else [folder / "bin/python", path]
        with path.open() as source:
            return await asyncio.create_subprocess_exec(
                *command, env={**os.environ, "HOME": str(self.home), **environ}, cwd=folder if is_node else self.home,
                stdin=source, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip


async def played(name, home, thought="", **limits):
    script = [thought + text for text in SCRIPTS[name]]
    return await episode(Client, script, limits=Limits(**{**EPISODE, **limits}), name=name, home=home)


WHOLE = {}


async def whole(name, home):
    """Return the record of the whole task, the engine, and all that the client was answered; it runs once."""
    if name not in WHOLE:
        WHOLE[name] = *await played(name, home), (home / "answers").read_bytes()
    return WHOLE[name]


@TASKS
async def test_a_client_ends_a_task_of_three_turns_and_every_token_that_it_was_told_is_recorded(name, tmp_path):
    trajectory, engine, answers = await whole(name, tmp_path)
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward) == (None, StopReason.TERMINATED, 1.0)
    assert (len(trajectory.segments), trajectory.refusals) == (CLIENTS[name].get("segments", 1), {})
    told = re.findall(rb'"(?:completion|output)_tokens": ?(\d+)', answers)
    sampled = [turn.end - turn.start for turn in trajectory.turns]
    assert [int(num) for num in told] == ([] if CLIENTS[name].get("uncounted") else sampled)
    assert len(sampled) == len(SCRIPTS[name])
    assert_exact(trajectory, engine)


@TASKS
async def test_a_model_that_thinks_has_no_more_segments_whatever_a_client_does_with_thoughts(name, tmp_path):
    trajectory, engine = await played(name, tmp_path, thought="<think>\nhm\n</think>\n\n")
    assert (trajectory.error, trajectory.reward, trajectory.refusals) == (None, 1.0, {})
    assert len(trajectory.segments) == CLIENTS[name].get("segments", 1)
    assert_exact(trajectory, engine)


@TASKS
async def test_a_client_does_not_ask_again_at_the_end_of_the_turns(name, tmp_path):
    trajectory, _ = await played(name, tmp_path, max_turns=2)
    assert (trajectory.error, trajectory.stop_reason, len(trajectory.turns)) == (None, StopReason.MAX_TURNS, 2)
    assert trajectory.refusals == {"max_turns_exceeded": 1}


@TASKS
async def test_a_client_does_not_ask_the_same_again_at_the_end_of_the_tokens(name, tmp_path):
    unlimited, *_ = await whole(name, tmp_path)
    trajectory, _ = await played(name, tmp_path, max_length=unlimited.turns[1].end + 1)
    assert trajectory.error is None
    if CLIENTS[name].get("shortens"):
        assert 1 <= trajectory.refusals["context_length_exceeded"] <= 2
    else:
        assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_LENGTH, 2)
        assert trajectory.refusals == {"context_length_exceeded": 1}


@pytest.mark.parametrize("name", [installed("anthropic")])
async def test_a_client_of_another_api_is_told_which_there_are(name, tmp_path):
    trajectory, _ = await played(name, tmp_path)
    assert (trajectory.stop_reason, trajectory.refusals) == (StopReason.ERROR, {"http_error": 1})
    assert "/v1/messages: expected one of /v1/chat/completions" in trajectory.error.message
