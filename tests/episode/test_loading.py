"""From a name to a thing: environments, agent_func files, and what is said where there is none."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Limits, Task
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.endpoint.agent import ChatAgentSource
from agentenv.episode.registry import env_source, installed_envs, load_env, load_file
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.episode.source import EnvSource, as_agent
from agentenv.episode.tasks import TaskSource
from agentenv.errors import ConfigError
from agentenv.interop.agent_files import load_agent_func, load_func_agent
from agentenv.testing.tokenizers import CharTokenizer
from agentenv_envs.math_retry import MathRetry
from tests.models import make_tiny_qwen2

ROOT = Path(__file__).parents[2]
ENV = """
from agentenv import AgentInstance, StepResult

class {name}(AgentInstance):
    async def step(self, states):
        return StepResult(reward=1.0, terminated=True)
"""


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


async def episode(source, prompt="Q", label="7", actions=("7",)):
    tokenizer = CharTokenizer()
    return await source.run(
        Task(prompt, label),
        EpisodeSetup(ScriptedEngine(actions, tokenizer), Chat(tokenizer), limits=Limits(max_length=1_000, max_turns=4)),
        EpisodeKey("t/0", "t"),
    )


# --- environments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["math_retry", "math-retry", "agentenv_envs.math_retry:MathRetry"])
def test_an_installed_environment_is_found_by_its_name_with_either_dash_and_by_its_module(name):
    assert load_env(name) is MathRetry


@pytest.mark.parametrize("before", ["", "from agentenv_envs.math_retry import MathRetry\n"], ids=["alone", "imports"])
def test_an_environment_is_found_in_a_file_with_and_without_its_class(tmp_path, before):
    path = write(tmp_path / "guess.py", before + ENV.format(name="Guess"))
    assert load_env(str(path)).__name__ == "Guess"
    assert load_env(f"{path}:Guess") is load_env(str(path))


def test_generated_classes_are_named_as_in_their_file(tmp_path):
    path = write(
        tmp_path / "games.py",
        "from agentenv.gym.from_gymnasium import from_gymnasium\n"
        "Lake = from_gymnasium('FrozenLake-v1')\nCliff = from_gymnasium('CliffWalking-v1')\n",
    )
    with pytest.raises(ConfigError, match=rf"\['Lake', 'Cliff'\]. Write {path}:ClassName"):
        load_env(str(path))
    assert load_env(f"{path}:Lake").__name__ == "FrozenLakeV1"


@pytest.mark.parametrize("attribute", ["", "helper", "CONSTANT", "NoStep"])
def test_input_that_is_not_a_class_with_a_step_is_refused(tmp_path, attribute):
    path = write(tmp_path / "things.py", "def helper(): ...\nCONSTANT = 3\nclass NoStep: ...\n")
    with pytest.raises(ConfigError, match="a class with a `step` method" if attribute else "one AgentInstance in"):
        load_env(f"{path}:{attribute}" if attribute else str(path))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("math_rety", "Did you mean 'math_retry'?"),
        ("MathRetry", "Did you mean 'math_retry'?"),
        ("mix.yaml", "got 'mix.yaml'. Name one environment: only `run` and `train` take files of several."),
        ("zzzzzz", "`agentenv list` shows what is installed."),
        ("no_such_module:Env", "ModuleNotFoundError: No module named 'no_such_module'. Install it or fix PYTHONPATH."),
        ("agentenv_envs.math_retry:Nope", "to name a class, got no 'Nope' there. Check the name."),
        (":Env", "expected to import the module ''"),
        ("missing/file.py:Env", "expected an existing .py file, got none at /"),
        ("math_retry:abc", "expected math_retry, or math_retry:NUMBER in a mixture, got 'math_retry:abc'."),
        ("math_retry:0.5", "expected math_retry, or math_retry:NUMBER in a mixture, got 'math_retry:0.5'."),
        (
            "",
            "environment: expected an installed one (code_sandbox, guess_number, gymnasium_text, math_retry, "
            "reasoning_gym, rm_chat, tool_use, verify), module:Attr, path/file.py[:Attr] or KIND:NAME with a KIND of "
            "gem, inspect, openenv, textarena, textworld, verifiers,",
        ),
    ],
)
def test_a_name_that_means_nothing_is_one_line_with_what_may_have_been_meant(spec, message):
    with pytest.raises(ConfigError) as error:
        load_env(spec)
    assert message in str(error.value)


def test_the_folder_of_a_package_that_is_not_installed_is_to_be_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "math_rety/pyproject.toml", "")
    with pytest.raises(ConfigError, match=r"got 'math_rety'. Install the folder: pip install -e math_rety. `agentenv"):
        load_env("math_rety")


def test_wrong_constructor_arguments_are_refused_before_any_episode_with_those_it_takes():
    with pytest.raises(ConfigError, match=r"^env_kwargs: .*'max_attempts'.*max_atempts"):
        EnvSource(MathRetry, {"max_atempts": 3})


# --- packages of others, in a process of their own -----------------------------------------------------------------


def offer(site, package, name, value):
    """A distribution that offers an environment, as pip would leave it."""
    info = site / f"{package}-1.0.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    write(info / "entry_points.txt", f"[agentenv.envs]\n{name} = {value}\n")


def python(code, *paths, **env):
    path = os.pathsep.join(map(str, [*paths, ROOT, ROOT / "envs"]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path, **env}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOAD = """
