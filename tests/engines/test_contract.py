"""What `agentenv.core.engine.Engine` promises, of all engines but vLLM's in this process; other packages' engines."""

from __future__ import annotations

import asyncio
import math
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from agentenv.core.engine import Engine, EngineOptions, NoTokenizer, sample
from agentenv.core.types import Completion, Conversation, SamplingParams
from agentenv.engines import factory
from agentenv.engines.chat.engine import ChatEngine
from agentenv.engines.factory import ENGINES, engine_class, engine_names, make_engine
from agentenv.engines.hf.engine import HFEngine
from agentenv.engines.opening import open_engine
from agentenv.engines.pool import EnginePool
from agentenv.engines.scripted import ScriptedEngine
from agentenv.engines.vllm.http import VLLMHTTPEngine
from agentenv.errors import ConfigError, EngineError
from agentenv.testing.tokenizers import CharTokenizer
from tests.api_model import completion as chat_completion
from tests.api_model import served
from tests.engines.streamed import StreamedTransport
from tests.engines.test_vllm_http import Fake, completion
from tests.models import make_tiny_qwen2

SEEDED = SamplingParams(max_tokens=6, temperature=1.0, seed=3)
PROMPT = [40, 41, 42]
BY_MESSAGES = Conversation([{"role": "user", "content": "hello"}])
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}'


