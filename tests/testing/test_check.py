"""`agentenv check`: each breach of the contract is named with its place, what was expected and how to fix it."""

import builtins
import json
import re
import sys
import textwrap
from itertools import product
from pathlib import Path

import pytest

from agentenv.episode.registry import load_env
from agentenv.errors import ConfigError
from agentenv.testing.conformance.context import ConformanceOptions
from agentenv.testing.conformance.suite import make_context, run_suite
from tests.drivers import command
from tests.testing.contract_check import check

ROOT = Path(__file__).parents[2]

HEAD = """\
import asyncio
import math
import torch
from agentenv import AgentInstance, StepResult
END = StepResult(reward=1.0, score=1.0, terminated=True)
"""

# Each text is put under HEAD; `# HERE` stands in the line that the problem must name.
BREACHES = {
    "no step": (
        """
        class Agent(AgentInstance):  # HERE
            async def reset(self, states):
                return states
        """,
        "Agent.step", "a `step` method", "none", "Write `async def step(self, states)`.",
    ),
    "reward of a StepResult is NaN": (
        """
        class Agent(AgentInstance):
            async def step(self, states):
                return StepResult(reward=math.nan)  # HERE
        """,
        "Agent.step", "StepResult.reward: a finite number", "nan", "Raise InfraError if the value is unknown",
    ),
    "score above 1": (
        """
        class Agent(AgentInstance):
            async def step(self, states):  # HERE
                return StepResult(reward=1.0, score=7.0, terminated=True)
        """,
        "Agent.step", "a score in [0, 1]", "7.0", "Score quality and put the rest in the reward, or declare",
    ),
    "raises on an empty action": (
        """
        class Agent(AgentInstance):
            async def step(self, states):
                last = states["action_text"].split()[-1]  # HERE
                return StepResult(reward=float(last == "7"), terminated=True)
        """,
        "Agent.step", "no exception", "IndexError: list index out of range", "empty, cut off, or in any language",
    ),
    "raises in reset": (
        """
        class Agent(AgentInstance):
            async def reset(self, states):
                return {"observation": states["prompt"]}  # HERE
            async def step(self, states):
                return END
        """,
        "Agent.reset", "no exception", "KeyError: 'prompt'", "",
    ),
    "raises a ContractError of its own": (
        """
        from agentenv.errors import ContractError
        class Agent(AgentInstance):
            async def step(self, states):
                raise ContractError("nothing like our sentences")  # HERE
        """,
        "Agent.step", "no exception", "ContractError: nothing like our sentences", "It happens with every action.",
    ),
    "constructor raises": (
        """
        class Agent(AgentInstance):
            def __init__(self):
                self.table = {}["rows"]  # HERE
            async def step(self, states):
                return END
        """,
        "Agent.__init__", "no exception", "KeyError: 'rows'", "Fix it.",
    ),
}  # fmt: skip


def write(tmp_path, body, name="agent.py"):
    text = HEAD + textwrap.dedent(body)
    (tmp_path / name).write_text(text)
    return next((number for number, line in enumerate(text.splitlines(), 1) if "# HERE" in line), None)


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_named_with_its_place_what_was_expected_and_how_to_fix_it(breach, tmp_path, monkeypatch):
    body, where, expected, got, fix = BREACHES[breach]
    monkeypatch.chdir(tmp_path)
    line = write(tmp_path, body)
    problems = check("agent.py:Agent")
    assert [(p.file, p.line, p.where) for p in problems] == [("agent.py", line, where)]
    (problem,) = problems
    text = f"expected {problem.expected}, got {problem.got}"
    assert expected in text
    assert got in problem.got
    assert fix in problem.fix
    assert str(problem).startswith(f"agent.py:{line}: {where}: expected ")
    assert "\n" not in str(problem)


CLEAN = {
    "async": "async def step(self, states):\n        return END",
    "plain": "def step(self, states):\n        return END",
    "more arguments": "async def step(self, states, **kwargs):\n        return END",
    "truncates": "def step(self, states):\n        return StepResult(truncated=True)",
    "ends after five": (
        "turns = 0\n    async def step(self, states):\n        self.turns += 1\n"
        "        return END if self.turns == 5 else StepResult([{'role': 'user', 'content': 'no'}])"
    ),
    "OpenRLHF's dict": (
        "async def step(self, states):\n        return {'rewards': torch.tensor([1.0]), 'scores': torch.tensor([0.5]),"
        "\n            'environment_feedback': '', 'done': True, 'extra_logs': {'n': torch.tensor(1)}}"
    ),
    "a dict of numbers and text": (
        "async def step(self, states):\n        return {'rewards': 1.0, 'environment_feedback': '', 'done': True,"
        "\n            'extra_logs': {'said': 'x'}}"
    ),
}


