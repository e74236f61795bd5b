"""Our rewards on batches of ROLL's shape; with a checkout of ROLL in ROLL_SRC, on its own as well."""

import inspect
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from agentenv.errors import ConfigError, ContractError, DataError, InfraError
from agentenv.interop import roll
from agentenv.interop.roll import CustomReward, RollRewards, worker_class
from agentenv.interop.roll.dispatch import FLAG, Dispatch, data_parallel, dispatched, one_to_all, register
from agentenv.rewards.judges.pointwise import JudgeReward
from agentenv.rewards.registry import ROLL_NAMES, reward_from
from agentenv.rewards.types import RewardResult, Status
from tests.interop.protos import DataProto, Tokenizer, batch_of
from tests.rewards.judges.servers import chat_server

ROOT = Path(__file__).parents[2]


class Length:
    """A response's length; some words make it fail, in all the ways there are."""

    bounds = (-math.inf, math.inf)

    async def grade(self, response):
        if response.text == "label":
            raise DataError("label: expected one, got None. Mend the row.")
        if response.text == "raise":
            raise RuntimeError("down")
        if response.text == "nan":
            return RewardResult.failed("no number", Status.INFRA)
        return RewardResult(float(len(response.text)), components={"length": 1.0})


def rewards(reward=None, **options):
    return RollRewards(reward or Length(), Tokenizer(), **options)


def batch(texts, ids=None, prompts=None, **columns):
    columns.setdefault("id", ids or [str(index) for index in range(len(texts))])
    columns.setdefault("ground_truth", ["4"] * len(texts))
    columns.setdefault("tag", ["some"] * len(texts))
    return batch_of(prompts or ["p"] * len(texts), texts, meta_info={"global_step": 3}, **columns)


def response_level(answer):
    return answer.batch["response_level_rewards"].tolist()


# --- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "dtype"), [({}, torch.float16), ({"dtype": "float32"}, torch.float32)])
def test_tensors_have_rolls_names_shapes_and_type(options, dtype):
    data = batch(["aa", "bbb", "c"])
    answer = rewards(**options).compute_rewards(data)
    assert type(answer) is DataProto
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in answer.batch.items()}
    assert shapes == {
        "token_level_rewards": (tuple(data.batch["responses"].shape), dtype),
        "response_level_rewards": ((3,), dtype),
        "scores": ((3,), dtype),
    }
    assert response_level(answer) == [2.0, 3.0, 1.0]
    assert answer.batch["token_level_rewards"].abs().max() == 0
    assert answer.meta_info["metrics"]["rewards/reward/mean"] == 2.0


def test_a_batch_that_is_not_a_dataproto_gets_a_dict():
    data = batch(["aa", "b"])
    plain = SimpleNamespace(batch=data.batch, non_tensor_batch=data.non_tensor_batch, meta_info={})

    class Sized(SimpleNamespace):
        def __len__(self):
            return 2

    answer = rewards().compute_rewards(Sized(**vars(plain)))
    assert answer["response_level_rewards"].tolist() == [2.0, 1.0]


async def test_it_is_called_within_an_event_loop_too():
    worker, data = rewards(), batch(["aa", "b"])
    assert response_level(worker.compute_rewards(data)) == response_level(await worker.acompute_rewards(data))


def test_a_reward_that_float16_cannot_hold_stays_finite():
    class Huge(Length):
        async def grade(self, response):
            return RewardResult(1e6 if response.text == "a" else -1e6)

    assert response_level(rewards(Huge()).compute_rewards(batch(["a", "b"]))) == [65504.0, -65504.0]


def test_columns_and_the_training_step_reach_the_reward_and_stay_as_they_are():
    seen = []

    class Looks(Length):
        async def grade(self, response):
            seen.append(response)
            response.label["func_name"] = "popped"
            return RewardResult(1.0)

    given = {"func_name": "validate_lowercase"}
    data = batch(["a"], ground_truth=[given], prompt=["the prompt"], test_cases=["[]"])
    rewards(Looks()).compute_rewards(data)
    (response,) = seen
    assert response.prompt == "the prompt"
    assert (response.metadata["test_cases"], response.metadata["global_step"]) == ("[]", 3)
    assert given == {"func_name": "validate_lowercase"}


