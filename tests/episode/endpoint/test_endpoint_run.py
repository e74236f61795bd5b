"""Agents with a loop of their own by command: run, resume, check what they leave, with OpenAI's SDK."""

import importlib.util
import json
import sys

import pytest

from agentenv.core.types import StopReason
from agentenv.runs.records.directory import read_trajectories
from tests.drivers import command, write_rows

pytest.importorskip("openai")

AGENTS = '''
from openai import AsyncOpenAI, OpenAI


class Retry:
    """Says so when the answer is wrong."""

    def __init__(self, tries=2):
        self.tries = tries

    async def run(self, context):
        messages = context.messages
        async with AsyncOpenAI(base_url=context.base_url, api_key=context.api_key, timeout=60) as client:
            for _ in range(self.tries):
                answer = await client.chat.completions.create(model="gpt-4o", messages=messages)
                text = answer.choices[0].message.content
                if context.label in text:
                    return 1.0
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Wrong."}]
        return 0.0


class Careless:
    """Never closes its client, has a key of its own, prints, and swallows what is refused."""

    def run(self, context):
        print("careless")
        self.client = OpenAI(base_url=context.base_url, api_key="sk-mine")
        for n in (1, 2, 3):
            try:
                self.client.chat.completions.create(model="m", messages=context.messages, n=n)
            except Exception:
                pass
        return float(len(self.client.models.list().data))
'''


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "agents.py").write_text(AGENTS)
    rows = [{"prompt": f"What is {number} plus 2?", "label": str(number + 2)} for number in range(4)]
    write_rows(tmp_path / "tasks.jsonl", rows)
    return tmp_path


def flags(agent, *more):
    common = ("--data", "tasks.jsonl", "--n", 2, "--max_tokens", 24, "--max_error_share", 1, "--progress", "none")
    return ["run", "--env", f"agents.py:{agent}", *common, "--out", agent, *more]


def scripted(*said):
    return ["--engine", "scripted", "--engine_args", json.dumps({"script": list(said)})]


@pytest.mark.long
def test_a_run_is_recorded_counted_shown_and_replayed_like_any_other(place, capsys):
    assert command(flags("Retry", "--env_kwargs", '{"tries": 3}')) == 0
    trajectories = list(read_trajectories("Retry"))
    assert sorted(t.episode_id for t in trajectories) == [f"00000{task}/{n}" for task in range(4) for n in range(2)]
    assert {t.stop_reason for t in trajectories} == {StopReason.TERMINATED}
    assert all(len(t.turns) == 3 for t in trajectories if t.reward == 0.0)
    metrics = json.loads((place / "Retry/metrics.json").read_text())
    assert (metrics["num_rewarded"], metrics["num_missing"]) == (8, 0)
    assert command(["tokens", "show", "Retry", "0"]) == 0
    assert "turn 0 · action" in capsys.readouterr().out
    assert command(["tokens", "replay", "Retry", "--tolerance", 1e-4]) == 0


@pytest.mark.long
def test_an_agent_that_prints_and_swallows_refusals_does_no_harm_and_they_are_counted_and_shown(place, capsys):
    assert command(flags("Careless", *scripted("five"))) == 0
    assert "refused requests" in (told := capsys.readouterr().out)
    assert "invalid_request 16 (n: expected 1, got 3" in " ".join(told.split())
    metrics = json.loads((place / "Careless/metrics.json").read_text())
    assert metrics["refusals"] == {"invalid_request": 16}
    assert metrics["refusal_reasons"]["invalid_request"].startswith("n: expected 1, got 3")
    records = list(read_trajectories("Careless"))
    assert {(t.refusals["invalid_request"], t.reward) for t in records} == {(2, 1.0)}
    assert {t.refusal_reasons == metrics["refusal_reasons"] for t in records} == {True}


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(place, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "uvicorn" else found(name))
    assert command(flags("Retry")) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "uvicorn" in told
    assert told.endswith("pip install 'agentenv-rl[endpoint]'")
    assert not (place / "Retry").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--env_kwargs", '{"trys": 2}'], "expected arguments of Retry ['tries'], got {'trys': 2}"),
        (["--history", "rerender"], "--history: expected keep"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_anything_runs(place, capsys, more, told):
    assert command(flags("Retry", *more)) == 2
    assert told in capsys.readouterr().err
    assert not (place / "Retry").exists()
