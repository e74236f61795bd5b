"""New weights on their way to engines: shared memory, vLLM's own transfer protocol, and who gets which."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentenv._util.ray.cluster import ClusterConfig, ray_session
from agentenv.core.engine import EngineOptions
from agentenv.core.types import SamplingParams
from agentenv.engines.pool import EngineDead, EnginePool, PoolPolicy
from agentenv.engines.ray_actor import RayConfig, open_pool
from agentenv.engines.scripted import ScriptedEngine
from agentenv.engines.vllm.local import VLLMEngine
from agentenv.engines.weights import WeightSender, choose_transfer, share_bytes, share_weights
from agentenv.errors import ConfigError, EngineError
from agentenv.testing.tokenizers import CharTokenizer
from tests.engines.test_hf import plain_greedy
from tests.engines.vllm_marks import VLLM
from tests.models import WORKER_APART, make_tiny_qwen2

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
PROMPT = [1, 349, 201, 285, 284, 313, 33, 223, 201, 30, 71, 90, 86, 84, 67, 65, 2, 201, 1, 67, 85, 345, 346, 86, 201]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
LONG = SamplingParams(max_tokens=600, min_tokens=600)


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def held():
    """Memory that this process shares, without what an earlier test left to the garbage collector."""
    gc.collect()
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return [name for name in names if "agentenv-weights" in name]


# --- shared memory ----------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    raw = torch.tensor(draw(st.lists(st.integers(-100, 100), min_size=1, max_size=4)))
    size = torch.Size(shape).numel()
    tensor = raw.repeat(size // len(raw) + 1)[:size].reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.T if tensor.ndim == 2 and draw(st.booleans()) else tensor


@pytest.mark.long
@given(st.dictionaries(st.text(max_size=5), tensors(), max_size=5))
def test_weights_arrive_as_they_were_regardless_of_their_shape_and_dtype(weights):
    shared = share_weights(weights.items())
    elsewhere = share_bytes(shared.file, memoryview(Path(shared.file.path).read_bytes()))
    for arrived in (dict(shared.file), dict(elsewhere.file), dict(shared)):
        assert list(arrived) == list(weights)
        for name, tensor in weights.items():
            assert (arrived[name].dtype, arrived[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(as_bytes(arrived[name]), as_bytes(tensor))
    shared.close()
    elsewhere.close()


def test_writes_of_a_reader_are_private_and_outlive_the_owner():
    shared = share_weights([("a", torch.ones(3))])
    mine, theirs = dict(shared.file)["a"], dict(shared.file)["a"]
    mine.fill_(2)
    shared.close()
    shared.close()
    assert (mine.tolist(), theirs.tolist()) == ([2, 2, 2], [1, 1, 1])


def test_memory_is_given_back_when_it_is_closed_forgotten_or_could_not_be_filled():
    def broken():
        yield "a", torch.ones(3)
        raise ZeroDivisionError

    before = held()
    closed, forgotten = (share_weights([("a", torch.ones(3))]) for _ in range(2))
    assert len(held()) == len(before) + 2
    closed.close()
    del forgotten
    gc.collect()
    with pytest.raises(ZeroDivisionError):
        share_weights(broken())
    assert held() == before


def test_without_memory_files_the_folder_of_temporary_files_serves(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = share_weights([("a", torch.arange(5))])
    assert [path.name for path in tmp_path.iterdir()] == [os.path.basename(shared.file.path)]
    assert dict(shared.file)["a"].tolist() == [0, 1, 2, 3, 4]
    shared.close()
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_reported_with_what_to_do():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = held()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(EngineError, match=r"room for the model's weights.*TMPDIR"):
            share_weights([("a", torch.zeros(1000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert held() == before


# --- which way --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "engines", "way"),
    [
        ("cpu", [("cpu",)], "shm"),
        ("cpu", [("A",)], "shm"),
        ("A", [("cpu",)], "shm"),
        ("A", [], "shm"),
        ("A", [("A",), ("A",)], "ipc"),
        ("A", [("B", "C"), ("D",)], "nccl"),
        ("A", [("A",), ("B",)], "shm"),
        ("A", [("B",), ("B",)], "shm"),
        ("A", [("B",), ("cpu",)], "shm"),
    ],
)
def test_weights_take_the_fastest_way_between_their_devices(trainer, engines, way):
    assert choose_transfer("auto", trainer, engines) == way
    assert choose_transfer("shm", trainer, engines) == "shm"
    assert choose_transfer(way, trainer, engines) == way
    for other in {"ipc", "nccl"} - {way}:
        with pytest.raises(ConfigError, match=f"for '{other}', got weights on '{trainer}'"):
            choose_transfer(other, trainer, engines)


def test_a_way_that_there_is_not_is_refused_when_the_engine_is_made():
    with pytest.raises(ConfigError, match="expected one of auto, ipc, nccl, shm, got 'gloo'"):
        VLLMEngine("model", engine_args={"transfer": "gloo"})


class Picky(ScriptedEngine):
    """Takes weights but "bad" ones, and dies when it is told to."""

    def __init__(self):
        super().__init__(["a"], tokenizer=CharTokenizer())
        self.got, self.dead = [], False

    async def load_offer(self, offer, policy_version):
        if offer == "bad":
            raise EngineError("expected good weights")
        self.got.append(offer)
        self.policy_version = policy_version

    async def generate(self, *args, **options):
        if self.dead:
            raise EngineDead("gone")
        return await super().generate(*args, **options)


async def test_a_successor_gets_the_weights_of_the_last_update_that_succeeded():
    engines, made = [Picky()], []

    def make(index):
        made.append(Picky())
        return made[-1]

    async def send(named_tensors, engines, call, version):
        await call(lambda engine: engine.load_offer(named_tensors, version))
        return named_tensors

    pool = EnginePool(engines, make=make, policy=PoolPolicy(restart_wait_s=0.0), send=send)
    await pool.update_weights("good", 1)
    with pytest.raises(EngineError, match="good weights"):
        await pool.update_weights("bad", 2)
    engines[0].dead = True
    with contextlib.suppress(EngineError):
        await pool.generate([1], GREEDY, request_id="a/0")
    completion = await asyncio.wait_for(pool.generate([1], GREEDY, request_id="a/1"), 60)
    assert (made[0].got, completion.policy_version) == (["good"], 1)
    await pool.close()


# --- with vLLM --------------------------------------------------------------------------------------------------------


def vllm(test):
    for mark in (pytest.mark.slow, *VLLM):
        test = mark(test)
    return test


ARGS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "worker_extension_cls": "tests.engines.cpu_transfer.WorkerExtension",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three models of one shape with different weights."""
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_qwen2(folder / f"seed{seed}", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def weights(models):
    from safetensors.torch import load_file

    return [load_file(folder / "model.safetensors") for folder in models]


@pytest.fixture(scope="module")
def greedy(models):
    """What each model says, by transformers."""
    from transformers import AutoModelForCausalLM

    said = []
    for folder in models:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        said.append(plain_greedy(model, PROMPT, GREEDY.max_tokens))
    assert len(set(said)) == len(said)
    return said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(models):
    """Two, of different numbers of weights updates; vLLM's worker is in a process of its own, and in the engine's."""
    both = [
        VLLMEngine(models[0], dtype="float32", max_model_len=1024, engine_args=args)
        for args in ({**ARGS, **WORKER_APART}, ARGS)
    ]
    for engine in both:
        await engine.start()
    yield both
    for engine in both:
        await engine.close()
    gc.collect()


async def says(engine):
    result = await engine.generate(PROMPT, GREEDY, request_id="a/0")
    return result.token_ids, result.policy_version


@vllm
async def test_requests_in_flight_continue_with_the_new_weights_and_say_which_tokens_are_whose(
    engines, weights, greedy
):
    engine, before = engines[0], held()
    tasks = [asyncio.create_task(engine.generate([5, 6, 7 + i], LONG, request_id=f"{i}/0")) for i in range(32)]
    await asyncio.sleep(1.0)
    await engine.update_weights(weights[1].items(), 1)
    assert await says(engine) == (greedy[1], 1)
    for completion in await asyncio.gather(*tasks):
        assert list(Counter(completion.policy_versions)) == [0, 1]
        assert len(completion.policy_versions) == len(completion.token_ids) == 600
    assert held() == before


@vllm
async def test_an_update_that_failed_half_way_leaves_nothing_to_the_next(engines, weights, greedy):
    engine = engines[0]
    query = "model.layers.0.self_attn.q_proj.weight"
    half = [(query, torch.full_like(weights[2][query], 9.0)), ("model.nope", torch.ones(3))]
    with pytest.raises(EngineError, match="nope"):
        await engine.update_weights(half, 2)
    await engine.update_weights(weights[2].items(), 3)
    assert await says(engine) == (greedy[2], 3)


@vllm
async def test_weights_that_are_missing_are_an_error(engines, weights, greedy):
    engine = engines[0]
    lacking = {name: tensor for name, tensor in weights[0].items() if name != "model.norm.weight"}
    with pytest.raises(EngineError, match=r"1 weights are missing, 'model\.norm\.weight'"):
        await engine.update_weights(lacking.items(), 4)
    with pytest.raises(EngineError, match="complete weights"):
        await says(engine)
    await engine.update_weights(weights[0].items(), 5)
    assert await says(engine) == (greedy[0], 5)


@vllm
async def test_on_a_cpu_there_is_neither_sleep_nor_a_transfer_between_gpus(engines, models, weights):
    with pytest.raises(ConfigError, match=r"VLLMEngine\.sleep: expected a GPU"):
        await engines[0].sleep()
    await engines[0].wake_up()
    with pytest.raises(ConfigError, match="for 'nccl', got weights on 'cpu'"):
        await WeightSender("nccl").send(weights[0].items(), engines, None, 1)


@vllm
async def test_vllms_own_transfer_reaches_all_engines_of_a_group_and_a_group_of_others_after_it(
    engines, weights, greedy
):
    """The way of NCCL, but for the broadcast itself; see cpu_transfer."""
    from tests.engines.cpu_transfer import register

    register()
    sender = WeightSender()

    async def send(named, version, to):
        async def tell(ask):
            await asyncio.gather(*map(ask, to))

        await sender.send_between_gpus(list(named.items()), "nccl", to, tell, version)

    task = asyncio.create_task(engines[1].generate(PROMPT, LONG, request_id="long/0"))
    await asyncio.sleep(0)  # it asks first
    await says(engines[1])  # which is sampled beside it, so that some of its tokens are of the old weights
    await send(weights[1], 6, engines)
    assert [await says(engine) for engine in engines] == [(greedy[1], 6)] * 2
    assert list(Counter((await task).policy_versions)) == [0, 6]
    await send(weights[2], 7, engines)  # the same group once more
    assert [await says(engine) for engine in engines] == [(greedy[2], 7)] * 2
    await send(weights[0], 8, engines[1:])
    assert [await says(engine) for engine in engines] == [(greedy[2], 7), (greedy[0], 8)]
    await engines[1].update_weights(weights[1].items(), 9)  # and back to shared memory
    assert await says(engines[1]) == (greedy[1], 9)
    with pytest.raises(EngineError, match="nope"):
        await send({"model.nope": torch.ones(3)}, 10, engines)
    await send(weights[0], 11, engines)
    assert [await says(engine) for engine in engines] == [(greedy[0], 11)] * 2
    sender.close()


@vllm
@pytest.mark.timeout(900)  # vLLM starts in another process than that of the tests above, which still have two
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same machine", "as if on another machine"])
async def test_an_actor_takes_weights_from_where_it_can_reach_them(models, weights, greedy, elsewhere):
    pytest.importorskip("ray")
    args = {**ARGS, "max_model_len": 1024, **({} if elsewhere else WORKER_APART)}
    spec = EngineOptions(str(models[0]), CharTokenizer(), device="cpu", dtype="float32", args=args)
    with ray_session(ClusterConfig(cpus=1)):
        async with open_pool(spec, RayConfig(backend="vllm_local", cpus=0.5)) as pool:
            if elsewhere:
                pool.engines[0]._place = "another machine"
            task = asyncio.create_task(pool.generate(PROMPT, LONG, request_id="long/0"))
            await asyncio.sleep(0)  # it asks first
            await says(pool)  # which is sampled beside it, so that some of its tokens are of the old weights
            for version in (1, 2):
                await pool.update_weights(weights[version].items(), version)
                assert await says(pool) == (greedy[version], version)
            assert list(Counter((await task).policy_versions)) == [0, 1, 2]
            assert len(held()) == 1  # of the last, for successors
    assert len(held()) == 0


@vllm
@pytest.mark.parametrize("way", ["ipc", "nccl"])
async def test_weights_go_from_gpu_to_gpu(models, weights, greedy, way):
    """Never run so far: there was no GPU."""
    needed = {"ipc": 1, "nccl": 2}[way]
    if torch.cuda.device_count() < needed:
        pytest.skip(f"{way} needs {needed} CUDA devices, there are {torch.cuda.device_count()}")
    args = {**ARGS, "transfer": way, "worker_extension_cls": "agentenv.engines.vllm.worker.WorkerExtension"}
    engine = VLLMEngine(models[0], dtype="float32", max_model_len=1024, gpu_memory_utilization=0.3, engine_args=args)
    await engine.start()
    try:
        device = f"cuda:{needed - 1}"
        for version in (1, 2):
            named = [(name, tensor.to(device)) for name, tensor in weights[version].items()]
            await engine.update_weights(named, version)
            assert await says(engine) == (greedy[version], version)
    finally:
        await engine.close()
