"""code_sandbox: which program an action is, what an attempt is worth, what is said of it, and what is never said."""

import asyncio
import base64
import json
import pickle
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import pytest_asyncio

from agentenv.core.types import StopReason, Task
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.rules.code.extract import extract_code
from agentenv.rewards.rules.code.forms import code_task, example_text, form_of
from agentenv.rewards.rules.code.reward import HIDDEN_FAILED, INSTRUCTION
from agentenv.sandbox.local.sandbox import LocalSandbox
from agentenv.sandbox.types import SandboxUnavailable
from agentenv_envs.code_sandbox import CodeSandbox
from agentenv_envs.code_sandbox.problems import TASK_SET, answer, load_problems, reference_policy
from tests.envs.scripted import play
from tests.rewards.rules.broken_sandbox import BrokenSandbox

ROOT = Path(__file__).parents[2]
PROBLEMS = load_problems()
FENCE = "```"
ADD = {
    "entry_point": "add",
    "visible": [{"args": [1, 2], "expected": 3}],
    "hidden": [{"args": [2, 2], "expected": 4}, {"args": [-1, 1], "expected": 0}, {"args": [0, 5], "expected": 5}],
}
RIGHT = answer("def add(a, b):\n    return a + b\n")
HALF = answer("def add(a, b):\n    return max(a, 0) + b\n")  # passes all but hidden[1]
SWAPPED = answer("def add(a, b):\n    return a * b\n")  # passes hidden[0] only
BY_HEART = answer("def add(a, b):\n    return {(1, 2): 3}[a, b]\n")
PROMPT = [{"role": "user", "content": "Write add(a, b)."}]

MBPP_CLASS = {
    "code": "class Point:\n    def __init__(self, x):\n        self.x = x\n\n\n"
    "def far(p, q):\n    return abs(p.x - q.x)",
    "test_list": ["assert far(Point(1), Point(4)) == 3", "assert far(Point(0), Point(0)) == 0"],
    "test_imports": ["import math"],
}


one_loop = pytest.mark.asyncio(loop_scope="module")
"""Of all tests that share the sandbox."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox():
    async with LocalSandbox() as sandbox:
        yield sandbox


async def attempts(sandbox, *actions, label=ADD, **options):
    """The results of one instance's attempts, up to the last."""
    env, results = CodeSandbox(sandbox=sandbox, **options), []
    for action in actions:
        results.append(await env.step({"action_text": action, "label": label}))
        if results[-1].terminated:
            break
    return results


def said(result):
    return result.observation[0]["content"] if result.observation else ""


# --- the shipped tasks --------------------------------------------------------------------------------------------


@pytest.mark.long
@one_loop
async def test_every_reference_passes_in_an_episode_of_the_scripted_reference_policy(sandbox):
    source = EnvSource(CodeSandbox, {"sandbox": sandbox})
    tasks = [Task([{"role": "user", "content": each.prompt}], each.label, each.id) for each in PROBLEMS]
    trajectories = await asyncio.gather(*(play(source, task, reference_policy) for task in tasks))
    for trajectory in trajectories:
        told = (trajectory.task.task_id, trajectory.error, trajectory.turns and trajectory.turns[0].result.info)
        assert (trajectory.reward, trajectory.score, trajectory.stop_reason) == (1.0, 1.0, StopReason.TERMINATED), told
        assert trajectory.turns[0].result.info["tamper"] == 0.0, told


