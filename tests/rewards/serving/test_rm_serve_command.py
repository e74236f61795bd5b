"""`agentenv rm serve` as a command: with a real model, for our client and OpenRLHF's own, until a signal."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from agentenv.cli.main import main
from agentenv.rewards.models.get_reward import GetRewardScorer
from agentenv.rewards.models.hf import HFScorer
from agentenv.rewards.serving.server import RewardServer, ServeOptions
from tests.rewards.models.tiny import said, tiny_rm
from tests.rewards.serving.test_rm_serve import Lengths
from tests.with_openrlhf.where import needs_openrlhf, python

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def command(*flags, **variables):
    """The process, and its address as soon as it listens."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "envs"), os.environ.get("PYTHONPATH", "")]),
    }
    words = [sys.executable, "-m", "agentenv.cli", "rm", "serve", *map(str, flags), "--port", "0"]
    with subprocess.Popen(
        words, env={**env, **variables}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as it:
        try:
            line = it.stderr.readline()
            assert line.startswith("agentenv rm serve: serving http://127.0.0.1:"), line + it.stderr.read()
            yield it, line.split()[4].rstrip(",")
        finally:
            it.kill()


@pytest.fixture(autouse=True)
def _open_files():
    """The command raises the limit of open files, here that of this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "0.0.0.0"], "AGENTENV_RM_TOKEN"),
        (["--max_waiting", "0"], "--max_waiting"),
        (["--max_waiting", "5", "--max_items", "6"], "--max_items"),
        (["--timeout_s", "nan"], "--timeout_s"),
        (["--token_file", "/none"], "--token_file"),
        (["--clip", "1", "1"], "--clip"),
        (["--rm_args", "[]"], "--rm_args"),
        (["--rm_args", '{"lable": 0}'], "label"),
        (["--prot", "1"], "--port"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_loaded(flags, says, capsys, monkeypatch):
    monkeypatch.delenv("AGENTENV_RM_TOKEN", raising=False)
    assert main(["rm", "serve", "no-such-model", *flags]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == 1


def test_a_reward_is_served_by_a_file_that_calls_it(capsys):
    assert main(["rm", "serve", "reward:math"]) == 2
    shown = capsys.readouterr().err
    assert "serve a file with reward_func, such as agent_funcs/reward_math.py" in shown
    assert "Did you mean" not in shown


def test_a_port_that_is_taken_ends_the_command(tmp_path, capsys):
    (tmp_path / "f.py").write_text("def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["rm", "serve", str(tmp_path / "f.py"), "--port", str(port)]) == 2
    assert "Use another --port" in capsys.readouterr().err


# --- our own client ---------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_our_client_has_its_scores_and_each_error_belongs_to_its_own_conversation():
    async with RewardServer(Lengths(), ServeOptions()) as server:
        scorer = GetRewardScorer(f"{server.url}/get_reward")
        texts = ["a", "abc", "long", "abcdef"]
        found = await asyncio.gather(*map(scorer.score, texts), return_exceptions=True)
        await scorer.close()
    assert [getattr(each, "value", None) for each in found] == [1.0, 3.0, None, 6.0]
    assert isinstance(found[2], Exception)
    assert not isinstance(found[2], asyncio.CancelledError)


# --- the command ------------------------------------------------------------------------------------------------------

THEIRS = """
import asyncio, json, sys
from types import SimpleNamespace
from openrlhf.utils.agent import SingleTurnAgentExecutor
from transformers import AutoTokenizer

url, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
params = SimpleNamespace(max_tokens=64, logprobs=None)


class Engine:
    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        text = f"{sum(prompt_token_ids) % 97} apples<|im_end|>"
        ids = tokenizer.encode(text, add_special_tokens=False)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, text=text, finish_reason="stop", logprobs=None)])


async def main():
    executor = SingleTurnAgentExecutor([url])
    prompts = [f"<|im_start|>user\\nWhat is {n} + {n}?<|im_end|>\\n<|im_start|>assistant\\n" for n in range(64)]
    outputs = await asyncio.gather(
        *(executor.execute(prompt, str(n), params, 256, tokenizer, Engine()) for n, prompt in enumerate(prompts))
    )
    keys = ("reward", "scores", "extra_logs")
    texts = [tokenizer.decode(each["observation_tokens"], skip_special_tokens=False) for each in outputs]
    print(json.dumps([[text, *(each[key] for key in keys)] for text, each in zip(texts, outputs)]))


asyncio.run(main())
"""


async def own_scores(conversations):
    scorer = HFScorer(tiny_rm())
    found = await asyncio.gather(*map(scorer.score, conversations))
    await scorer.close()
    return [each.value for each in found]


@pytest.mark.slow
@needs_openrlhf
def test_openrlhfs_own_client_has_its_rewards_from_the_command_which_ends_with_sigterm():
    with command(tiny_rm(), "--shift", "-1", "--scale", "0.5", AGENTENV_RM_TOKEN="hush") as (process, address):
        theirs = address.replace("http://", "http://rm:hush@")
        outputs = json.loads(python("-c", THEIRS, theirs, tiny_rm()).splitlines()[-1])
        url, auth = address.removesuffix("/get_reward"), {"headers": {"authorization": "Bearer hush"}}
        assert httpx.get(f"{url}/health", trust_env=False, verify=False).json()["scored"] == 64
        messages = [said("4"), said("4", system="Be brief.")]
        answer = httpx.post(address, json={"messages": messages}, trust_env=False, verify=False, timeout=280, **auth)
        process.send_signal(signal.SIGTERM)
        assert process.wait(280) == 0
        err = process.stderr.read()
        assert ("Traceback" in err, "SIGTERM" in err) == (False, True)
    texts, rewards, scores, logs = zip(*outputs, strict=True)
    assert all("apples<|im_end|>" in text for text in texts)
    expected = asyncio.run(own_scores([*texts, *messages]))
    shaped = [0.5 * (value - 1.0) for value in expected]
    # A list of one number each, as OpenRLHF's own server gives: one query was sent.
    assert [number for (number,) in rewards] == pytest.approx(shaped[:64], abs=1e-4)
    assert scores == rewards
    assert [log["rm_value"] for log in logs] == [pytest.approx([value], abs=1e-4) for value in expected[:64]]
    assert answer.json()["rewards"] == pytest.approx(shaped[64:], abs=1e-4)
