"""Rewards by name, and rewards of rewards from JSON."""

import importlib
import inspect
import json
import math
import pkgutil
import subprocess
import sys

import pytest

from agentenv.errors import ConfigError
from agentenv.rewards.grading import grade
from agentenv.rewards.loading import load_function
from agentenv.rewards.models.hf import HFScorer
from agentenv.rewards.models.reward import ModelReward
from agentenv.rewards.registry import REWARDS, ROLL_NAMES, make_reward, reward_from, reward_names
from agentenv.rewards.rules.math.reward import MathReward
from agentenv.rewards.types import Response, Status

NEEDED = {
    "overlong": {"max_length": 100, "buffer": 10},
    "judge": None,  # who is asked?
    "judge_score": None,
    "rubric": None,
    "model": None,  # of what?
    "normalized": {"reward": "math"},
}
"""Options without which there is no such reward."""


@pytest.mark.parametrize("name", reward_names())
def test_every_name_is_a_reward_with_bounds(name):
    options = NEEDED.get(name, {})
    if options is None:
        with pytest.raises(ConfigError, match=r"missing a required|expected a scorer"):
            make_reward(name)
        return
    low, high = make_reward(name, **options).bounds
    assert low < high


def rewards_of(folder):
    """Yield each class of a reward that a folder of `agentenv.rewards` defines."""
    package = importlib.import_module(f"agentenv.rewards.{folder}")
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        for name, each in inspect.getmembers(module, inspect.isclass):
            is_reward = hasattr(each, "bounds") and inspect.iscoroutinefunction(getattr(each, "grade", None))
            if is_reward and each.__module__ == found.name and not name.startswith("_"):
                yield each


@pytest.mark.parametrize("folder", ["rules", "judges"])
def test_every_reward_that_is_written_is_registered(folder):
    registered = {load_function(f"agentenv.rewards.{entry.path}") for entry in REWARDS.values()}
    assert set(rewards_of(folder)) - registered == set()
    assert reward_names() == sorted(REWARDS)


@pytest.mark.parametrize("name", sorted(set(ROLL_NAMES) - {"LLMJudgeRewardWorker"}))
def test_rolls_eight_names_mean_what_does_their_work(name):
    assert len(ROLL_NAMES) == 8
    assert type(make_reward(name)) is type(make_reward(ROLL_NAMES[name]))


def test_a_reward_model_is_named_by_its_spec_and_loads_nothing():
    settings = {"model": {"rm": "hf:a/folder", "rm_args": {"max_length": 64}, "shift": -1.0, "clip": [-2, 2]}}
    reward = reward_from({"sum": {"rm": settings, "brief": {"reward": "length", "weight": 0.1}}})
    assert reward.bounds[0] < reward.bounds[1]
    model = reward_from(settings)
    assert isinstance(model, ModelReward)
    assert isinstance(model.scorer, HFScorer)
    assert model.bounds == (-2.0, 2.0)


