"""reasoning_gym: what an answer is worth, what a policy is told, what a row is, and hostile answers.

No dataset is generated here.
"""

import asyncio
import functools
import json
import socket
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentenv.episode.registry import load_env
from agentenv.errors import ConfigError, DataError, InfraError, MissingDependency
from agentenv.interop.agent_files import load_agent_func
from agentenv.rewards.types import Response, Status
from agentenv.rewards.workers.pool import WorkerFailed
from agentenv_envs.reasoning_gym import ReasoningGym, ReasoningGymReward, reward
from agentenv_envs.reasoning_gym.data_only import EXECUTED, refusal
from agentenv_envs.reasoning_gym.reward import INSTRUCTIONS, extract, oracle, wrapped

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="pip install 'agentenv-rl[reasoning-gym]'")


DATA = ReasoningGym.datasets["reasoning_gym"]


@functools.cache
def rows():
    return [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]


def items(dataset):
    return [json.loads(row["label"]) for row in rows() if row["dataset"] == dataset]


def item(dataset):
    return items(dataset)[0]


@functools.cache
def gold(dataset):
    """A response that earns the full score for `item(dataset)`."""
    return wrapped(oracle(item(dataset)))


async def judged(dataset, answer, *, entry=None, partial=False):
    """What an answer, in its tag, is worth."""
    text = answer if "<answer>" in answer else f"<answer>{answer}</answer>"
    return await ReasoningGymReward(partial_credit=partial).grade(Response(text, entry or item(dataset)))


def with_metadata(dataset, **metadata):
    """An item of which that is different."""
    return {**item(dataset), "metadata": {**item(dataset)["metadata"], **metadata}}


def states(action, label, *, prompt="", finish_reason="stop"):
    return {"action_text": action, "label": label, "observation_text": prompt, "finish_reason": finish_reason,
            "turn_index": 0, "metadata": {}, "seed": 0}  # fmt: skip


# --- where an answer is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "form", "answer"),
    [
        ("<answer>4</answer>", "auto", "4"),
        ("first <answer>3</answer>, no: <answer> 4 </answer>", "auto", "4"),
        ("<ANSWER>4</ANSWER><|im_end|>", "auto", "4"),
        ("<answer>4</answer> and <answer>5", "auto", "4"),
        (r"\boxed{3} <answer>4</answer>", "auto", "4"),
        (r"\boxed{3} <answer>4</answer>", "boxed", "3"),
        (r"\boxed{3} is wrong.", "auto", None),
        ("<answer>4</answer>. No, wait: <answer>5</answer> is wrong.", "auto", "4"),
        ("<answer>4</answer> is not the answer.", "auto", None),
        ("<answer>\n```json\n[1]\n```\n</answer>", "auto", "[1]"),
        ("<answer>\n  1 2\n3 4\n</answer>", "auto", "  1 2\n3 4"),
        ("<think><answer>4</answer></think>", "auto", None),
        ("The answer is 4.", "auto", None),
        ("", "auto", None),
    ],
)
def test_the_last_answer_that_is_closed_after_the_thought_is_the_one(text, form, answer):
    assert extract(text, form) == answer


def test_a_flood_of_tags_is_read_in_one_pass():
    assert extract("<answer>" * 50_000) is None
    assert extract("</answer>" * 50_000 + "<answer>4</answer>") == "4"


# --- what it is worth -----------------------------------------------------------------------------------------------


async def test_partial_credit_is_the_scorers_own_for_what_is_nearly_right():
    entry = item("sentence_reordering")
    words = entry["answer"].split()
    swapped = " ".join([words[1], words[0], *words[2:]])
    strict, lenient = [await judged("", swapped, entry=entry, partial=partial) for partial in (False, True)]
    assert (strict.reward, strict.score) == (0.0, 0.0)
    assert 0.2 < lenient.reward < 1.0
    assert strict.components["value"] == lenient.components["value"] == lenient.reward


async def test_one_expression_does_not_solve_every_puzzle24():
    hack = "6*4*1*1"
    assert all(sorted(entry["metadata"]["numbers"]) != [1, 1, 4, 6] for entry in items("puzzle24"))
    for answer in (hack, "(9*9*9+9)/30.7", "8*3*1*1"):
        assert (await judged("puzzle24", answer, partial=True)).reward < 1.0
    # 24.5, which the scorer rounds to 24
    assert (await judged("", "7*7/2*1", entry=with_metadata("puzzle24", numbers=[7, 7, 2, 1]))).reward == 0.0
    assert (await judged("", "6*4*1*1", entry=with_metadata("puzzle24", numbers=[6, 1, 4, 1]))).reward == 1.0