def cut(body):
    """A server's answer of at most as many tokens as it may have."""
    num = min(3, body.get("max_tokens", 3))
    return completion(
        body.get("prompt", PROMPT), [5, 6, 7][:num], [-0.5] * num, finish_reason="stop" if num == 3 else "length"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(params=["scripted", "hf", "vllm_http", "pool", "chat"])
async def engine(request, model, monkeypatch):
    """Each kind of engine, started. Ray's is an engine of these in another process: `test_ray.py`."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with served(lambda body: chat_completion("hello")) as server:
        made = {
            "scripted": lambda: ScriptedEngine(["abcdefgh"], CharTokenizer()),
            "hf": lambda: HFEngine(model, max_length=64),
            "vllm_http": lambda: VLLMHTTPEngine("http://vllm", transport=StreamedTransport(Fake(cut))),
            "pool": lambda: EnginePool([ScriptedEngine(["abcdefgh"], CharTokenizer()) for _ in range(2)]),
            "chat": lambda: ChatEngine(server.base_url, "the-model"),
        }[request.param]()
        await made.start()
        yield made
        await made.close()


def ask(engine, sampling=SEEDED, request_id="e/0"):
    prompt = BY_MESSAGES if isinstance(engine.tokenizer, NoTokenizer) else PROMPT
    return sample(engine, prompt, sampling, request_id=request_id, limit_s=60.0)


async def test_a_completion_can_be_recorded_and_keeps_to_max_tokens(engine):
    found = await ask(engine)
    assert isinstance(found, Completion)
    assert found.answer is not None or 0 < len(found.token_ids) <= 6
    assert found.logprobs is None or len(found.logprobs) == len(found.token_ids)
    one = await ask(engine, SamplingParams(max_tokens=1, seed=3))
    assert one.answer is not None or (len(one.token_ids), one.finish_reason) == (1, "length")


async def test_a_seeded_request_has_the_same_tokens_alone_and_beside_others(engine):
    alone = await ask(engine)
    beside = await asyncio.gather(*(ask(engine, request_id=f"e{i}/0") for i in range(4)))
    assert {each.token_ids for each in beside} == {alone.token_ids}


async def test_a_prompt_is_not_changed_and_may_change_after_the_call(engine):
    if isinstance(engine.tokenizer, NoTokenizer):
        return
    prompt = list(PROMPT)
    await engine.generate(prompt, SEEDED, request_id="e/0")
    assert prompt == PROMPT
    alone = await ask(engine)
    pending = asyncio.ensure_future(engine.generate(prompt, SEEDED, request_id="e/1"))
    found = await pending
    prompt.clear()
    assert found.token_ids == alone.token_ids


async def test_a_cancelled_request_leaves_an_engine_that_answers(engine):
    asked = asyncio.ensure_future(ask(engine))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    assert (await ask(engine)).finish_reason in ("stop", "length")


async def test_tokens_are_scored_or_the_engine_says_that_it_cannot(engine):
    if isinstance(engine, HFEngine):
        scores = await engine.score(PROMPT)
        assert len(scores) == 3
        assert math.isnan(scores[0])
    elif not isinstance(engine, VLLMHTTPEngine):  # the tests of that engine have answers of a server to score
        with pytest.raises(ConfigError, match=r"--engine: expected one that scores tokens, got \w+Engine"):
            await engine.score(PROMPT)


async def test_a_structural_tag_is_followed_or_refused_with_the_reason(engine):
    if engine.constraint_problem:
        with pytest.raises(ConfigError):
            await ask(engine, SamplingParams(max_tokens=6, structural_tag=TAG))
    else:
        assert (await ask(engine, SamplingParams(max_tokens=6, structural_tag=TAG))).forced is not None


async def test_what_an_engine_cannot_do_is_refused_by_name(engine):
    for call in (engine.sleep(), engine.wake_up()):
        with pytest.raises(ConfigError, match=r"--vllm_enable_sleep: expected vLLM on GPUs, got \w+Engine"):
            await call


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_every_name_leads_to_a_class_whose_module_imports_no_heavy_library(name):
    assert issubclass(engine_class(name), Engine)
    assert "from_options" in vars(engine_class(name))


class Echo(Engine):
    """Says its prompt."""

    def __init__(self, num=1):
        self.num = num

    @classmethod
    def from_options(cls, options):
        return cls(**options.args)

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        return Completion(tuple(prompt_token_ids[: sampling.max_tokens]))


class Buggy(Echo):
    """Raises a TypeError of its own when it is constructed."""

    def __init__(self):
        self.num = None + 1


@pytest.fixture
def installed(monkeypatch):
    """Packages with the engines `echo`, `buggy`, `hf` and twice `typo`, and with what is none."""
    offers = [
        ("echo", ":Echo"), ("echo", ":Echo"), ("buggy", ":Buggy"), ("typo", ":Echo"), ("typo", ":Buggy"),
        ("hf", ":Echo"), ("other", ":ask"), ("gone", "_gone:Echo"), ("noattr", ":Gone"),
    ]  # fmt: skip
    found = [EntryPoint(name, f"{__name__}{place}", factory.GROUP) for name, place in offers]
    monkeypatch.setattr(factory, "_offered", lambda: EntryPoints(found))


def test_the_metadata_of_packages_is_read_once(monkeypatch):
    read = []
    monkeypatch.setattr(factory, "_offered", cache(factory._offered.__wrapped__))
    monkeypatch.setattr(factory, "entry_points", lambda **given: read.append(given) or EntryPoints())
    assert "hf" in engine_names()
    assert engine_class("scripted") is engine_class("scripted") is ScriptedEngine
    assert read == [{"group": factory.GROUP}]


@pytest.mark.usefixtures("installed")
async def test_an_installed_package_adds_an_engine_by_its_entry_point():
    assert "echo" in engine_names()
    async with open_engine("echo", "any", CharTokenizer(), args={"num": 2}) as opened:
        assert opened.num == 2
        assert (await ask(opened)).token_ids == tuple(PROMPT)
        assert opened.constraint_problem == "Echo does not constrain what it samples"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt", "--engine: expected one of auto, hf, .*, ray, buggy, echo, gone, noattr, other, typo, got 'gpt'"),
        ("ecoh", "got 'ecoh'. Did you mean 'echo'?"),
        ("echo", r"--engine_args: expected arguments of the echo engine, got 'nonsense'\. It takes num\."),
        ("other", "--engine other: expected a subclass of .*Engine, got <function"),
        ("typo", r"--engine typo: expected one package to offer it, got .*:Echo\) and .*:Buggy\)\. Uninstall one"),
        ("hf", r"--engine hf: expected one package to offer it, got agentenv-rl \(.*:HFEngine\) and .*:Echo\)"),
        ("gone", r"--engine gone: expected \? \(\S+_gone:Echo\) to import, got ModuleNotFoundError: .*_gone'"),
        ("noattr", r"--engine noattr: expected \? \(\S+:Gone\) to import, got AttributeError: .* no attribute 'Gone'"),
    ],
)
def test_a_wrong_name_argument_or_class_is_refused_by_name(name, says):
    with pytest.raises(ConfigError, match=says):
        make_engine(name, EngineOptions("m", CharTokenizer(), args={"nonsense": 1}))


def test_an_argument_that_other_flags_give_is_refused_with_the_whole_reason():
    with pytest.raises(ConfigError, match=r"of the chat engine, got .*multiple values for argument 'model'\. It takes"):
        make_engine("chat", EngineOptions("m", CharTokenizer(), base_url="http://h/v1", args={"model": "x"}))


@pytest.mark.usefixtures("installed")
def test_an_engines_own_type_error_is_not_blamed_on_the_flags():
    with pytest.raises(TypeError, match="unsupported operand"):
        make_engine("buggy", EngineOptions("m", CharTokenizer()))


class Odd(Echo):
    """Says what it was told to say, whatever it was asked."""

    constraint_problem = ""

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        return Completion((1,), self.num)


@pytest.mark.parametrize(
    ("reason", "tag", "error", "says"),
    [
        ("eos", None, EngineError, "expected a finish reason of stop, length, abort, error, repetition, got 'eos'"),
        ("stop", TAG, ConfigError, "got one that ignores it: its Completion has forced=None. Choose"),
    ],
)
async def test_a_completion_that_no_record_should_have_is_refused(reason, tag, error, says):
    with pytest.raises(error, match=says):
        await ask(Odd(reason), SamplingParams(max_tokens=1, structural_tag=tag))