@pytest.mark.parametrize(("base", "kind"), [*product([""], CLEAN), ("(AgentInstance)", "OpenRLHF's dict")])
def test_an_agent_without_a_breach_has_no_problem(kind, base, tmp_path):
    write(tmp_path, f"class Agent{base}:\n    {CLEAN[kind]}\n")
    assert check(f"{tmp_path / 'agent.py'}:Agent") == []


def test_two_breaches_are_two_problems_in_the_order_of_their_lines(tmp_path):
    write(
        tmp_path,
        """
        class Agent(AgentInstance):
            async def step(self, states):
                if not states["action_text"]:
                    raise ValueError("empty")
                return StepResult(score=3.0, terminated=True)
        """,
    )
    problems = check(f"{tmp_path / 'agent.py'}:Agent")
    assert [p.line for p in problems] == sorted(p.line for p in problems)
    assert {p.expected for p in problems} == {"no exception", "a score in [0, 1]"}


def test_an_error_in_a_helper_is_placed_where_the_agents_own_file_calls_it(tmp_path):
    write(
        tmp_path,
        """
        import json
        class Agent(AgentInstance):
            async def step(self, states):
                json.loads("{")
                return END
        """,
    )
    (problem,) = check(f"{tmp_path / 'agent.py'}:Agent")
    assert Path(problem.file).name == "agent.py"
    assert (tmp_path / "agent.py").read_text().splitlines()[problem.line - 1].strip() == 'json.loads("{")'


@pytest.mark.long
def test_prompt_label_and_arguments_reach_the_agent(tmp_path):
    write(
        tmp_path,
        """
        class Agent(AgentInstance):
            def __init__(self, word):
                self.word = word
            async def reset(self, states):
                assert states["observation"] == [{"role": "user", "content": "Say it."}]
                return states
            async def step(self, states):
                assert (states["label"], self.word) == (["a", 1], "go")
                return END
        """,
    )
    given = [f"{tmp_path / 'agent.py'}:Agent", "--env_kwargs", '{"word": "go"}', "--prompt", "Say it."]
    assert command(["check", *given, "--label", '["a", 1]']) == 0
    assert command(["check", *given, "--label", "a"]) == 1


def test_an_agent_that_lacks_an_argument_is_refused_before_it_is_run(tmp_path):
    write(tmp_path, "class Agent(AgentInstance):\n    def __init__(self, word): ...\n    def step(self, states): ...\n")
    with pytest.raises(ConfigError, match="missing a required argument: 'word'"):
        check(f"{tmp_path / 'agent.py'}:Agent")


# --- agent_func files ---------------------------------------------------------------------------------------------

