"""Specs of reward models: what each opens, and what is said of one that opens nothing."""

import sys
from types import SimpleNamespace

import pytest

from agentenv.errors import ConfigError, MissingDependency
from agentenv.rewards.evaluation.evaluate import open_rm
from agentenv.rewards.judges.comparisons import PairwiseJudge
from agentenv.rewards.judges.openai import OpenAIJudge
from agentenv.rewards.judges.pointwise import PointwiseReward
from agentenv.rewards.models import factory as opening


@pytest.mark.parametrize(
    ("spec", "kind", "target"),
    [
        ("some/folder", "hf", "some/folder"),
        ("hf:some/folder", "hf", "some/folder"),
        ("ray:some/folder", "ray", "some/folder"),
        ("http://h:5000/get_reward", "get_reward", "http://h:5000/get_reward"),
        ("https://h/get_reward", "get_reward", "https://h/get_reward"),
        ("classify:http://h:8000", "classify", "http://h:8000"),
        ("folder/rm.py", "function", "folder/rm.py"),
        ("rm.py:score", "function", "rm.py:score"),
    ],
)
async def test_a_spec_names_its_scorer_and_what_that_is_given_first(spec, kind, target, monkeypatch):
    class Opened:
        def __init__(self, target, *, max_length=None, label=None):
            self.target, self.max_length, self.label = target, max_length, label

        async def close(self):
            self.closed = True

    asked = []
    module, _, name = opening.SCORERS[kind].partition(":")
    opened = SimpleNamespace(**{name: Opened})
    monkeypatch.setattr(opening.importlib, "import_module", lambda path: asked.append(path) or opened)
    rm = open_rm(spec, max_length=9, label="good")
    assert asked == [module]
    assert (rm.scorer.target, rm.scorer.max_length, rm.scorer.label) == (target, 9, "good")
    await rm.close()
    assert rm.scorer.closed


async def test_judges_compare_or_score_and_have_their_client_closed():
    rm = open_rm("judge:org/model:x@http://h:8000/v1", criteria="Be kind.", extra_body={"a": 1})
    assert isinstance(rm.comparer, PairwiseJudge)
    assert isinstance(rm.judge, OpenAIJudge)
    assert (rm.judge.model, rm.judge.url) == ("org/model:x", "http://h:8000/v1/chat/completions")
    assert rm.judge.extra_body == {"a": 1}
    assert {"judge/num_compared", "judge/num_flipped", "judge/cost"} <= rm.metrics().keys()
    await rm.close()
    rm = open_rm("judge-score:m@http://h/v1", scale=[1, 5])
    assert isinstance(rm.reward, PointwiseReward)
    await rm.close()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("vllm:folder", "classify:http://HOST:8000 (vLLM's server)"),
        ("hf:", "expected a model's folder"),
        ("", "expected a model's folder"),
        ("judge:model", "judge:MODEL@http://HOST/v1"),
        ("judge:@http://h/v1", "judge:MODEL@http://HOST/v1"),
        ("judge:m@nowhere", "base_url"),
        ("reward:repetitoin", "repetition"),
    ],
)
def test_a_spec_that_opens_nothing_is_refused_with_what_was_meant(spec, said):
    with pytest.raises(ConfigError) as error:
        open_rm(spec)
    assert said in str(error.value)


def test_an_option_that_a_backend_has_not_is_refused_and_names_those_it_has():
    with pytest.raises(ConfigError, match=r"options among .*max_batch.*got 'max_bach'.*Did you mean 'max_batch'"):
        open_rm("some/folder", max_bach=3)
    with pytest.raises(ConfigError, match="got 'dtype'"):
        open_rm("judge:m@http://h/v1", dtype="float32")


def test_a_backend_that_is_not_installed_is_named_as_such(monkeypatch):
    monkeypatch.setitem(sys.modules, "agentenv.rewards.models.ray_replicas", None)
    with pytest.raises(MissingDependency, match="ray_replicas"):
        open_rm("ray:folder")