UNKNOWN = {
    "maths": "Did you mean 'math'",
    "mathrulerewardworker": "Did you mean 'MathRuleRewardWorker'",
    "": "Check its name.",
    "nothing like it": "expected one of math, code",
    "agentenv.rewards.rules.math.reward:Nothing": "Nothing: expected a function or a class 'Nothing', got None.",
    "agentenv.rewards.rules.length:LenghtReward": "got None. Did you mean 'LengthReward'?",
    "agentenv.rewards.rules.length:typo": "There are band_penalty, part_of, LengthReward, ",
    "no.such.module:A": "expected 'no.such.module:A' to import, got ModuleNotFoundError",
    "nowhere.py:f": "expected a Python file, got 'nowhere.py'",
    "agentenv.core.types:Task": "Task",
    "builtins:dict": "expected a class of Python",
    5: "reward: expected a name",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_is_refused_with_the_nearest(name):
    with pytest.raises(ConfigError) as caught:
        make_reward(name)
    assert UNKNOWN[name] in str(caught.value)


MODEL = {"rm": "hf:a/folder"}
WRONG = {
    "math": [{"wrong": "-1"}, {"correct": math.inf}, {"no_answer": True}],
    "code": [{"scale": "half"}, {"limits": {"seconds": 1}}, {"limits": 3}, {"sandbox": {"backend": "dokcer"}}],
    "choice": [{"require_box": 1}, {"num_options": 1}, {"num_options": 27}, {"num_options": True}, {"index_base": 2},
               {"scale": "hard"}, {"scale": []}, {"tags": "ceval"}, {"tags": (1,)}, {"repetition_penalty": 0.1},
               {"length_coefficient": -1.0}, {"count": 5}],
    "detection": [{"ratios": {"map": -1}}, {"ratios": {"iou": 1}}, {"threshold": 0.4},
                  {"threshold": "mean"}, {"threshold": math.nan}, {"format_ratio": -1}, {"accuracy_ratio": math.inf}],
    "format": [{"mode": "hard"}, {"think_opened": 1}, {"pattern": "a"}, {"passed": "1"}, {"failed": math.inf}],
    "tool_call_format": [{"think_opened": "yes"}, {"passed": True}],
    "ifeval": [{"mode": "lenient"}, {"credit": 1}, {"pool": "pool"}],
    "json_schema": [{"schema": {"type": "objekt"}}, {"schema": {"a": {1}}}, {"mode": "loose"}, {"partial": 1.5},
                    {"partial": -0.1}, {"cpu_limit_s": 0.0}],
    "length": [{"min_length": -1}, {"min_length": 1.5}, {"max_length": 5}, {"rate": math.nan}, {"floor": 0.5},
               {"floor": -math.inf}, {"unit": "bytes"}, {"part": "answer"}, {"count": len},
               {"unit": "tokens", "count": 3}],
    "thought_length": [{"floor": 1.0}],
    "overlong": [{"buffer": 1, "max_length": 0}, {"max_length": 9, "buffer": 10},
                 {"max_length": 9, "buffer": 3, "factor": -1}],
    "regex": [{"pattern": "("}, {"how": "match"}, {"part": "answer"}, {"how": "count", "min_count": -1},
              {"how": "count", "min_count": 3, "max_count": 2}, {"failed": math.nan}, {"cpu_limit_s": 0}],
    "repetition": [{"ngram_size": 0}, {"ngram_size": 33}, {"max_penalty": 0.1}, {"max_penalty": math.nan},
                   {"min_scaling": 1.0}, {"mode": "firm"}, {"scope": "all"}, {"unit": None}],
    "similarity": [{"metric": "bleu"}, {"metric": []}, {"ngram_size": 17}],
    "model": [MODEL | wrong for wrong in (
        {"shift": math.nan}, {"scale": 0.0}, {"scale": True}, {"clip": (1.0, 1.0)}, {"clip": 5.0}, {"clip": (1.0,)},
        {"score": (0.0, 0.0)}, {"part": "thought"}, {"clip": (-1.0, 1.0), "no_answer": 2.0}, {"text_prompt": "chat"},
    )],
    "normalized": [{"reward": "math"} | wrong for wrong in (
        {"kind": "mean"}, {"clip": 0.0}, {"half_life": 0.5}, {"calibration": "1,2"}, {"calibration": [1.0, math.nan]},
        {"kind": "fixed", "calibration": [2.0, 2.0]},
    )],
}  # fmt: skip
"""Options of each reward, of which the last one is wrong."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_refused_by_its_name(name):
    for options in WRONG[name]:
        with pytest.raises(ConfigError, match="expected") as caught:
            make_reward(name, **options)
        assert list(options)[-1] in str(caught.value)


def test_wrong_options_are_refused_with_those_that_there_are():
    with pytest.raises(ConfigError) as caught:
        make_reward("math", wrng=-1.0)
    assert "math: expected options among correct, wrong, no_answer" in str(caught.value)
    assert "Did you mean 'wrong'?" in str(caught.value)
    with pytest.raises(ConfigError, match=r"MathReward.wrong: expected a number"):
        make_reward("math", wrong="-1")


FILE = """
class Length:
    bounds = (0.0, 9.0)
    def __init__(self, *, factor=1.0):
        self.factor = factor
    async def grade(self, response):
        from agentenv.rewards.types import RewardResult
        return RewardResult(self.factor * len(response.text))

class NoReward:
    def __init__(self, *, factor=1.0):
        self.factor = factor

def starts(response, label):
    return float(response.startswith(label))

async def ends(response, label):
    return {"reward": float(response.endswith(label)), "seen": 1.0}

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


async def test_a_class_of_a_file_is_made_with_its_options(file):
    reward = make_reward(f"{file}:Length", factor=2.0)
    assert (await reward.grade(Response("abc"))).reward == 6.0


@pytest.mark.parametrize("name", ["starts", "ends"])
async def test_a_function_of_a_file_is_a_reward(name, file):
    reward = make_reward(f"{file}:{name}", bounds=(0.0, 1.0))
    assert reward.bounds == (0.0, 1.0)
    assert (await reward.grade(Response("abab", "ab"))).reward == 1.0


@pytest.mark.parametrize("name", ["NoReward", "NUMBER", "nothing"])
def test_input_that_is_not_a_reward_is_refused(name, file):
    with pytest.raises(ConfigError, match=f"expected a (reward, with `bounds`|function or a class '{name}')"):
        make_reward(f"{file}:{name}")


# --- of JSON --------------------------------------------------------------------------------------------------------

SUM = {"sum": {"answer": {"reward": "math", "weight": 0.9}, "format": {"reward": "format", "weight": 0.1}}}


@pytest.mark.parametrize(
    ("spec", "text", "expected"),
    [
        ("math", "The answer is 42.", 1.0),
        ({"math": {"wrong": -0.25}}, "The answer is 41.", -0.25),
        ({"math": {}}, "The answer is 42.", 1.0),
        (SUM, "<think>Six sevens.</think><answer>\\boxed{42}</answer>", 1.0),
        ({"sum": {"answer": "math", "again": {"math": {"correct": 0.5}}}}, "The answer is 42.", 1.5),
        ({"sum": {"a": {"reward": SUM, "weight": 2.0}}}, "<think>Six sevens.</think><answer>\\boxed{42}</answer>", 2.0),
        ({"route": {"sums": "math", "code": "code"}}, "The answer is 42.", 1.0),
        ({"route": {"math": "math"}, "tags": {"gsm8k": "math"}, "key": "data_source"}, "The answer is 42.", 1.0),
    ],
)
async def test_settings_become_a_reward(spec, text, expected):
    reward = reward_from(json.loads(json.dumps(spec)))
    row = Response(text, "42", metadata={"tag": "sums", "data_source": "gsm8k"})
    result = await grade(reward, row)
    assert (result.reward, result.detail) == (pytest.approx(expected), result.detail)


def test_a_reward_is_given_back_and_may_be_a_part():
    made = make_reward("math")
    assert reward_from(made) is made
    assert reward_from({"sum": {"a": {"reward": made, "weight": 2.0}}}).bounds == (0.0, 2.0)


async def test_an_optional_part_that_fails_adds_nothing_and_a_required_one_takes_the_reward():
    optional = {"sum": {"answer": "math", "more": {"reward": "choice", "required": False}}}
    row = Response("The answer is 42.", "42")
    assert (await grade(reward_from(optional), row)).reward == 1.0
    required = {"sum": {"answer": "math", "more": "choice"}}
    result = await grade(reward_from(required), row)
    assert (result.reward, result.status) == (None, Status.LABEL)


UNREADABLE = {
    "nothing": {},
    "two names": {"math": {}, "code": {}},
    "options in a list": {"math": [1]},
    "a class": MathReward,
    "a requirement that is text": {"sum": {"a": {"reward": "math", "required": "no"}}},
    "tags of nothing": {"route": {"math": "math"}, "tags": {"math": None}},
    "a sum with other settings": {"sum": {"a": "math"}, "weights": [1.0]},
    "a term with other settings": {"sum": {"a": {"reward": "math", "wieght": 1.0}}},
    "a tag of no domain": {"route": {"math": "math"}, "tags": {"gsm8k": "maths"}},
    "a nested part of no name": {"route": {"a": {"sum": {"b": {"reward": {"maths": {}}}}}}},
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_settings_that_cannot_be_read_are_refused(case):
    with pytest.raises(ConfigError):
        reward_from(UNREADABLE[case])


def test_the_mistake_in_a_part_is_reported_with_its_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'math'"):
        reward_from(UNREADABLE["a nested part of no name"])
    with pytest.raises(ConfigError, match=r"sum.a: expected options among reward, weight, required.* 'weight'\?"):
        reward_from(UNREADABLE["a term with other settings"])


@pytest.mark.long
def test_the_registry_imports_no_reward_before_it_is_asked_for():
    program = (
        "import sys; from agentenv.rewards import registry; registry.reward_names(); "
        "loaded = [name for name in sys.modules if name.startswith('agentenv.rewards.')]; print(sorted(loaded)); "
        "sys.exit('agentenv.rewards.rules.math.reward' in loaded or 'agentenv.sandbox' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