async def test_a_decimal_is_not_two_numbers_of_a_countdown():
    entry = with_metadata("countdown", numbers=[12, 5], target=12.5)
    assert (await judged("", "12.5", entry=entry)).status is Status.PARSE_ERROR


async def test_nought_is_not_every_probability_of_a_coin():
    entry = {**item("coin_flip"), "answer": "0.009521484375"}
    for answer in ("0", "0.", "0.00"):
        assert (await judged("", answer, entry=entry)).reward == 0.0
    for answer in ("0.0095", "39/4096", "0.009521"):
        assert (await judged("", answer, entry=entry)).reward == 1.0


@pytest.mark.parametrize("answer", ["nan", "NaN", "nan + nani", "nanj"])
async def test_an_invalid_number_is_not_every_complex_number(answer):
    assert (await judged("complex_arithmetic", answer, partial=True)).reward == 0.0


async def test_game_of_life_halting_needs_its_own_word():
    for answer, worth in (("True", 1.0), ("false", 0.0), ("anything", 0.0), ("0", 0.0)):
        entry = {**item("game_of_life_halting"), "answer": "True"}
        assert (await judged("", answer, entry=entry)).reward == worth


async def test_a_premise_said_again_is_not_a_conclusion():
    entry = item("propositional_logic")
    for premise in entry["metadata"]["premises"]:
        assert (await judged("", f"( {premise} )", entry=entry)).reward == 0.0


async def test_a_scorer_that_raises_on_an_answer_finds_it_wrong_and_does_not_crash():
    result = await judged("prime_factorization", "seven times eleven")
    assert (result.reward, result.status) == (0.0, Status.PARSE_ERROR)
    assert "ValueError" in result.detail
    steps = json.dumps([{"Agent[0.5]": "move(box_red, target_red)"}])
    assert (await judged("boxnet", steps)).status is Status.PARSE_ERROR


async def test_an_item_whose_own_answer_makes_its_scorer_raise_is_a_fault_of_the_data():
    entry = {**item("prime_factorization"), "answer": "no numbers"}
    with pytest.raises(DataError, match="label: expected an entry that its dataset can score, got ValueError"):
        await judged("", "seven", entry=entry)


async def test_an_item_is_graded_as_it_is_and_never_made_again():
    moved = with_metadata("word_ladder", source_index=12345)
    assert (await judged("", moved["answer"], entry=moved)).reward == 1.0


NO_DATASET = {"answer": "4", "metadata": {"source_dataset": "no"}}


@pytest.mark.parametrize(
    "label", [None, "42", "{", "[1]", {"answer": "4"}, {"answer": "4", "metadata": {}}, NO_DATASET]
)
async def test_a_label_that_is_not_an_item_is_a_fault_of_the_data(label):
    with pytest.raises(DataError, match="label: expected an"):
        await ReasoningGymReward().grade(Response("<answer>4</answer>", label))


# --- the environment ------------------------------------------------------------------------------------------------


async def test_a_question_that_stands_alone_gets_the_instruction_and_no_other_does():
    entry = item("chain_sum")
    alone = [{"role": "user", "content": entry["question"]}]
    told = (await ReasoningGym().reset({"observation": alone, "label": entry}))["observation"]
    assert told == [{"role": "user", "content": f"{entry['question']}\n\n{INSTRUCTIONS['auto']}"}]
    assert (await ReasoningGym().reset({"observation": told, "label": entry}))["observation"] == told
    assert (await ReasoningGym(instruction="").reset({"observation": alone, "label": entry}))["observation"] == alone
    assert (await ReasoningGym().reset({"observation": "<s>Q", "label": entry}))["observation"] == "<s>Q"
    assert rows()[0]["prompt"][0]["content"].endswith(INSTRUCTIONS["auto"])