def test_the_label_of_rows_with_a_reward_model_is_its_ground_truth():
    data = batch([r"\boxed{4}"], ground_truth=[None], reward_model=[{"ground_truth": "4"}])
    assert response_level(RollRewards("math", Tokenizer()).compute_rewards(data)) == [1.0]


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["label", "raise", "nan"])
@pytest.mark.parametrize(("policy", "instead"), [("zero", 0.0), ("keep", -999.0), ("group_mean", 3.0)])
def test_a_response_that_cannot_be_graded_costs_no_other_its_reward(failure, policy, instead):
    data = batch(["aa", failure, "aaaa", "b"], ids=["x", "x", "x", "y"])
    answer = rewards(invalid_policy=policy).compute_rewards(data)
    assert response_level(answer) == [2.0, instead, 4.0, 1.0]
    assert answer.batch["scores"].tolist() == [2.0, 0.0, 4.0, 1.0]
    assert answer.meta_info["metrics"]["rewards/num_invalid"] == 1.0


def test_a_group_of_which_none_can_be_graded_has_no_advantage():
    assert response_level(rewards().compute_rewards(batch(["raise", "raise"], ids=["x", "x"]))) == [0.0, 0.0]


def test_failures_may_end_the_batch():
    with pytest.raises(InfraError, match="got none for 1"):
        rewards(invalid_policy="raise").compute_rewards(batch(["aa", "raise"]))


def test_without_ids_a_group_is_what_has_the_same_prompt():
    data = batch(["aa", "raise", "bbbb"], ids=[None] * 3, prompts=["p", "p", "q"])
    assert response_level(rewards().compute_rewards(data)) == [2.0, 2.0, 4.0]


# --- domains ---------------------------------------------------------------------------------------------------------

DOMAINS = {"math_rule": "math", "any": Length()}
TAGS = {"math_rule": ["gsm8k", "aime"], "any": ["chat"]}


def test_each_row_goes_to_the_reward_of_its_tag():
    data = batch([r"\boxed{4}", "hello", r"\boxed{5}"], tag=["gsm8k", "chat", "aime"])
    assert response_level(rewards(DOMAINS, tags=TAGS).compute_rewards(data)) == [1.0, 5.0, 0.0]


def test_a_row_without_a_tag_goes_by_its_domain():
    data = batch(["hello", "b"], tag=[None, None], domain=["any", "any"])
    assert response_level(rewards(DOMAINS, tags=TAGS).compute_rewards(data)) == [5.0, 1.0]


def test_an_unknown_tag_is_an_error_and_not_mathematics():
    """ROLL takes any tag that it does not know for mathematics."""
    data = batch(["hello", "b"], tag=["chat", "poetry"], domain=["any", "math_rule"])
    with pytest.raises(DataError, match=r"tag: expected one of .*, got 'poetry'"):
        rewards(DOMAINS, tags=TAGS).compute_rewards(data)
    lenient = rewards(DOMAINS, tags=TAGS, on_unknown="invalid", invalid_policy="keep")
    assert response_level(lenient.compute_rewards(data)) == [5.0, -999.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"invalid_policy": "mask"}, "invalid_policy"),
        ({"tags": {"chat": "any"}}, "expected a reward for each domain"),
    ],
)
def test_wrong_options_are_refused_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        rewards(**options)


# --- workers ---------------------------------------------------------------------------------------------------------


def config():
    return SimpleNamespace(tokenizer=Tokenizer())


@pytest.mark.parametrize("name", [name for name in ROLL_NAMES if name != "LLMJudgeRewardWorker"])
def test_rolls_workers_are_there_by_their_names(name):
    worker = getattr(roll, name)(config())
    assert (type(worker).__name__, type(worker).__module__) == (name, "agentenv.interop.roll")
    assert type(worker.rewards.reward) is type(reward_from(ROLL_NAMES[name]))
    assert pickle.loads(pickle.dumps(type(worker))) is type(worker) is getattr(roll, name)
    assert getattr(worker.compute_rewards, FLAG)["dispatch_mode"] is Dispatch.DP_MP_COMPUTE
    assert getattr(worker.initialize, FLAG)["dispatch_mode"] is Dispatch.ONE_TO_ALL


