"""Episodes against a policy server in another process that breaks in each way of `policy_server.MODES`."""

import asyncio
import contextlib
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core.types import StepResult
from agentenv.engines.vllm.http import VLLMHTTPEngine
from agentenv.episode.runner import ErrorPolicy, plan
from agentenv.errors import ConfigError, RunStopped
from agentenv.testing.tokenizers import CharTokenizer
from tests.episode.test_runner import END, make_runner, make_tasks
from tests.faults import policy_server
from tests.faults.policy_server import MODES

QUICK = ("right", "reset-in-the-body", "404", "body-after-an-error", "answer-to-another-request-with-its-prompt")
"""Modes of the fast suite: none of them hangs."""
TIMEOUT_S = 1.0
"""Deadline of a generation where the server fails: the modes that hang wait so long."""


class SizedTokenizer(CharTokenizer):
    """Knows which ids it does not have, as real ones do."""

    def __len__(self):
        return self.vocab_size


def cases():
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in MODES]


def sockets():
    links = (Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd"))
    return {os.readlink(link) for link in links if link.is_symlink() and "socket:" in os.readlink(link)}


def two_turns(states):
    return END if states["turn_index"] else StepResult("and then?")


@contextlib.asynccontextmanager
async def nothing_left():
    before, threads = sockets(), set(threading.enumerate())
    yield
    async with asyncio.timeout(60):
        while sockets() - before or asyncio.all_tasks() != {asyncio.current_task()} or new_threads(threads):
            await asyncio.sleep(0.01)


def new_threads(before):
    return {thread for thread in set(threading.enumerate()) - before if not thread.name.startswith("asyncio_")}


async def run_with(engine, behave, *, max_retries, **setup):
    """Run three episodes; return their records and the error that stopped the run."""
    ended, stop = [], None
    policy = ErrorPolicy(max_retries=max_retries, retry_wait_s=0.0, max_error_share=1.0)
    try:
        async with asyncio.timeout(200):
            runner = make_runner(behave, engine=engine, policy=policy)
            runner.setup = replace(runner.setup, **setup)
            await runner.run(plan(make_tasks(3), 1), ended.append)
    except (ConfigError, RunStopped) as error:
        stop = error
    finally:
        await engine.close()
    return ended, stop


def check_text(text, base_url):
    assert base_url in text
    assert "expected" in text
    assert len(text.splitlines()) == 1
    assert len(text) < 1500


def check_failures(ended, stop, url, *, may_stop, kind="infra"):
    """Assert that each failed record, and the error that stopped the run, name the server and are of this kind."""
    failed = [trajectory for trajectory in ended if trajectory.reward is None]
    texts = [trajectory.error.message for trajectory in failed] + ([str(stop)] if stop else [])
    assert texts
    for text in texts:
        check_text(text, url)
    if stop is None:
        assert {trajectory.error.kind for trajectory in failed} == {kind}
        assert len(ended) == 3
    else:
        assert may_stop


def moments(name, expected, quick):
    """When the server breaks: see WHEN of `policy_server.py`."""
    return ["always", *["once"] * (expected != "succeeds"), "start"] if name in quick else ["always"]


def check_record(trajectory, name):
    """Assert that the record has the tokens and log-probabilities that the server sent, in a right completion."""
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 2)
    (segment,) = trajectory.segments
    for turn in trajectory.turns:
        prompt = list(segment.token_ids[: turn.start])
        answer = policy_server.right({"prompt": prompt}, "text")
        sent = (MODES[name].change or (lambda same: same))(answer)["choices"][0]
        values = sent["logprobs"]["token_logprobs"]
        assert list(segment.token_ids[turn.start : turn.end]) == sent["token_ids"]
        recorded = list(segment.logprobs[turn.start : turn.end])
        assert recorded == values


@pytest.mark.parametrize("name", cases())
async def test_each_mode_of_the_server_is_a_record_of_what_it_sent_or_a_line_that_names_it(ports, name, monkeypatch):
    monkeypatch.setattr("agentenv.engines.vllm.http.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("tests.episode.test_runner.CharTokenizer", SizedTokenizer)
    base_url, expected = f"http://127.0.0.1:{ports[name == 'refused']}/text", MODES[name].expected

    async def check(when):
        url = f"{base_url}/{when}/{name}"
        succeeds = expected == "succeeds" or (when == "once" and expected == "fails" and name != "refused")
        timeout_s = 60 if expected == "succeeds" or name in QUICK else TIMEOUT_S
        engine = VLLMHTTPEngine(url, max_retries=2, timeout_s=timeout_s)
        ended, stop = await run_with(engine, two_turns, max_retries=5 if succeeds else 0)
        if succeeds:
            assert (len(ended), stop) == (3, None)
            for trajectory in ended:
                check_record(trajectory, "right" if when == "once" else name)
            return
        assert {trajectory.reward for trajectory in ended} <= {None}
        check_failures(
            ended, stop, url, may_stop=expected == "stops" or when == "start"
        )  # what the look finds stops it

    async with nothing_left():
        await asyncio.gather(*map(check, moments(name, expected, QUICK)))