async def test_feedback_reports_the_error_and_neither_the_answer_nor_how_near_it_was():
    entry = item("sentence_reordering")
    words = entry["answer"].split()
    near = " ".join([words[1], words[0], *words[2:]])
    env, said = ReasoningGym(4, partial_credit=True, retry_discount=0.5), []
    for action in ("no idea", f"<answer>{near}</answer>", "<answer>zzz</answer>"):
        result = await env.step(states(action, entry))
        assert (result.reward, result.done) == (0.0, False)
        said.append(result.observation[0]["content"])
    assert said[0] == f"No answer was found. {INSTRUCTIONS['auto']} 3 attempts left."
    assert said[1].replace("2 attempts", "1 attempt") == said[2]  # nearly right and all wrong sound the same
    assert not any(word in text for text in said for word in (entry["answer"], near))
    last = await env.step(states(gold("sentence_reordering"), entry))
    assert (last.reward, last.score, last.terminated, last.observation) == (0.125, 1.0, True, "")


async def test_info_has_the_figures_of_each_dataset():
    right = item("chain_sum")["answer"]
    first = await ReasoningGym().step(states(gold("chain_sum"), json.dumps(item("chain_sum"))))
    assert first.info == {
        "correct": 1.0, "chain_sum/correct": 1.0, "first_correct": 1.0, "value": 1.0, "attempts": 1.0, "no_answer": 0.0,
        "parse_error": 0.0, "timeout": 0.0, "dataset": "chain_sum", "status": "ok", "extracted": right,
    }  # fmt: skip
    assert (await ReasoningGym().step(states("", item("chain_sum")))).info["no_answer"] == 1.0


async def test_an_answer_that_was_cut_is_truncated_unless_it_is_right():
    cut = await ReasoningGym().step(states("<answer>1", item("chain_sum"), finish_reason="length"))
    assert (cut.truncated, cut.terminated, cut.reward) == (True, False, 0.0)
    whole = await ReasoningGym().step(states(gold("chain_sum") + " And", item("chain_sum"), finish_reason="length"))
    assert (whole.truncated, whole.terminated, whole.reward) == (False, True, 1.0)
    opened = states("so <answer>1</answer>", item("chain_sum"), prompt="Q<think>\n")
    assert (await ReasoningGym().step(opened)).info["no_answer"] == 1.0