def test_rolls_judge_needs_a_judge():
    with pytest.raises(ConfigError, match="judge"):
        roll.LLMJudgeRewardWorker(config())


async def test_rolls_judge_is_made_of_settings_in_its_options():
    async with chat_server("NO. I cannot say yes", "Verdict: YES") as server:

        class Worker(roll.LLMJudgeRewardWorker):
            options = {"judge": {"base_url": server.url, "model": "m"}, "dtype": "float32"}  # noqa: RUF012

        worker = Worker(config())
        rows = batch(["Rome", "Paris"], ground_truth=["Paris", "Paris"])
        answer = await worker.rewards.acompute_rewards(rows)
        assert sorted(response_level(answer)) == [0.0, 1.0]
        assert answer.batch["scores"].dtype == torch.float32

        class Scoring(roll.LLMJudgeRewardWorker):
            reward = {"judge_score": {"scale": [0, 5]}}  # noqa: RUF012
            options = {"judge": {"base_url": server.url, "model": "m"}}  # noqa: RUF012

        assert Scoring(config()).rewards.reward.high == 5.0


def test_a_judge_together_with_rewards_of_several_kinds_is_refused():
    class Worker(roll.LLMJudgeRewardWorker):
        reward = {"sum": {"a": "math"}, "limit_s": 3.0}  # noqa: RUF012
        options = {"judge": {"base_url": "http://h/v1", "model": "m"}}  # noqa: RUF012

    with pytest.raises(ConfigError, match="no judge besides the reward"):
        Worker(config())


class Template(roll.CustomRewardWorker):
    def _check_answer_correctness(self, response, ground_truth):
        if "crash" in response:
            raise ValueError("crash")
        return ground_truth in response


GOOD = "<think>so and so</think><answer>4</answer>"


def test_the_template_is_answer_and_half_a_point_for_format_less_repetition():
    texts = [GOOD, "4", "no", "crash", "a b c a b c a b c a b c"]
    answer = Template(config()).compute_rewards(batch(texts, ids=["x"] * 3 + ["y", "z"]))
    found = response_level(answer)
    assert found[:4] == [1.5, 1.0, 0.0, 0.0]
    assert found[4] == pytest.approx(-0.1 * 0.7, abs=1e-3)  # 3 of 10 triples are different ones
    assert answer.meta_info["metrics"]["rewards/num_invalid"] == 1.0


def test_no_worker_has_async_methods():
    """Ray would run its plain ones on the actor's event loop, one at a time."""
    for name in (*ROLL_NAMES, "CustomRewardWorker"):
        assert inspect.getmembers(getattr(roll, name), inspect.iscoroutinefunction) == []


def test_the_template_reads_answers_by_itself():
    worker = worker_class("Plain", CustomReward)(config())
    assert response_level(worker.compute_rewards(batch([r"\boxed{4}", r"\boxed{5}"]))) == [1.0, 0.0]


IN_A_BOX = "<think>so</think>\n<answer>\n[{'bbox_2d': [14, 28, 140, 280], 'label': 'cat'}]\n</answer>"
TRUE_BOX = "<answer>[{'bbox_2d': [100, 100, 1000, 1000], 'label': 'cat'}]</answer>"
ADD = "<think>so</think>\n```python\ndef add(a, b):\n    return a + b\n```"


def code_row(kind, function, **case):
    return {"case_type": kind, "test_case_function": function, "test_cases": json.dumps([case]), "tag": "KodCode"}


def detection_row(truth=TRUE_BOX, **grid):
    rules = {"det_verifier_normalized": True, "det_reward_ratio": {"iou_max_label_first": 1.0, "map": 0.0}}
    reward_model = {"ground_truth": truth, "format_ratio": 0.1, "accuracy_ratio": 1.0, "verifier_parm": rules}
    inputs = {"image_grid_thw": torch.tensor([[1, 20, 10]]), "pixel_values": torch.zeros(2)} | grid
    return {"reward_model": reward_model, "multi_modal_inputs": inputs, "tag": "det"}


