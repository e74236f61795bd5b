"""Episodes with `ChatEngine` against a server in another process that breaks in each way of `CHAT_MODES`."""

import asyncio
import contextlib

import pytest

from agentenv.chat.chat import Chat
from agentenv.core.types import StepResult
from agentenv.engines.chat.engine import ChatEngine
from agentenv.errors import ConfigError
from agentenv.runs.records.lines import decode_episode, decode_line, encode_line, trajectory_to_dict
from tests.episode.test_runner import END
from tests.faults import policy_server
from tests.faults.policy_server import CHAT_MODES
from tests.faults.test_policy_server_faults import check_failures, moments, nothing_left, run_with

QUICK = ("right", "reset-in-the-body", "404", "429-for-a-moment", "no-choices", "content-filter", "same-answer-again")
"""Modes of the fast suite: none of them hangs."""
TIMEOUT_S = 1.0
"""Deadline of a generation where the server fails: the modes that hang wait so long."""


def two_turns(states):
    if states["turn_index"]:
        return END
    answers = [{"role": "tool", "tool_call_id": each.call_id, "content": "3"} for each in states["tool_calls"].items]
    return StepResult(answers or "and then?")


def check_record(trajectory, name):
    """Assert that the record has the text that the server sent, and nothing that looks like sampled tokens."""
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 2)
    assert [len(segment) for segment in trajectory.segments] == [0]
    read = decode_episode(decode_line(encode_line(trajectory)))
    assert trajectory_to_dict(read) == trajectory_to_dict(trajectory)
    assert read.turns == trajectory.turns
    messages = [*trajectory.prompt]
    for turn in trajectory.turns:
        asked = {"model": "the-model", "messages": messages}
        (sent,) = (CHAT_MODES[name].change or (lambda same: same))(policy_server.right(asked, "chat"))["choices"]
        content = sent["message"]["content"]
        assert turn.answer.content == (content[0]["text"] if isinstance(content, list) else content or "")
        assert turn.answer.reasoning == sent["message"].get("reasoning_content", "")
        ids = [call["id"] for call in turn.answer.tool_calls]
        assert len({*ids}) == len(ids) == len(sent["message"].get("tool_calls", ()))
        assert turn.finish_reason == sent["finish_reason"]
        reply = turn.result.observation
        messages += [{}, *([{"content": reply}] if isinstance(reply, str) else reply)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CHAT_MODES]
)
async def test_each_mode_of_the_server_is_a_record_of_what_it_said_or_a_line_that_names_it(ports, name, monkeypatch):
    monkeypatch.setattr("agentenv.engines.chat.engine.FIRST_PAUSE_S", 0.01)
    base_url, expected = f"http://127.0.0.1:{ports[name == 'refused']}/chat", CHAT_MODES[name].expected

    async def check(when):
        url = f"{base_url}/{when}/{name}"
        succeeds = expected == "succeeds" or (when == "once" and expected == "fails" and name != "refused")
        if name == "same-answer-again":  # it fails from then on
            succeeds = False
        is_answered = (succeeds and expected == "succeeds") or name == "400-too-long" or name in QUICK
        timeout_s = 60 if is_answered else TIMEOUT_S
        engine = ChatEngine(url, "the-model", max_retries=2, timeout_s=timeout_s)
        with contextlib.suppress(ConfigError):  # of the run again
            await engine.start()
        chat = Chat(engine.tokenizer)
        ended, stop = await run_with(engine, two_turns, max_retries=5 if succeeds else 0, chat=chat)
        if succeeds:
            assert (len(ended), stop) == (3, None)
            for trajectory in ended:
                check_record(trajectory, "right" if when == "once" else name)
            return
        may_stop = expected == "stops" or when == "start" or name == "refused"
        check_failures(ended, stop, url, may_stop=may_stop, kind="data" if name == "400-too-long" else "infra")

    async with nothing_left():
        await asyncio.gather(*map(check, moments(name, expected, QUICK)))