AGENT_FUNC = """
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0
    async def reset(self, states, **kwargs):
        return {{"observation": states["observation"]}}
    async def step(self, states, **kwargs):  # HERE
        self.step_idx += 1
        return {{"rewards": {reward}, "scores": {reward}, "environment_feedback": " again ",
                "done": self.step_idx == 3, "sampling_params": states.get("sampling_params"),
                "extra_logs": {{"said": {said}}}}}

class AgentExecutor(AgentExecutorBase):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def test_an_openrlhf_file_that_keeps_the_contract_has_no_problem(tmp_path):
    write(tmp_path, AGENT_FUNC.format(reward="torch.tensor([1.0])", said="torch.tensor([1.0, 2.0])"))
    assert check(str(tmp_path / "agent.py")) == []


@pytest.mark.parametrize(
    ("reward", "said", "expected"),
    [("1.0", "1", "rewards with .item()"), ("torch.tensor(1.0)", "'46'", "numbers in extra_logs")],
)
def test_a_file_whose_rewards_or_logs_openrlhf_cannot_read_is_reported(reward, said, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = write(tmp_path, AGENT_FUNC.format(reward=reward, said=said))
    (problem,) = check("agent.py")
    assert (problem.file, problem.line, problem.where) == ("agent.py", line, "AgentInstance.step")
    assert expected in problem.expected


def test_the_dicts_of_an_agent_with_the_class_of_openrlhf_itself_are_judged_as_it_reads_them(tmp_path):
    step = "async def step(self, states):\n        return {'rewards': 1.0, 'environment_feedback': '', 'done': True}"
    write(tmp_path, f"class AgentInstanceBase: ...\n\n\nclass Agent(AgentInstanceBase):\n    {step}\n")
    (problem,) = check(f"{tmp_path / 'agent.py'}:Agent")
    assert "rewards with .item()" in problem.expected


def test_an_executor_that_names_no_agent_class_is_refused(tmp_path):
    write(
        tmp_path,
        """
        from openrlhf.utils.agent import AgentExecutorBase
        class AgentExecutor(AgentExecutorBase):
            async def execute(self, prompt, label, sampling_params):
                return {}
        """,
    )
    with pytest.raises(
        ConfigError, match=r"to call, got None\. A file that has only its own `execute` runs, with `agentenv"
    ):
        check(str(tmp_path / "agent.py"))


# --- the command --------------------------------------------------------------------------------------------------


def test_an_executor_whose_constructor_raises_is_refused_with_the_line(tmp_path):
    """A bug once: the command ended in a traceback."""
    file = tmp_path / "broken.py"
    file.write_text(
        "from agentenv.interop.openrlhf import AgentExecutor as Base\n\n\nclass AgentExecutor(Base):\n"
        "    def __init__(self):\n        self.nope\n"
    )
    with pytest.raises(ConfigError, match=r"a working AgentExecutor, got AttributeError: .*nope.* at .*broken\.py:6"):
        check(str(file))


def test_the_command_prints_a_line_per_problem_and_exits_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = write(tmp_path, BREACHES["score above 1"][0])
    assert command(["check", "agent.py:Agent", "--quick"]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"agent.py:{line}: Agent.step: expected a score in [0, 1], got 7.0.")
    assert last == "agent.py:Agent: 1 contract error"


def test_the_quick_command_prints_the_notes_that_it_counts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = "from agentenv import AgentExecutor as Base\nfrom agentenv_envs.math_retry import MathRetry\n\n\n"
    source += "class AgentExecutor(Base):\n    agent_cls = MathRetry\n    agent_kwrgs = {}\n"
    (tmp_path / "func.py").write_text(source)
    assert command(["check", "func.py", "--quick"]) == 0
    note, last = capsys.readouterr().out.splitlines()
    assert note.startswith("note: func.py:7: AgentExecutor.agent_kwrgs: expected an attribute that agentenv reads")
    assert last.startswith("func.py: no contract errors; 1 note")
    broken = source.replace("from agentenv_envs.math_retry import MathRetry", "from broken_of_note import MathRetry")
    (tmp_path / "broken_of_note.py").write_text(
        "from agentenv import AgentInstance\n\n\nclass MathRetry(AgentInstance):\n"
        "    def step(self, states):\n        return 1 / 0\n"
    )
    (tmp_path / "func2.py").write_text(broken)
    assert command(["check", "func2.py", "--quick"]) == 1, "a note does not replace the episodes"
    assert "got ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "max_turns = 2",
            "max_turns: expected an attribute that agentenv reads, got none. Set it in MathRetry or in "
            "`limits = agentenv.Limits(max_turns=…)`, for OpenRLHF.",
        ),
        (
            "score_range = (0, 2)",
            "score_range: expected an attribute that agentenv reads, got none. Set it in MathRetry.",
        ),
        ("max_turn = 2", "max_turn: expected an attribute that agentenv reads, got none. Did you mean 'max_turns'?"),
        (
            "limits = Limits(max_turns=2)",
            "limits: expected the same number of turns in OpenRLHF and here, got 2 there and 16 here. Set `max_turns` "
            "in MathRetry, or pass --max_turns to `run` and `train`, which do not read `limits`.",
        ),
        ("limits = Limits(max_turns=16)", None),
        ("rounds = 2", None),
        ("max_turns = 2\n    async def execute(self, *args): return self.max_turns", None),
    ],
)
def test_attributes_of_an_executor_that_have_no_effect_here_are_noted(tmp_path, line, told):
    file = tmp_path / "func.py"
    file.write_text(
        "from agentenv import AgentExecutor as Base, Limits\nfrom agentenv_envs.math_retry import MathRetry\n\n\n"
        f"class AgentExecutor(Base):\n    agent_cls = MathRetry\n    {line}\n"
    )
    context = make_context(ConformanceOptions(str(file)), lambda line: None)
    (outcome,) = run_suite(context, only=("contract",))
    assert [str(note).partition(": AgentExecutor.")[2] for note in outcome.notes] == [told] * (told is not None)


HANGS = {
    "awaits for ever": (
        "async def step(self, states):\n        return await self.deep()\n"
        "    async def deep(self):\n        await asyncio.sleep(3600)  # HERE",
        "step", "Set a deadline",
    ),
    "a plain method": (
        "def step(self, states):\n        never.wait(60)  # HERE", "step", "Set a deadline",
    ),
    "spins": (
        "async def step(self, states):\n        while not never.is_set(): pass  # HERE",
        "step", "or set a deadline for what a plain function waits for",
    ),
    "a constructor": (
        "def __init__(self):\n        never.wait(60)  # HERE\n    async def step(self, states):\n        return END",
        "__init__", "Move slow work to `reset`",
    ),
    "ignores being cancelled": (
        "num_steps = 0\n    async def step(self, states):\n        Agent.num_steps += 1\n"
        "        while not never.is_set():\n            try:\n                await asyncio.sleep(0.2)  # HERE\n"
        "            except asyncio.CancelledError:\n                pass",
        "step", "ignores cancellation",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", HANGS)
def test_a_call_that_hangs_is_named_with_its_line_and_the_check_ends(kind, tmp_path):
    body, method, fix = HANGS[kind]
    line = write(tmp_path, f"import threading\nnever = threading.Event()\nclass Agent(AgentInstance):\n    {body}\n")
    target = f"{tmp_path / 'agent.py'}:Agent"
    (problem,) = check(target, step_timeout_s=1.0)
    module = sys.modules[load_env(target).__module__]
    module.never.set()
    assert getattr(module.Agent, "num_steps", 1) == 1, "each further episode would hang as long"
    assert (problem.line, problem.where) == (line, f"Agent.{method}")
    assert problem.expected == "an answer within 1 s"
    assert problem.got == ("none after the action 'I do not know.'" if method == "step" else "none")
    assert fix in problem.fix


@pytest.mark.long
def test_an_import_that_hangs_is_an_error_with_its_line(tmp_path):
    write(tmp_path, "import builtins, threading\nbuiltins.agent_may_end = threading.Event()\nagent_may_end.wait(60)")
    with pytest.raises(ConfigError, match=r"expected an import within 1 s, got no end at line 8\. Move slow work"):
        check(str(tmp_path / "agent.py"), step_timeout_s=0.1)
    builtins.agent_may_end.set()
    del builtins.agent_may_end


@pytest.mark.long
def test_a_call_that_takes_long_is_reported_while_it_continues(tmp_path, monkeypatch):
    monkeypatch.setattr("agentenv.testing.conformance.call_watch.NOTIFY_CALL_EVERY_S", 0.2)
    write(
        tmp_path,
        """
        import threading
        class Agent(AgentInstance):
            told = threading.Event()
            def step(self, states):
                self.told.wait(60)
                return END
        """,
    )
    target, told = f"{tmp_path / 'agent.py'}:Agent", []

    def notify(line):
        told.append(line)
        if line.startswith("Agent.step"):
            load_env(target).told.set()

    assert check(target, notify=notify) == []
    (said, *_) = [line for line in told if line.startswith("Agent.step")]
    assert re.fullmatch(r"Agent\.step has been running for \d+ s at agent\.py:11; its limit is 30 s\.", said)


EXITS = {
    "async": "async def step(self, states):\n        sys.exit(3)  # HERE",
    "constructor": "def __init__(self):\n        sys.exit(3)  # HERE\n    async def step(self, states):\n        ...",
}


@pytest.mark.long
@pytest.mark.parametrize("kind", EXITS)
def test_a_call_of_sys_exit_is_named_as_one_with_its_line(kind, tmp_path):
    line = write(tmp_path, f"import sys\nclass Agent(AgentInstance):\n    {EXITS[kind]}\n")
    (problem,) = check(f"{tmp_path / 'agent.py'}:Agent")
    assert (problem.line, problem.got) == (line, "SystemExit(3)")
    assert "object at" not in str(problem)


def test_a_file_that_exits_during_import_is_refused_with_how_to_write_a_script(tmp_path, capsys):
    write(tmp_path, "import sys\nsys.exit(5)")
    assert command(["check", tmp_path / "agent.py"]) == 2
    said = capsys.readouterr().err
    assert 'got SystemExit: 5 (what calls sys.exit belongs under `if __name__ == "__main__":`)' in said


@pytest.mark.long
def test_output_of_the_agent_is_not_on_stdout(tmp_path, capsys):
    body = 'print("loading")\nclass Agent(AgentInstance):\n    def step(self, states):\n        print("noise")\n'
    write(tmp_path, body + "        return END\n")
    assert command(["check", f"{tmp_path / 'agent.py'}:Agent", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["problems"] == []
    assert "loading" in captured.err
    assert "noise" in captured.err


def test_the_time_limit_of_a_call_is_a_flag(tmp_path, capsys):
    write(tmp_path, "class Agent(AgentInstance):\n    async def step(self, states):\n        await asyncio.sleep(60)\n")
    target = f"{tmp_path / 'agent.py'}:Agent"
    assert command(["check", target, "--step_timeout_s", "0.2"]) == 1
    out = capsys.readouterr().out
    assert "expected an answer within 0.2 s, got none" in out
    assert "skipped 14 properties: fix `contract` first" in out, "no action is quick, and each would hang as long"
    assert command(["check", target, "--step_timeout_s", "0"]) == 2
    assert "--step_timeout_s: expected seconds > 0, got 0.0" in capsys.readouterr().err


def test_helpers_of_an_environment_that_are_named_as_other_contracts_methods_are_left_alone(tmp_path):
    write(
        tmp_path,
        """
        class Agent(AgentInstance):
            def run(self, text, twice):
                return text * twice
            async def step(self, states):
                assert self.run("a", 2) == "aa"
                return END
        """,
    )
    assert check(f"{tmp_path / 'agent.py'}:Agent") == []


def test_the_policy_of_a_check_also_says_the_label(tmp_path):
    write(
        tmp_path,
        """
        class Agent(AgentInstance):
            async def step(self, states):
                if states["action_text"] == states["label"]:
                    raise KeyError("the branch that rewards")
                return END
        """,
    )
    (problem,) = check(f"{tmp_path / 'agent.py'}:Agent", label="7")
    assert "the branch that rewards" in problem.got


# --- agents with a loop of their own --------------------------------------------------------------------------------

RUN_HEAD = """\
import httpx
from agentenv import StepResult