CONSTRAINTS = dict.fromkeys(("N", "quantifier", "end_phrase", "keyword_list"))
ROWS = [
    ("MathRuleRewardWorker", {"ground_truth": "4", "tag": "deepmath_103k"}, r"<think>so</think>It is \boxed{4}"),
    ("CodeSandboxRewardWorker", code_row("input", "None", stdin="1 2\n", expected_stdout="3\n"),
     "```python\nprint(sum(map(int, input().split())))\n```"),
    ("CodeSandboxRewardWorker", code_row("pytest", "None", assert_code="def test_it():\n    assert add(1, 2) == 3\n"),
     ADD),
    ("CodeSandboxRewardWorker", code_row("assert", "add", assert_code="assert add(1, 2) == 3", entry_point="add",
                                         import_prefix="import math\n"), ADD),
    ("GeneralValRuleRewardWorker", {"ground_truth": "B", "tag": "ceval"}, "<think>so</think>The answer is B"),
    ("CrossThinkQARuleRewardWorker", {"ground_truth": "B", "tag": "nemotron_CrossThinkQA"}, r"So \boxed{B}"),
    ("MultipleChoiceBoxedRuleRewardWorker", {"ground_truth": "B", "tag": "mc"}, r"So \boxed{b}"),
    ("GeneralRuleRewardWorker", {"ground_truth": json.dumps(CONSTRAINTS | {"func_name": "validate_lowercase"}),
                                 "tag": "ifeval"}, "<think>So</think>all of it low"),
    ("DetectionRewardWorker", detection_row(), IN_A_BOX),
]  # fmt: skip
EVERY_ROW = {
    "id": "0", "source": "x", "difficulty": "0.5", "prompt": "user\nq\nassistant\n", "domain": "d", "ground_truth": "",
    "messages": json.dumps([{"role": "user", "content": "q"}]), "case_type": "", "test_case_function": "",
    "test_cases": "",
}  # fmt: skip


def graded_by(worker, row, response, prompt="q"):
    """The reward of a row of ROLL's form, and how many had none."""
    columns = {name: [value] for name, value in (EVERY_ROW | row).items()}
    meta_info = {"global_step": 3, "max_steps": 100}
    answer = worker.compute_rewards(batch_of([prompt], [response], meta_info=meta_info, **columns))
    (score,) = answer.batch["scores"].tolist()
    return score, answer.meta_info["metrics"]["rewards/num_invalid"]


@pytest.mark.parametrize(("name", "row", "right"), ROWS, ids=[f"{row[0]}-{n}" for n, row in enumerate(ROWS)])
def test_a_row_as_rolls_data_has_it(name, row, right):
    worker = getattr(roll, name)(config())
    assert graded_by(worker, row, right) == (1.0, 0.0)
    assert graded_by(worker, row, "I do not KNOW") == (0.0, 0.0)
    assert graded_by(worker, row, right.rpartition("</think>")[2], prompt="q<think>\n") == (0.0, 0.0), (
        "cut in a thought"
    )


def test_rolls_judge_judges_with_whom_a_class_asks():
    class Says:
        async def complete(self, messages):
            return "YES"

    class Worker(roll.LLMJudgeRewardWorker):
        def make_reward(self):
            return JudgeReward(Says())

    assert graded_by(Worker(config()), {"ground_truth": "Paris", "tag": "RLVR"}, "Paris") == (1.0, 0.0)


def test_boxes_in_pixels_are_measured_by_the_patches_of_the_image():
    """Qwen2.5-VL's are; those of Qwen2-VL and Qwen3-VL are in thousandths already, whatever a row says."""

    class Larger(roll.DetectionRewardWorker):
        patch_size = 28

    class Relative(roll.DetectionRewardWorker):
        patch_size = None

    assert graded_by(Larger(config()), detection_row(), IN_A_BOX)[0] < 0.3
    same = "<answer>[{'bbox_2d': [14, 28, 140, 280], 'label': 'cat'}]</answer>"
    assert graded_by(Relative(config()), detection_row(truth=same), IN_A_BOX) == (1.0, 0.0)


# --- several workers -------------------------------------------------------------------------------------------------


class Counting:
    def __init__(self, number):
        self.number, self.sizes = number, []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, what):
        return (self.number, what)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    def compute_rewards(self, data):
        self.sizes.append(len(data))
        return rewards().compute_rewards(data) if isinstance(data, DataProto) else [row * 10 for row in data]


