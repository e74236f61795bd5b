"""`agentenv run --env rm_chat` with one small reward model in three places, and with places that fail."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from agentenv.cli.main import main
from agentenv.runs.records.directory import read_trajectories
from agentenv_envs.rm_chat import RMChat
from tests.ports import held_port
from tests.rewards.models.tiny import tiny_rm
from tests.waits import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
DATA = str(RMChat.datasets["rm_chat_prompts"])
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "envs")])


def flags(out, reward, *more):
    """A run of shipped rows with a policy that says the same every time."""
    kwargs = json.dumps({"reward": {"model": reward}, "limit_s": 30.0})
    return ["run", "--env", "agentenv_envs.rm_chat:RMChat", "--env_kwargs", kwargs, "--data", DATA, "--max_length",
            "4000", "--engine", "scripted", "--out", str(out), "--progress", "none", *more]  # fmt: skip


def agentenv(*arguments, **more):
    """A process of its own."""
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "VLLM_CPU_KVCACHE_SPACE": "1"}
    return subprocess.Popen([sys.executable, "-m", "agentenv.cli", *map(str, arguments)], env=env, text=True, **more)


def values(out):
    """What the reward model said at each turn, by episode."""
    return {each.episode_id: [turn.result.info["rm/value"] for turn in each.turns] for each in read_trajectories(out)}


class Served:
    """`agentenv rm serve` with the small reward model, that can be killed and started again where it was."""

    def __init__(self, port):
        self.port = port
        self.process = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/get_reward"

    def start(self):
        self.process = agentenv("rm", "serve", tiny_rm(), "--port", self.port, stderr=subprocess.DEVNULL)
        wait_until(lambda: self.healthy() or self.process.poll() is not None)
        assert self.process.poll() is None

    def healthy(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def served():
    with held_port() as port:
        server = Served(port)
        server.start()
        yield server
        server.kill()


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    """The values of every row, by transformers in this process."""
    out = tmp_path_factory.mktemp("hf") / "out"
    assert main(flags(out, {"rm": f"hf:{tiny_rm()}"})) == 0
    return values(out)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for episode_id, those in expected.items():
        assert found[episode_id] == pytest.approx(those, abs=1e-3), episode_id


def test_a_server_that_is_killed_and_comes_back_costs_no_episode_and_no_score_is_made_up(tmp_path, served, in_process):
    out = tmp_path / "out"
    # Without retries of the client, so that the runner's are seen.
    reward = {"rm": served.url, "rm_args": {"tokenizer": str(tiny_rm()), "retries": 0}}
    run = agentenv(*flags(out, reward, "--n", "24", "--concurrency", "2", "--max_retries", "12"),
                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    wait_until(lambda: (out / "trajectories.jsonl").exists() and sum(1 for _ in read_trajectories(out)) >= 5)
    served.kill()
    assert run.poll() is None, "the run ended before the server was killed: give it more episodes"
    served.start()
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors[-3000:]
    ended = list(read_trajectories(out))
    assert len(ended) == 24 * len(in_process)
    assert {each.error for each in ended} == {None}
    assert max(each.attempt for each in ended) >= 1
    assert_same(values(out), {f"{key[:-1]}{n}": value for key, value in in_process.items() for n in range(24)})
    assert json.loads((out / "metrics.json").read_text())["num_no_reward"] == 0