@pytest.mark.parametrize(
    "kwargs",
    [{"max_attempts": 0}, {"max_attempts": True}, {"retry_discount": 2}, {"answer": "xml"}, {"cpu_limit_s": 0},
     {"max_answer_chars": "many"}],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(kwargs):
    with pytest.raises(ConfigError, match=rf"ReasoningGym.{next(iter(kwargs))}: expected "):
        ReasoningGym(**kwargs)


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(reward, "version", absent)
    reward.require_reasoning_gym.cache_clear()
    with pytest.raises(MissingDependency, match=r"pip install 'agentenv-rl\[reasoning-gym\]'"):
        ReasoningGym()


def test_it_is_found_by_name_and_as_an_openrlhf_file():
    assert load_env("reasoning-gym") is load_env("reasoning_gym") is ReasoningGym
    func = load_agent_func(ROOT / "agent_funcs/reasoning_gym.py")
    assert func.executor_cls.agent_cls is ReasoningGym


# --- the rows that ship ---------------------------------------------------------------------------------------------


def test_the_shipped_rows_are_two_of_each_dataset_with_their_license():
    names = [row["dataset"] for row in rows()]
    assert (len(set(names)), {names.count(name) for name in names}) == (105, {2})
    assert len({row["id"] for row in rows()}) == len({row["prompt"][0]["content"] for row in rows()}) == 210
    assert {row["source"] for row in rows()} == {"reasoning-gym 0.1.25 (Apache-2.0)"}


@pytest.mark.long
async def test_there_is_a_gold_answer_for_every_shipped_row_but_those_of_two_datasets():
    for row in rows():
        answer = oracle(json.loads(row["label"]))
        if row["dataset"] in ("boxnet", "rush_hour"):
            assert answer is None
            continue
        assert answer, row["id"]
        whole = extract(wrapped(answer)) == answer.strip("\r\n").rstrip()
        assert whole or row["dataset"] == "word_sorting", row["id"]


# --- answers that attack what grades them -----------------------------------------------------------------------------

PAYLOADS = (
    "__import__('pathlib').Path({path!r}).write_text('x')",
    "__import__('os').system('touch {path}')",
    "[open({path!r}, 'w')]",
    "[__import__('socket').create_connection(('127.0.0.1', {port}))]",
    "__import__('os')._exit(0)",
    "[1 for _ in iter(int, 1)]",
    "9**9**9**9",
    "[0]*(10**11)",
    "().__class__.__base__.__subclasses__()",
    "f'{{open({path!r}, chr(119))}}'",
    "oracle_answer",
    "-" * 900 + "1",
    "(" * 400 + "1" + ")" * 400,
    "9999999999!!!!",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("dataset", sorted(EXECUTED))
async def test_code_that_a_scorer_would_execute_does_nothing_hangs_nothing_and_earns_nothing(dataset, tmp_path):
    mark, reward = tmp_path / "mark", ReasoningGymReward(partial_credit=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        for payload in PAYLOADS:
            text = payload.format(path=str(mark), port=listening.getsockname()[1])
            async with asyncio.timeout(30):
                result = await reward.grade(Response(f"<answer>{text}</answer>", item(dataset)))
            assert (result.reward, result.status) == (0.0, Status.PARSE_ERROR), payload
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert not mark.exists()
    assert (await reward.grade(Response(gold(dataset), item(dataset)))).reward == 1.0


@pytest.mark.parametrize("dataset", sorted(EXECUTED))
def test_the_right_answer_of_each_of_the_nine_is_data(dataset):
    assert refusal(dataset, item(dataset)["answer"]) == ""


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [("simple_integration", "x**3/3 + sin(2*x)*exp(-x) + C"), ("intermediate_integration", "-x*cos(x)**2 + log(x)"),
     ("polynomial_multiplication", "3*x**4 - 2*x*y + 1"), ("countdown", "(3 + 4) * 5 - 6/2"),
     ("binary_matrix", "[[0, 1], [1, 2]]"), ("spiral_matrix", "[1, 2, 3]"), ("n_queens", "[['_', 'Q']]"),
     ("string_insertion", "['A', 'B']"), ("string_insertion", "ABCDA")],
)  # fmt: skip
def test_any_text_of_a_policy_is_data(dataset, answer):
    assert refusal(dataset, answer) == ""


@pytest.mark.parametrize(
    "answer",
    ["x**9**9**9", "(2**999)**999", "x**(10**9)", "x.diff", "N(x)", "sin(x, y)", "xy", "S('x')", "True", "1e400"],
)
def test_anything_but_school_mathematics_is_not_in_the_data(answer):
    assert refusal("simple_integration", answer)


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [("coin_flip", "1e9999999999"),
     pytest.param("rush_hour", "A+99999999999999", marks=pytest.mark.slow),  # the worker that is cut off loads anew
     pytest.param("rubiks_cube", "R9999999999", marks=pytest.mark.slow)],
)  # fmt: skip
async def test_an_answer_that_makes_a_scorer_hang_is_cut_off_and_the_next_one_is_graded(dataset, answer):
    reward = ReasoningGymReward(cpu_limit_s=0.3)
    result = await reward.grade(Response(f"<answer>{answer}</answer>", item(dataset)))
    assert (result.reward, result.status in (Status.TIMEOUT, Status.OK)) == (0.0, True)
    assert (await ReasoningGymReward().grade(Response(gold("coin_flip"), item("coin_flip")))).reward == 1.0


async def test_an_answer_without_end_is_not_scored():
    reward = ReasoningGymReward(max_answer_chars=100)
    result = await reward.grade(Response(f"<answer>{'1' * 101}</answer>", item("chain_sum")))
    assert (result.reward, result.status, len(result.extracted)) == (0.0, Status.PARSE_ERROR, 101)
    assert "101 characters; at most 100" in result.detail


async def test_a_worker_that_dies_is_a_failure_and_no_wrong_answer(monkeypatch):
    class Dead:
        async def run(self, request, **limits):
            raise WorkerFailed("a worker died during the check")

    monkeypatch.setattr("agentenv_envs.reasoning_gym.reward.shared_pool", Dead)
    env = ReasoningGym()
    with pytest.raises(InfraError, match=r"no grade .infra.: WorkerFailed: a worker died"):
        await env.step({"action_text": "<answer>1</answer>", "label": item("chain_sum")})
    assert env.num_attempts == 0