@pytest.mark.parametrize(
    ("num_rows", "num_workers", "sizes"),
    [(2, 4, [1, 1, 0, 0]), (10, 4, [3, 3, 2, 2]), (8, 4, [2] * 4), (1, 1, [1]), (3, 2, [2, 1]), (0, 2, [1, 0])],
)
def test_batches_of_any_size_are_split_and_keep_their_order(num_rows, num_workers, sizes):
    """ROLL's own cannot split 2 rows for 4 workers, nor a list of 10 for 4."""
    workers = [Counting(number) for number in range(num_workers)]
    data = batch(["a" * n for n in range(1, num_rows + 1)])
    assert response_level(data_parallel(workers, data)) == [float(n) for n in range(1, num_rows + 1)]
    assert [sum(len(range(size)) or 1 for size in worker.sizes) if worker.sizes else 0 for worker in workers] == sizes
    assert data_parallel([Counting(0) for _ in range(num_workers)], list(range(num_rows))) == [
        row * 10 for row in range(num_rows)
    ]


def test_methods_go_to_the_workers_as_they_are_registered():
    workers = [Counting(number) for number in range(3)]
    assert dispatched(workers, Counting.initialize, "x") == [(0, "x"), (1, "x"), (2, "x")]
    assert dispatched(workers, Counting.compute_rewards, list(range(7))) == [row * 10 for row in range(7)]
    assert one_to_all(workers, "y", method="initialize")[2] == (2, "y")


def test_tensors_in_dicts_are_joined():
    class Dicts:
        def compute_rewards(self, data):
            return {"scores": torch.tensor(data)}

    assert data_parallel([Dicts(), Dicts()], [1, 2, 3])["scores"].tolist() == [1, 2, 3]


def test_anything_that_cannot_be_dispatched_is_reported():
    with pytest.raises(ContractError, match="__init__: expected a method marked by `register`"):
        dispatched([Counting(0)], Counting.__init__)
    with pytest.raises(ConfigError, match="workers: expected at least one"):
        data_parallel([], [])
    with pytest.raises(ConfigError, match="dispatch_mode: expected a Dispatch, got 'all'"):
        register("all")


# --- ROLL ------------------------------------------------------------------------------------------------------------

FALSE_ROLL = {
    "__init__.py": "",
    "distributed/__init__.py": "",
    "distributed/executor/__init__.py": "",
    "distributed/executor/worker.py": """
class RankInfo:
    rank, world_size, dp_rank, dp_size = 1, 2, 0, 1
class Worker:
    def __init__(self, worker_config):
        self.worker_config, self.rank_info = worker_config, RankInfo()
""",
    "distributed/scheduler/__init__.py": "",
    "distributed/scheduler/decorator.py": """
from enum import Enum
class Dispatch(Enum):
    ONE_TO_ALL, DP_MP_COMPUTE = 1, 2
def register(dispatch_mode, clear_cache=True):
    def marked(method):
        method.MARK = (dispatch_mode, clear_cache)
        return method
    return marked
""",
    "models/__init__.py": "",
    "models/model_providers.py": "def default_tokenizer_provider(model_args):\n    return ('tokenizer', model_args)\n",
}
WITH_ROLL = """
import pickle, types
from agentenv.interop import roll
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch
cls = roll.MathRuleRewardWorker
assert issubclass(cls, Worker) and pickle.loads(pickle.dumps(cls)) is cls
worker = cls(types.SimpleNamespace(model_args="args"))
assert worker.tokenizer == ("tokenizer", "args")
assert (worker.rank_info.dp_rank, worker.rank_info.dp_size) == (1, 2)
assert cls.compute_rewards.MARK == (Dispatch.DP_MP_COMPUTE, False)
assert cls.initialize.MARK == (Dispatch.ONE_TO_ALL, True)
assert not hasattr(roll.RewardWorker.compute_rewards, "MARK")
"""