from agentenv.errors import ConfigError
from agentenv.episode.registry import load_env
try:
    print(load_env({spec!r}).__module__)
except ConfigError as error:
    print(error)
"""


def test_one_name_but_for_the_dash_offered_by_two_packages_is_an_error_that_names_both(tmp_path):
    for package, name in (("first-pack", "mini-game"), ("second-pack", "mini_game")):
        module = package.replace("-", "_")
        write(tmp_path / f"{module}.py", ENV.format(name="Game"))
        offer(tmp_path, package, name, f"{module}:Game")
    said = python(LOAD.format(spec="mini_game"), tmp_path)
    assert "expected one package to offer it" in said
    assert "first-pack (first_pack:Game)" in said
    assert "second-pack (second_pack:Game)" in said
    assert python(LOAD.format(spec="math_retry"), tmp_path).startswith("agentenv_envs")
    listed = python("from agentenv.cli.list import catalog; print(*(r['origin'] for r in catalog()))", tmp_path)
    assert "first-pack (first_pack:Game) second-pack (second_pack:Game)" in listed


@pytest.mark.long
def test_one_name_of_data_offered_by_two_environments_is_an_error_for_that_name_that_names_both(tmp_path):
    write(tmp_path / "clash_pack.py", ENV.format(name="Game") + "    datasets = {'word-problems': '/theirs.jsonl'}\n")
    offer(tmp_path, "clash-pack", "zclash", "clash_pack:Game")
    read = """
        from agentenv.errors import ConfigError
        from agentenv.episode.tasks import TaskSource
        for data in ("word_problems", "word_problems_train"):
            try:
                print(len(TaskSource(data).read({}, limit=1)))
            except ConfigError as error:
                print(error)
        from agentenv.cli.list import catalog
        print([r["origin"] for r in catalog() if r["name"] == "word_problems"])
    """
    refused, *read, listed = python(read, tmp_path).splitlines()
    assert refused.startswith("data 'word_problems': expected one environment to offer it, got ")
    assert "/word_problems.jsonl and /theirs.jsonl. Name the file" in refused
    assert read == ["1"]
    assert "/theirs.jsonl" in listed
    assert "/word_problems.jsonl" in listed


@pytest.mark.long
def test_data_whose_file_is_missing_affects_no_other_and_is_named_with_its_path(tmp_path):
    missing = tmp_path / "gone.jsonl"
    write(tmp_path / "bare_pack.py", ENV.format(name="Game") + f"    datasets = {{'bare': {str(missing)!r}}}\n")
    offer(tmp_path, "bare-pack", "bare", "bare_pack:Game")
    listed = python("from agentenv.cli.list import catalog; print(*(r['summary'] for r in catalog()))", tmp_path)
    assert "cannot be read: No such file or directory" in listed
    assert "200 tasks" in listed
    with pytest.raises(ConfigError, match=f"^bare: expected a file, got none at {missing}"):
        TaskSource().read({"bare": missing})


def test_a_package_that_is_installed_meanwhile_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    os.utime(tmp_path, ns=(0, 0))
    assert "late_game" not in installed_envs()
    offer(tmp_path, "late-pack", "late-game", "late_pack:Game")
    assert installed_envs()["late_game"].distribution == "late-pack"


@pytest.mark.long
def test_the_same_package_found_twice_is_not_a_collision(tmp_path):
    for site in ("a", "b"):
        write(tmp_path / site / "pack.py", ENV.format(name="Game"))
        offer(tmp_path / site, "pack", "mini", "pack:Game")
    assert python(LOAD.format(spec="mini"), tmp_path / "a", tmp_path / "b") == "pack"


@pytest.mark.long
@pytest.mark.parametrize("fault", ["1 +", "exit(3)"])
def test_a_broken_package_does_not_affect_others_and_is_listed_as_broken(tmp_path, fault):
    write(tmp_path / "broken_pack.py", fault + "\n")
    offer(tmp_path, "broken-pack", "broken_env", "broken_pack:Game")
    assert python(LOAD.format(spec="math_retry"), tmp_path).startswith("agentenv_envs")
    assert (
        python("from agentenv.episode.registry import builtin_datasets as b; print(*b())", tmp_path)
        == "code_sandbox guess_number gymnasium_text frozen_lake frozen_lake_slippery cliff_walking taxi blackjack "
        "word_problems word_problems_train reasoning_gym rm_chat_prompts rm_chat_pairs tool_use verify_mixed"
    )
    said = python(LOAD.format(spec="broken_env"), tmp_path)
    assert "expected to import the module 'broken_pack'" in said
    assert f"({tmp_path}/broken_pack.py:1). Fix it, or install what it imports." in said
    listed = python("from agentenv.cli.list import catalog; print([r['summary'] for r in catalog()])", tmp_path)
    assert "cannot be imported" in listed


# --- files --------------------------------------------------------------------------------------------------------


def test_a_file_may_import_its_neighbor_and_hides_no_module_of_others(tmp_path):
    write(tmp_path / "site/installed_for_loading.py", "VALUE = 'installed'\n")
    sys.path.insert(0, str(tmp_path / "site"))
    write(tmp_path / "own/installed_for_loading.py", "VALUE = 'hidden by accident'\n")
    write(tmp_path / "own/neighbor_of_loading.py", "VALUE = 'neighbor'\n")
    text = "import installed_for_loading, neighbor_of_loading\n"
    module = load_file(write(tmp_path / "own/file.py", text))
    assert module.neighbor_of_loading.VALUE == "neighbor"
    assert module.installed_for_loading.VALUE == "installed"


def test_a_file_with_a_reward_func_and_no_environment_is_told_how_to_try_and_serve_it(tmp_path):
    path = write(tmp_path / "scored.py", "def reward_func(queries, prompts, labels):\n    return [1.0]\n")
    with pytest.raises(ConfigError, match=rf"--reward_func_path {path} --data DATA` .* `agentenv rm serve {path}`"):
        load_env(str(path))


def test_a_file_is_imported_once_and_two_files_of_one_name_are_two_modules(tmp_path):
    text = "from pathlib import Path\nwith open(Path(__file__).with_suffix('.log'), 'a') as log:\n    log.write('x')\n"
    paths = [write(tmp_path / folder / "same.py", text) for folder in "ab"]
    assert load_file(paths[0]) is load_file(str(paths[0]))
    assert load_file(paths[1]) is not load_file(paths[0])
    assert [path.with_suffix(".log").read_text() for path in paths] == ["x", "x"]


def test_a_file_for_a_trainer_that_is_named_as_an_environment_is_told_the_flag_for_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openrlhf", None)  # not installed
    with pytest.raises(ConfigError, match=r"got ModuleNotFoundError: .*\. Name it as agent_func_path, not as env\."):
        load_env(str(write(tmp_path / "func.py", "import openrlhf.utils.agent\n")))
    monkeypatch.delitem(sys.modules, "openrlhf")
    for package, name in (("openrlhf", "openrlhf.utils.agents"), ("molt", "molt.agent")):
        path = write(tmp_path / f"{package}_typo.py", f"from {name} import AgentExecutorBase\n")
        with pytest.raises(
            ConfigError, match=f"No module named '{name}'. agentenv stands in for openrlhf.utils.agent "
        ):
            load_agent_func(path)


@pytest.mark.parametrize("load", [load_file, load_agent_func, lambda path: load_env(f"{path}:X")])
@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("x = 1\n\ndef broken(:\n", 3, "SyntaxError"),
        ("def f():\n    return {}['gone']\n\n\nf()\n", 2, "KeyError: 'gone'"),
        ("import sys\nsys.exit('no')\n", 2, "SystemExit: no"),
        ("import not_installed_anywhere\n", 1, "No module named 'not_installed_anywhere'"),
    ],
)
def test_a_file_that_cannot_be_imported_is_reported_with_file_and_line(tmp_path, load, text, line, told):
    path = write(tmp_path / "broken.py", text)
    for _ in range(2):  # nothing half imported is kept
        with pytest.raises(ConfigError) as error:
            load(path)
        assert str(error.value).startswith(f"{path}:{line}: ")
        assert told in str(error.value)


@pytest.mark.parametrize("name", ["missing.py", "folder", "text.txt"])
def test_input_that_is_not_a_python_file_is_refused(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").touch()
    with pytest.raises(ConfigError, match=r"expected an existing \.py file"):
        load_agent_func(tmp_path / name)


# --- agent_func ---------------------------------------------------------------------------------------------------

AGENT_FUNC = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from openrlhf.utils.agent import {base}, AgentInstanceBase
from my_grader_of_loading import grade


@dataclass
class Memory:
    turns: int = 0


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.memory = Memory()

    async def reset(self, states, **kwargs):
        return {{"observation": states["observation"]}}

    async def step(self, states, **kwargs):
        self.memory.turns += 1
        right = grade(states["action_text"], states["label"])
        return {{
            "rewards": torch.tensor([float(right)]), "scores": torch.tensor([float(right)]),
            "environment_feedback": "" if right else " again: ", "done": right,
            "sampling_params": states.get("sampling_params"), "extra_logs": {{"turns": self.memory.turns}},
        }}


class AgentExecutor({base}):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.mark.parametrize("base", ["AgentExecutorBase", "MultiTurnAgentExecutor"])
async def test_an_openrlhf_file_runs_with_its_dataclass_and_its_neighbor(tmp_path, base):
    write(tmp_path / "my_grader_of_loading.py", "def grade(action, label):\n    return action == label\n")
    func = load_agent_func(write(tmp_path / f"{base}.py", AGENT_FUNC.format(base=base)))
    trajectory = await episode(func, actions=("6", "7"))
    assert trajectory.error is None
    assert [turn.action for turn in trajectory.turns] == ["6", "7"]
    assert (trajectory.reward, trajectory.score, trajectory.episode_id) == (1.0, 1.0, "t/0")
    assert trajectory.turns[-1].result.info == {"turns": 2.0}


def test_a_foreign_class_declares_the_range_of_its_scores_or_has_none():
    class Foreign:
        async def step(self, states): ...

    class Declared(Foreign):
        score_range = (0.0, 5.0)

    assert (as_agent(Foreign).score_range, as_agent(Declared).score_range) == (None, (0.0, 5.0))


@pytest.mark.parametrize("score_range", [10, (0.0, 1.0, 2.0), (1.0, 1.0), (1.0, 0.0), (0.0, math.inf), ("0", "1")])
def test_a_score_range_that_is_not_an_interval_is_refused_when_the_class_is_loaded(score_range):
    cls = type("Wrong", (AgentInstance,), {"score_range": score_range})
    with pytest.raises(ConfigError, match=r"Wrong\.score_range: expected \(low, high\) with low < high"):
        as_agent(cls)


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("x = 1\n", r"\[\]"),
        ("class Agent:\n    pass\n", r"\['Agent'\]"),
        ("class AgentExecutor:\n    pass\n", r"\['AgentExecutor'\]"),
        ("def AgentExecutor(): ...\n", r"\[\]"),
    ],
)
def test_a_file_without_an_executor_is_refused_with_what_to_define(tmp_path, text, classes):
    with pytest.raises(ConfigError, match=f"expected a class AgentExecutor with an `execute` method, got .*{classes}"):
        load_agent_func(write(tmp_path / "file.py", text))


def test_a_file_for_openrlhf_whose_executor_has_another_name_is_refused_everywhere_and_not_taken_as_an_environment(
    tmp_path,
):
    write(tmp_path / "my_grader_of_loading.py", "def grade(action, label):\n    return action == label\n")
    text = AGENT_FUNC.format(base="MultiTurnAgentExecutor").replace("class AgentExecutor", "class MyExecutor")
    path = write(tmp_path / "named.py", text)
    for load in (load_agent_func, lambda path: load_func_agent(str(path))):
        with pytest.raises(ConfigError, match=r"expected a class AgentExecutor with an `execute` method, got .*MyExec"):
            load(path)
    base = "from agentenv import AgentExecutor as Base\nclass MyAgentExecutor(Base): ...\n" + ENV.format(name="Guess")
    assert load_func_agent(str(write(tmp_path / "base.py", base))) is None, "an environment, and a base for other files"


@pytest.mark.parametrize(
    "mention", ["# for AgentExecutor", "from agentenv.interop.openrlhf import AgentExecutor", "AgentRunner = None"]
)
def test_a_file_that_only_mentions_an_executor_has_none(tmp_path, mention):
    assert load_func_agent(str(write(tmp_path / "env.py", f"{mention}\n{ENV.format(name='Guess')}"))) is None


# --- models -------------------------------------------------------------------------------------------------------


def test_a_model_is_a_folder_or_a_name_for_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert resolve_model("mine") == "mine"
    assert resolve_model(str(tmp_path / "mine")) == str(tmp_path / "mine")
    assert resolve_model("someone/model") == "someone/model"
    assert resolve_model("") == ""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/mine") == str(tmp_path / "mine")


def test_the_shipped_model_wins_over_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-math").mkdir()
    assert Path(resolve_model("tiny-math")) == ROOT / "agentenv/_assets/tiny-math"
    assert Path(resolve_model("./tiny-math")) == Path("tiny-math")
    assert Path(resolve_model(".")) == Path(".")


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="--model: expected a model's folder"):
        load_tokenizer(str(tmp_path))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return make_tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny", layers=1)


def variants(tiny_model, folder):
    """Folders of one tokenizer: as saved alone, beside configs of models, and with other claims of a class."""
    saved = json.loads((tiny_model / "tokenizer_config.json").read_text())
    for index, (claim, model_type) in enumerate(
        itertools.product(
            [saved["tokenizer_class"], "Qwen2Tokenizer", "Qwen2TokenizerFast", "TokenizersBackend", None],
            [None, "qwen2", "llama", "gpt2"],
        )
    ):
        path = shutil.copytree(tiny_model, folder / str(index), ignore=shutil.ignore_patterns("config.json", "model*"))
        (path / "tokenizer_config.json").write_text(json.dumps(saved | {"tokenizer_class": claim}))
        if model_type:
            (path / "config.json").write_text(json.dumps({"model_type": model_type}))
        yield path


@pytest.mark.long
def test_the_tokenizer_of_a_folder_is_the_one_that_transformers_takes(tiny_model, tmp_path):
    from transformers import AutoTokenizer

    text = "Question 1?<|im_end|>\n  The answer\tis \\boxed{7}é 012"
    shipped = Path(resolve_model("tiny-math"))
    for path in [shipped, tiny_model, *variants(tiny_model, tmp_path)]:
        expected, tokenizer = AutoTokenizer.from_pretrained(path), load_tokenizer(str(path))
        assert type(tokenizer) is type(expected), path
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.chat_template == expected.chat_template
        assert tokenizer.all_special_ids == expected.all_special_ids


# --- agents with a loop of their own --------------------------------------------------------------------------------


def test_a_class_with_run_and_no_step_is_an_agent_with_its_own_loop(tmp_path):
    text = "class Agent:\n    async def run(self, context): ...\nclass Helper: ...\n"
    path = write(tmp_path / "agent.py", text)
    for spec in (f"{path}:Agent", str(path)):
        assert isinstance(env_source(spec, {}), ChatAgentSource)


def test_an_environment_that_also_has_run_stays_an_environment(tmp_path):
    agent = "    async def run(self, context): ...\nclass Agent:\n    def run(self, context): ...\n"
    path = write(tmp_path / "env.py", ENV.format(name="Env") + agent)
    assert isinstance(env_source(str(path), {}), EnvSource)
    assert isinstance(env_source(f"{path}:Agent", {}), ChatAgentSource)