@one_loop
@pytest.mark.parametrize(
    "number", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
async def test_every_wrong_program_of_the_shipped_tasks_fails(sandbox, number):
    async def outcome(problem, code):
        (result,) = await attempts(sandbox, answer(code), label=problem.label, max_attempts=1, partial_credit=False)
        return problem.id, code, result.score

    programs = [(problem, code) for problem in PROBLEMS for code in problem.mutants[number::3]]
    outcomes = await asyncio.gather(*(outcome(problem, code) for problem, code in programs))
    assert [(name, code) for name, code, score in outcomes if score != 0.0] == []


def test_the_task_set_is_large_mixed_and_has_enough_tests():
    assert len(PROBLEMS) >= 44
    assert not re.search("reference|mutants", TASK_SET.read_text(encoding="utf-8"))
    assert len({problem.id for problem in PROBLEMS}) == len({problem.prompt for problem in PROBLEMS}) == len(PROBLEMS)
    assert 3 * sum(problem.label["mode"] == "stdio" for problem in PROBLEMS) >= len(PROBLEMS)
    for problem in PROBLEMS:
        tests = [*problem.label["visible"], *problem.label["hidden"]]
        assert len(problem.label["visible"]) >= 2, problem.id
        assert len(problem.label["hidden"]) >= 6, problem.id
        assert len(problem.mutants) >= 3, problem.id
        assert len({json.dumps(test) for test in tests}) == len(tests), problem.id


# --- which program an action is -----------------------------------------------------------------------------------

PROGRAM = "def f(x):\n    return x\n"
BLOCK = f"{FENCE}python\n{PROGRAM}{FENCE}"
EXAMPLE = f"    {FENCE}python\n    f(1)\n    {FENCE}\n"
DOCUMENTED = f'def f(x):\n    """Return x.\n\n{EXAMPLE}    """\n    return x\n'


@pytest.mark.parametrize(
    ("prompt", "action", "program"),
    [
        (f"{FENCE}python\n", f"a, *b = 1, 2\n{FENCE}\nDone.", "a, *b = 1, 2\n"),
        (f"{FENCE}python\ndef f(x):\n", f"    return x\n{FENCE}\nDone.", PROGRAM),
        (f"{FENCE}python\ndef f(x):\n", "    return x\n", PROGRAM),  # a stop string ended it
        ("~~~\n", f"{DOCUMENTED}~~~", DOCUMENTED),
        (f"{FENCE}python\n", BLOCK, PROGRAM),  # it begins again
        (f"{FENCE}python\nx = 1\n{FENCE}\n", BLOCK, PROGRAM),
        ("<think>\n", BLOCK, None),
        ("<think>\n", f"{FENCE}python\nx = 1\n{FENCE}</think>{BLOCK}", PROGRAM),
    ],
)
def test_a_program_begins_where_the_prompt_opened_its_block(prompt, action, program):
    rendered = f"Fix this:\n{FENCE}\nold(<|im_end|>\n<|im_start|>assistant\n{prompt}"
    assert extract_code(action, prompt=rendered) == program
    assert extract_code(action, prompt=[{"role": "assistant", "content": prompt}]) == program


async def test_a_program_in_a_thought_that_the_prompt_opened_and_a_limit_cut_is_no_program(sandbox):
    opened = {"observation_text": "Add.<|im_end|>\n<|im_start|>assistant\n<think>\n", "label": ADD}
    result = await CodeSandbox(sandbox=sandbox).step({"action_text": f"Perhaps\n{BLOCK}\nBut let me", **opened})
    assert (result.score, result.info["has_code"]) == (0.0, 0.0)


# --- what an attempt is worth -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "actions", "rewards", "score"),
    [
        ({}, [RIGHT], [1.0], 1.0),
        ({}, [SWAPPED, RIGHT], [0.0, 1.0], 1.0),
        ({}, [RIGHT.replace("+", "-"), SWAPPED, HALF], [0.0, 0.0, 2 / 3], 2 / 3),
        ({"max_attempts": 1}, [SWAPPED], [1 / 4], 1 / 4),
        ({"partial_credit": False}, [HALF, HALF, HALF], [0.0, 0.0, 0.0], 0.0),
        ({"partial_credit": False}, [HALF, RIGHT], [0.0, 1.0], 1.0),
        ({"attempt_discount": 0.5}, [HALF, HALF, RIGHT], [0.0, 0.0, 0.25], 1.0),
        ({"reward_at": "turn"}, [HALF, SWAPPED, RIGHT], [2 / 3, 0.0, 1 / 3], 1.0),
        ({"reward_at": "turn", "attempt_discount": 0.5}, [HALF, RIGHT], [2 / 3, 1 / 6], 1.0),
        ({"no_code_reward": -0.5}, ["No.", "No.", "No."], [0.0, 0.0, -0.5], 0.0),
        ({"no_code_reward": -0.5, "reward_at": "turn"}, ["No.", RIGHT], [-0.5, 1.0], 1.0),
    ],
)  # fmt: skip
@one_loop
async def test_rewards_of_attempts(sandbox, options, actions, rewards, score):
    results = await attempts(sandbox, *actions, **options)
    assert [result.reward for result in results] == pytest.approx(rewards)
    assert results[-1].score == pytest.approx(score)
    assert results[-1].terminated
    assert all(0.0 <= result.score <= 1.0 for result in results)