def ran_with(code, *folders, arguments=(), cwd=None):
    path = os.pathsep.join([str(ROOT), *map(str, folders), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_with_roll_the_workers_are_rolls(tmp_path):
    for name, text in FALSE_ROLL.items():
        (tmp_path / "roll" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "roll" / name).write_text(text)
    ran = ran_with(WITH_ROLL, tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_another_package_of_that_name_is_not_roll(tmp_path):
    """On PyPI there is one, of dice."""
    (tmp_path / "roll").mkdir()
    (tmp_path / "roll/__init__.py").write_text("")
    code = "from agentenv.interop import roll; print(roll.MathRuleRewardWorker.__mro__[2].__name__)"
    ran = ran_with(code, tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "LocalWorker\n", "")


ON_RAY = """
import sys, types
sys.path.insert(0, sys.argv[1])
import protos, ray
from ray import cloudpickle
from agentenv.interop import roll
from agentenv.interop.roll.dispatch import dispatched

cloudpickle.register_pickle_by_value(protos)
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
config = types.SimpleNamespace(tokenizer=protos.Tokenizer())
actor = ray.remote(num_cpus=0)(roll.MathRuleRewardWorker)
actors = [actor.remote(config) for _ in range(2)]
texts = ["#### 4", "#### 5", "9^{9^{9^9}}"]
data = protos.batch_of(["2+2"] * 3, texts, ground_truth=["4"] * 3, id=["0"] * 3, tag=["math"] * 3)
cls = roll.MathRuleRewardWorker
assert dispatched(actors, cls.initialize, None) == [None, None]
assert dispatched(actors, cls.compute_rewards, data).batch["scores"].tolist() == [1.0, 0.0, 0.0]
assert dispatched(actors, cls.compute_rewards, data[:1]).batch["scores"].tolist() == [1.0]
"""


@pytest.mark.slow
def test_workers_are_rays_actors():
    ran = ran_with(ON_RAY, arguments=[Path(__file__).parent])
    assert ran.returncode == 0, ran.stderr[-3000:]


REAL_ROLL = """
import json, sys
sys.path.insert(0, sys.argv[1])
from protos import Tokenizer, batch_of
from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import BIND_WORKER_METHOD_FLAG, Dispatch
from agentenv.interop import roll
from agentenv.interop.roll import RollRewards, data_parallel

assert issubclass(roll.MathRuleRewardWorker, Worker)
marks = getattr(roll.MathRuleRewardWorker.compute_rewards, BIND_WORKER_METHOD_FLAG)
assert marks["dispatch_mode"] is Dispatch.DP_MP_COMPUTE
columns = {"id": ["0", "0", "1"], "tag": ["gsm8k"] * 3, "ground_truth": ["4"] * 3, "domain": ["math"] * 3}
data = batch_of(["2+2"] * 3, ["#### 4", "#### 5", "#### 4"], proto=DataProto, **columns)
worker = RollRewards({"math": "math"}, Tokenizer(), tags={"math": ["gsm8k"]})
answer = data_parallel([worker] * 2, data)
assert type(answer) is DataProto
data.meta_info.pop("metrics", None)
whole = data.union(DataProto.from_dict({name: answer.batch[name] for name in answer.batch.keys()}))
by_domain = DataProto.concat([worker.compute_rewards(each) for each in data.group_by("id").values()])
assert by_domain.batch["scores"].shape == (3,)
print(json.dumps({
    "rewards": whole.batch["response_level_rewards"].tolist(),
    "types": sorted({str(answer.batch[name].dtype) for name in answer.batch.keys()}),
    "tokens": list(answer.batch["token_level_rewards"].shape) == list(data.batch["responses"].shape),
    "metrics": [len(value) for name, value in answer.meta_info["metrics"].items() if name == "rewards/num_invalid"],
}))
"""


@pytest.mark.slow
@pytest.mark.skipif("ROLL_SRC" not in os.environ, reason="ROLL is not on PyPI: set ROLL_SRC to a checkout of it")
def test_rolls_own_dataproto(tmp_path):
    """In a folder of its own: ROLL makes ./output."""
    ran = ran_with(REAL_ROLL, os.environ["ROLL_SRC"], arguments=[Path(__file__).parent], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    assert found == {"rewards": [1.0, 0.0, 1.0], "types": ["torch.float16"], "tokens": True, "metrics": [2]}
