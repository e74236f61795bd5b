"""A working directory in which a training takes a second: a tiny model, tasks, environments, and the flags."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from agentenv.runs.records.token_stats import read_token_stats
from agentenv.training.logs.journal import read_metrics
from tests.drivers import write_rows
from tests.models import make_tiny_qwen2

ENV = '''
import asyncio
from pathlib import Path
from agentenv import AgentInstance, StepResult
from agentenv.errors import InfraError


class Letters(AgentInstance):
    """One turn, worth the share of lowercase letters; a label says how it ends instead."""

    async def step(self, states):
        label, text = states["label"], states["action_text"]
        if label == "hang":
            Path("hanging").touch()
            await asyncio.sleep(3600)
        if label == "raises" or (label == "later" and Path("later").exists()):
            raise InfraError("nobody there")
        share = sum(each.islower() for each in text) / max(1, len(text))
        return StepResult(reward=share, score=share, terminated=True)


class Turns(AgentInstance):
    """Three turns, each with a reward of its own."""

    async def reset(self, states):
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states):
        self.turn += 1
        share = states["action_text"].count("e") / 8
        return StepResult("Go on.", reward=share, terminated=self.turn == 3)


class OwnLoop:
    """Calls the model itself, twice."""

    async def run(self, context):
        from openai import AsyncOpenAI

        messages, share = context.messages, 0.0
        async with AsyncOpenAI(base_url=context.base_url, api_key=context.api_key, timeout=60) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="m", messages=messages)
                text = answer.choices[0].message.content or ""
                share += text.count("e") / 8
                messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
        return share
'''


@cache
def tiny_model() -> Path:
    """One for the whole session."""
    return make_tiny_qwen2(Path(mkdtemp(prefix="agentenv-model-")) / "tiny", layers=1)


def make_place(path: Path, monkeypatch: pytest.MonkeyPatch, labels=("ok",) * 8) -> Path:
    """The directory, from now on the working directory."""
    monkeypatch.chdir(path)
    (path / "env.py").write_text(ENV)
    rows(path, labels)
    return path


def rows(place: Path, labels) -> None:
    write_rows(place / "tasks.jsonl", [{"prompt": f"Say {i}.", "label": label} for i, label in enumerate(labels)])


def flags(*more, out="out", env="env.py:Letters") -> list[object]:
    """A training of three steps of two prompts, four samples each; of a flag that is given twice the last one holds."""
    source = ["--env", env] if env else []
    return [
        "train", *source, "--data", "tasks.jsonl", "--model", tiny_model(), "--engine", "hf", "--no_ray",
        "--max_train_steps", 3, "--rollout_batch_size", 2, "--n", 4, "--max_tokens", 8,
        "--actor_learning_rate", 1e-2, "--out", out, "--progress", "plain", *more,
    ]  # fmt: skip


def without_times(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without what a clock measured.

    And without logprob_diff: its last digits depend on which episodes the engine computed together.
    """
    left_out = ("time/", "throughput/", "train/logprob_diff")
    return [
        {key: value for key, value in line.items() if not key.startswith(left_out)} for line in read_metrics(folder)
    ]


def assert_same_numbers(one: Path, other: Path) -> None:
    """Compare the metrics of two trainings, and what the learner computed for the sampled tokens.

    Sums of float32 depend on their order, and so on the process, its threads and the batch: 1e-5 of each value.
    """
    lines, others = without_times(one), without_times(other)
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for line, line_1 in zip(lines, others, strict=True):
        assert line.pop("warnings", []) == line_1.pop("warnings", [])
        assert line == pytest.approx(line_1, rel=1e-5, abs=1e-6, nan_ok=True)
    tokens, others = read_token_stats(one), read_token_stats(other)
    assert tokens.keys() == others.keys()
    for episode_id, mine in tokens.items():
        theirs = others[episode_id]
        assert (mine.step, mine.action_hash) == (theirs.step, theirs.action_hash)
        for values, values_1 in ((mine.logprobs, theirs.logprobs), (mine.advantages, theirs.advantages)):
            assert list(values) == pytest.approx(list(values_1), rel=1e-5, abs=1e-6, nan_ok=True)