@one_loop
async def test_info_says_how_an_attempt_went(sandbox):
    half, nothing, right = await attempts(sandbox, HALF, "No.", RIGHT)
    assert half.info == {
        "correct": 0.0, "attempts": 1.0, "has_code": 1.0, "passed_share": pytest.approx(2 / 3), "tamper": 0.0,
        "first_correct": 0.0, "visible_share": 1.0, "hidden_share": pytest.approx(2 / 3), "tamper_signals": "",
        "verdicts": "failed=1 passed=3", "integrity": "outside", "isolation": sandbox.isolation.value,
    }  # fmt: skip
    assert (nothing.info["has_code"], nothing.info["passed_share"]) == (0.0, 0.0)
    assert (right.info["correct"], right.info["attempts"]) == (1.0, 3.0)
    assert "first_correct" not in right.info


@one_loop
async def test_a_program_that_leaves_before_its_result_passes_nothing_and_is_noted(sandbox):
    later = "def add(a, b):\n    import os\n    return a + b if a == 1 else os._exit(0)\n"
    (result,) = await attempts(sandbox, answer(later), max_attempts=1)
    assert (result.info["visible_share"], result.score) == (1.0, 0.0)
    assert (result.info["tamper"], result.info["tamper_signals"]) == (1.0, "early_exit")


@one_loop
async def test_a_limit_that_ends_the_episode_pays_the_last_attempt(sandbox):
    task = Task(PROMPT, ADD, "add")
    cut = await play(EnvSource(CodeSandbox, {"sandbox": sandbox}), task, [BY_HEART, HALF], max_turns=2)
    share = pytest.approx(2 / 3)
    assert (cut.stop_reason, cut.reward, cut.score) == (StopReason.MAX_TURNS, share, share)
    by_turn = EnvSource(CodeSandbox, {"sandbox": sandbox, "reward_at": "turn"})
    assert (await play(by_turn, task, [BY_HEART, HALF], max_turns=2)).reward == pytest.approx(2 / 3)


async def test_a_failed_sandbox_returns_no_reward():
    with pytest.raises(InfraError, match="no memory for another process"):
        await attempts(BrokenSandbox(), RIGHT)
    trajectory = await play(EnvSource(CodeSandbox, {"sandbox": BrokenSandbox()}), Task(PROMPT, ADD, "add"), [RIGHT])
    assert (trajectory.stop_reason, trajectory.reward, trajectory.score) == (StopReason.ERROR, None, None)


@pytest.mark.long
@one_loop
async def test_the_feedback_for_a_slow_program_names_the_limit(sandbox):
    slow = answer("def add(a, b):\n    while True:\n        pass\n")
    result, *_ = await attempts(sandbox, slow, limits={"cpu_s": 1})
    assert (result.score, result.info["verdicts"]) == (0.0, "skipped=3 timeout=1")
    assert "cpu_s = 1" in said(result)