class Base:
    async def ask(self, context, **more):
        async with httpx.AsyncClient(timeout=30) as http:
            answer = await http.post(
                f"{context.base_url}/chat/completions", json={"messages": context.messages, **more}
            )
            answer.raise_for_status()
            return answer.json()["choices"][0]["message"]
"""
RUN_BREACHES = {
    "no context": ("async def run(self):  # HERE\n        return 1.0", "run", "a method that takes the context"),
    "no request": ("async def run(self, context):  # HERE\n        return 1.0", "run", "a chat completion or more"),
    "one answer breaks it": (
        "async def run(self, context):\n        answer = (await self.ask(context))['content']\n"
        "        return float(len(answer.split()[0]) > 0)  # HERE",
        "run", "no exception",
    ),
    "an unknown tool breaks it": (
        "async def run(self, context):\n"
        "        tool = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}\n"
        "        for call in (await self.ask(context, tools=[tool])).get('tool_calls', ()):\n"
        "            {'add': 1}[call['function']['name']]  # HERE\n"
        "        return 0.0",
        "run", "no exception",
    ),
}  # fmt: skip


def write_run(folder, body):
    text = f"{RUN_HEAD}\nclass Agent(Base):\n    {body}\n"
    (folder / "agent.py").write_text(text)
    return next((i for i, line in enumerate(text.splitlines(), 1) if "# HERE" in line), None)


@pytest.mark.long
@pytest.mark.parametrize("kind", RUN_BREACHES)
def test_a_breach_of_an_agent_with_its_own_loop_is_named_with_its_line(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body, method, expected = RUN_BREACHES[kind]
    line = write_run(tmp_path, body)
    (problem,) = check("agent.py:Agent")
    assert (problem.file, problem.line, problem.where) == ("agent.py", line, f"Agent.{method}")
    assert problem.expected == expected
    assert str(problem).count("expected") == 1


@pytest.mark.long
def test_an_agent_with_its_own_loop_that_hangs_is_named_once(tmp_path):
    run = "def run(self, context):\n        self.never.wait(60)  # HERE"
    line = write_run(tmp_path, f"import threading\n    never = threading.Event()\n    {run}")
    target = f"{tmp_path / 'agent.py'}:Agent"
    (problem,) = check(target, step_timeout_s=1.0)
    load_env(target).never.set()
    assert (problem.line, problem.expected) == (line, "an end within 2 s")


@pytest.mark.parametrize("name", ["code_sandbox", "guess_number"])
def test_an_environment_that_comes_with_data_is_tried_on_that(name, capsys):
    assert check(name, prompt="What is 6 times 7?", label="42") == []