@one_loop
async def test_hidden_tests_are_not_run_where_the_outcome_is_known_before(sandbox):
    broken, *_ = await attempts(sandbox, answer("def add(a, b)\n"))
    assert (broken.score, broken.info["verdicts"]) == (0.0, "error=1 skipped=3")
    assert "SyntaxError" in said(broken)
    wrong, *_ = await attempts(sandbox, SWAPPED, partial_credit=False)
    assert (wrong.score, wrong.info["verdicts"]) == (0.0, "failed=1 skipped=3")
    wrong, *_ = await attempts(sandbox, SWAPPED)
    assert "skipped" not in wrong.info["verdicts"]
    assert "hidden" not in said(wrong)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"max_attempts": 0}, "max_attempts"), ({"max_attempts": True}, "max_attempts"),
     ({"reward_at": "always"}, "reward_at"), ({"limits": {"seconds": 1}}, "limits")],
)  # fmt: skip
def test_rules_that_make_no_sense_are_refused(options, named):
    with pytest.raises(ConfigError, match=rf"CodeSandbox\.{named}: expected"):
        CodeSandbox(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"colour": "red"}, "sandbox local: expected options among"),
     ({"min_isolation": "glass"}, r"LocalSandbox\.min_isolation: expected one of"),
     ({"backend": "sandbox_fusoin"}, "sandbox: expected one of local, .* Did you mean 'sandbox_fusion'")],
)  # fmt: skip
async def test_options_that_no_sandbox_has_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        await CodeSandbox(sandbox=options).reset({"observation": PROMPT, "label": ADD})


async def test_a_sandbox_elsewhere_that_is_down_is_infrastructure_and_one_that_cannot_be_here_is_not():
    down = {"backend": "sandbox_fusion", "endpoints": ["http://127.0.0.1:9"]}
    with pytest.raises(InfraError, match=r"sandbox: sandbox_fusion: expected an endpoint that answers"):
        await CodeSandbox(sandbox=down).reset({"observation": PROMPT, "label": ADD})
    with pytest.raises(SandboxUnavailable, match="expected isolation 'remote'"):
        await CodeSandbox(sandbox={"isolation": "remote"}).reset({"observation": PROMPT, "label": ADD})


# --- what is said -------------------------------------------------------------------------------------------------


@one_loop
async def test_if_all_visible_tests_pass_feedback_says_only_that_hidden_ones_failed(sandbox):
    result, *_ = await attempts(sandbox, HALF)
    assert said(result) == f"{HIDDEN_FAILED}\n\n2 attempts left."


# --- the prompt ---------------------------------------------------------------------------------------------------


@one_loop
async def test_examples_and_the_instruction_go_under_the_question_and_the_task_is_not_changed(sandbox):
    states = await CodeSandbox(sandbox=sandbox).reset({"observation": PROMPT, "label": ADD})
    wanted = f"Write add(a, b).\n\nExamples:\nadd(1, 2) == 3\n\n{INSTRUCTION}"
    assert states["observation"] == [{"role": "user", "content": wanted}]
    assert PROMPT[0]["content"] == "Write add(a, b)."
    bare = await CodeSandbox(sandbox=sandbox, instruction="").reset({"observation": PROMPT, "label": ADD})
    assert bare["observation"][0]["content"].endswith("add(1, 2) == 3")


@one_loop
async def test_no_prompt_of_a_shipped_task_shows_a_hidden_test(sandbox):
    for problem in PROBLEMS:
        observation = [{"role": "user", "content": problem.prompt}]
        states = await CodeSandbox(sandbox=sandbox).reset({"observation": observation, "label": problem.label})
        text = states["observation"][0]["content"]
        assert text.count("\nInput:\n") + text.count(") == ") >= len(problem.label["visible"]), problem.id
        for test in code_task(problem.label).suite.hidden:
            assert example_text(problem.label.get("entry_point", ""), test) not in text, problem.id


# --- rows of datasets ---------------------------------------------------------------------------------------------

HUMAN_EVAL = {
    "prompt": 'import math\nfrom typing import List\n\n\ndef root(n: int) -> int:\n    return math.isqrt(n)\n\n\n'
    'def tops(n: int, step: int = 1) -> List[int]:\n    """Whole roots from n downwards."""\n',
    "entry_point": "tops",
    "test": "METADATA = {'author': 'us'}\n\n\ndef check(candidate):\n    base = 9\n"
    "    assert candidate(base) == [3, 2, 1]\n    assert candidate(0) == []\n"
    "    for n in (4, 5):\n        assert candidate(n) == [2, 1], n\n    assert root(16) == 4\n",
    "canonical_solution": "    return list(range(root(n), 0, -step))\n",
}  # fmt: skip
MBPP = {
    "text": "Write a function to say whether three numbers are sides of a triangle.",
    "code": "def triangle(a, b, c):\n    a, b, c = sorted((a, b, c))\n    return a + b > c",
    "test_list": ["assert triangle(3, 4, 5) is True", "assert triangle(1, 2, 3) is False",
                  "assert not triangle(9, 1, 1)"],
    "challenge_test_list": ["assert set([triangle(2, 2, 2)]) == {True}"],
    "test_setup_code": "",
}  # fmt: skip
APPS_STDIO = {
    "question": "Double it.",
    "input_output": json.dumps({"inputs": ["2\n", ["1", "7"]], "outputs": ["4\n", ["2", "14"]]}),
    "starter_code": "",
}
APPS_CALL = {
    "input_output": json.dumps({"fn_name": "twice", "inputs": [[2], [[1]]], "outputs": [[4], [[1, 1]]]}),
    "starter_code": "class Solution:\n    def twice(self, x: int) -> int:\n        ",
}


def packed(tests):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


LCB_STDIO = {
    "question_content": "Double it.",
    "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
    "private_test_cases": packed([{"input": "3\n0\n", "output": "6\n0\n", "testtype": "stdin"}]),
    "starter_code": "",
    "metadata": "{}",
}
LCB_CALL = {
    "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": "[]\n0", "output": "[0]", "testtype": "functional"}]),
    "starter_code": "class Solution:\n    def push(self, items: List[int], item: int) -> List[int]:\n        ",
    "metadata": json.dumps({"func_name": "push"}),
}
PLAIN_ASSERTS = {"entry_point": "inc", "tests": ["assert inc(1) == 2", "assert inc(-1) == 0", "assert inc(0) == 1"]}
PLAIN_STDIO = {"visible": [{"stdin": "a", "stdout": "A"}], "hidden": [{"stdin": "", "stdout": ""}]}
DOUBLE = "import sys\nfor line in sys.stdin:\n    print({} * int(line))\n"
TWICE = "class Solution:\n    def twice(self, x):\n        return {} * x if isinstance(x, int) else x + x\n"
PUSH = "class Solution:\n    def push(self, items: List[int], item):\n        return tuple(items) + ({},)\n"
TOPS = "def tops(n: int, step: int = 1) -> List[int]:\n    return list(range(root(n), {}, -step))\n"
INC = "def inc(n):\n    return {}\n"
UPPER = "import sys\nprint(sys.stdin.read().upper())\n"
ROWS = {
    "humaneval": (HUMAN_EVAL, "humaneval", (0, 3), TOPS.format(0), (TOPS.format(1), 1 / 3)),
    "mbpp": (MBPP, "mbpp", (1, 3), MBPP["code"] + "\n", (MBPP["code"].replace(">", ">="), 2 / 3)),
    "apps stdio": (APPS_STDIO, "apps", (1, 1), DOUBLE.format(2), (DOUBLE.format(3), 0)),
    "apps call": (APPS_CALL, "apps", (1, 1), TWICE.format(2), (TWICE.format(3), 1 / 2)),
    "livecodebench stdin": (LCB_STDIO, "livecodebench", (1, 1), DOUBLE.format(2), (DOUBLE.format(3), 0)),
    "livecodebench call": (LCB_CALL, "livecodebench", (1, 1), PUSH.format("item"), (PUSH.format("item + 1"), 0)),
    "plain asserts": (PLAIN_ASSERTS, "plain", (1, 2), INC.format("n + 1"), (INC.format("1"), 1 / 3)),
    "plain stdio": (PLAIN_STDIO, "plain", (1, 1), UPPER, ("print()\n", 1 / 2)),
}


@pytest.mark.parametrize("name", ROWS)
@one_loop
async def test_rows_of_known_datasets_are_graded_also_by_a_label_that_holds_the_row(sandbox, name):
    row, form, counts, right, (wrong, share) = ROWS[name]
    metadata = {key: value for key, value in row.items() if key != "prompt"}
    assert form_of(metadata) == form
    for task in (code_task(None, row), code_task(row), code_task(json.dumps(row), {"prompt": "Do it."})):
        assert (task.form, len(task.suite.visible), len(task.suite.hidden)) == (form, *counts)
    prompt = [{"role": "user", "content": row.get("prompt", "Do it.")}]
    for code, score in ((right, 1.0), (wrong, share)):
        env = CodeSandbox(1, sandbox=sandbox)
        states = {"label": None, "metadata": metadata}
        shown = (await env.reset({**states, "observation": prompt}))["observation"][0]["content"]
        assert row.get("starter_code", "").strip() in shown
        result = await env.step({**states, "action_text": answer(code), "observation_text": ""})
        assert result.score == pytest.approx(score), (result.info, said(result))


class _Imports:
    def __reduce__(self):
        return (print, ("it ran",))


UNREADABLE = {
    "no entry point": ({"hidden": [{"args": [1], "expected": 1}]}, "entry_point"),
    "broken JSON": ({"input_output": '{"inputs": ['}, "input_output: expected JSON"),
    "packed tests that import": ({**LCB_STDIO, "private_test_cases": base64.b64encode(
        zlib.compress(pickle.dumps(_Imports()))).decode()}, "a pickle with STACK_GLOBAL"),
    "packed tests that are cut": (
        {**LCB_STDIO, "private_test_cases": LCB_STDIO["private_test_cases"][:40]}, "unpacked"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_row_that_cannot_be_read_is_the_datas_error_and_says_why(case, capsys):
    label, reason = UNREADABLE[case]
    with pytest.raises(DataError, match="code_task") as caught:
        code_task(label)
    assert reason in str(caught.value)
    assert capsys.readouterr().out == ""


# --- as others see it ---------------------------------------------------------------------------------------------


SHARED = """
import asyncio, os
from pathlib import Path
from agentenv_envs.code_sandbox import CodeSandbox
from agentenv.rewards.rules.code.reward import shared_sandbox, shared_sandbox

LABEL = {"entry_point": "f", "hidden": [{"args": [], "expected": 1}]}
def children():
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]

async def main():
    boxes = {id(each) for each in await asyncio.gather(*(shared_sandbox() for _ in range(5)))}
    action = {"action_text": "```python\\ndef f():\\n    return 1\\n```", "label": LABEL}
    results = await asyncio.gather(*(CodeSandbox().step(action) for _ in range(6)))
    return len(boxes), [result.score for result in results], len(children())

for _ in range(2):
    num, scores, alive = asyncio.run(main())
    assert num == 1 and scores == [1.0] * 6, (num, scores)
    assert alive >= 1 and not children(), (alive, children())
print("done")
"""


@pytest.mark.long
def test_all_instances_of_a_process_share_a_sandbox_which_ends_with_the_event_loop():
    ended = subprocess.run([sys.executable, "-W", "error", "-c", SHARED], capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.stderr) == ("done\n", "")
