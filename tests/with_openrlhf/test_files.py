"""agent_func.py files of every OpenRLHF version run by command, whether OpenRLHF is installed or not."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.runs.records.directory import read_trajectories
from tests.drivers import command
from tests.with_openrlhf.where import FOLDER, ROOT

EXPECTED = {
    "template": [None, 6, 1.0, "terminated"],
    "math_agent": [None, 2, 1.0, "terminated"],
    "own_loop": [None, 2, 1.0, "terminated"],
    "own_loop_queue": [None, 1, 0.0, "terminated"],
    "retrying": [None, 3, 1.0, "terminated"],
    "screens": [None, 3, 1.0, "terminated"],
}
"""error, turns, reward and stop reason of every episode."""
if importlib.util.find_spec("openai"):  # which the file's agent asks its own server with
    EXPECTED["openai_server"] = [None, 2, 1.0, "terminated"]
GUIDE = ROOT.parent / "shared/seeds/openrlhf-custom-rewards-guide.txt"
NAMES = ("AgentExecutorBase", "AgentInstanceBase", "MultiTurnAgentExecutor")


def site_of(folder, **modules):
    """A folder of installed packages with an `openrlhf.utils` that has these modules."""
    package = folder / "site/openrlhf/utils"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    for name, text in {"__init__": "", **modules}.items():
        (package / f"{name}.py").write_text(text)
    return folder / "site"


def printed(program, site):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(params=["without", "with abstract bases of that name", "with OpenRLHF 0.11.2"])
def installed(request, tmp_path):
    """The folder of an installed OpenRLHF, or None."""
    if request.param == "without":
        return None
    if request.param == "with OpenRLHF 0.11.2":
        if not FOLDER.is_dir():
            pytest.skip(f"OpenRLHF is not in {FOLDER}: make test-slow installs it")
        return FOLDER
    classes = "".join(f"class {name}(ABC):\n    @abstractmethod\n    def x(self): ...\n" for name in NAMES)
    agent = f"from abc import ABC, abstractmethod\n{classes}"
    return site_of(tmp_path, agent=agent, logging_utils="from logging import getLogger as init_logger\n")


@pytest.mark.long
def test_files_of_both_contracts_run_by_command(installed, tmp_path):
    path = [str(ROOT), str(ROOT / "envs"), *([str(installed)] if installed else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, str(Path(__file__).parent / "run_files.py"), str(tmp_path), *EXPECTED]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("FILE ", "MODULE "))]
    for kind, text in lines[:-1]:
        name, code, episodes = json.loads(text)
        assert (kind, name, code, episodes) == ("FILE", name, 0, [EXPECTED[name]] * 2)
    file, modules = json.loads(lines[-1][1])
    if installed:
        assert file == str(installed / "openrlhf/utils/agent.py")
        assert modules == ["openrlhf.utils.agent"] * 3
    else:
        assert (file, modules) == (None, ["agentenv.interop.openrlhf.executor"] * 3)


@pytest.mark.long
def test_tokens_of_a_file_with_its_own_server_are_those_that_the_engine_sampled_in_every_episode(tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "What is 6 x 7?", "label": "42"}) + "\n")
    flags = ["--data", tmp_path / "tasks.jsonl", "--n", 12, "--max_tokens", 16, "--progress", "none"]
    file = ROOT / "tests/interop/agent_funcs/openai_server.py"
    assert command(["run", "--agent_func_path", file, *flags, "--out", tmp_path / "run"]) == 0
    trajectories = list(read_trajectories(tmp_path / "run"))
    assert len(trajectories) == 12
    for trajectory in trajectories:
        segment = trajectory.segments[0]
        sampled = [i for turn in trajectory.turns for i in range(turn.start, turn.end)]
        assert sampled == [i for i, masked in enumerate(segment.action_mask) if masked]
        assert all(segment.logprobs[i] <= 0.0 for i in sampled)
    assert command(["tokens", "replay", tmp_path / "run", "--tolerance", 1e-4]) == 0


@pytest.mark.skipif(not GUIDE.is_file(), reason="the guide lies beside the repository, not in it")
@pytest.mark.parametrize(
    ("name", "heading", "own"),
    [
        ("template", "**Template** (`agent_func.py`)", {"def calculate_reward(action_text, label):"}),
        ("math_agent", "### Example: Math Problem Solving Agent", {"# agent_func_math.py"}),
    ],
)
def test_the_files_of_the_guide_are_the_guides_own(name, heading, own):
    """Its text has lost indentation and backslashes: line by line nothing else differs."""

    def lines(text):
        told = [" ".join(line.replace("\\", "").split()).rstrip(",") for line in text.splitlines()]
        return [line for line in told if line and line not in own]

    guide = GUIDE.read_text().split(heading)[1].split("```python\n")[1].split("```")[0]
    text = (ROOT / f"tests/interop/agent_funcs/{name}.py").read_text()
    file = text.replace("    return float(label in action_text)\n", "")
    head, _, body = file.partition("\nfrom ")
    assert all(line.startswith("#") for line in head.splitlines())
    assert lines("from " + body) == lines(guide)


@pytest.mark.long
def test_a_file_loads_where_openrlhfs_own_imports_fail(tmp_path):
    """Its package may need flash_attn or deepspeed: the file gets our module without them."""
    program = (
        "import sys; from agentenv.interop.agent_files import load_agent_func; "
        f"f = load_agent_func({str(ROOT / 'tests/interop/agent_funcs/template.py')!r}); "
        "print(f.executor_cls.__mro__[1].__module__, [n for n in sys.modules if n.startswith('openrlhf')])"
    )
    site = site_of(tmp_path, __init__="raise ImportError('no flash_attn')")
    assert printed(program, site) == "agentenv.interop.openrlhf.executor []"


@pytest.mark.long
def test_a_real_module_that_was_imported_before_is_back_afterwards(tmp_path):
    site = site_of(tmp_path, agent="class AgentExecutorBase: ...\nclass AgentInstanceBase: ...\n")
    broken = tmp_path / "broken.py"
    broken.write_text("from openrlhf.utils.agent import AgentExecutorBase\nraise ValueError\n")
    program = f"""
import openrlhf.utils, openrlhf.utils.agent as before
from agentenv.errors import ConfigError
from agentenv.interop.agent_files import load_agent_func
def same():
    import sys, openrlhf.utils.agent as after
    from openrlhf.utils import agent
    return before is after is agent is sys.modules["openrlhf.utils.agent"]
loaded = load_agent_func({str(ROOT / "tests/interop/agent_funcs/math_agent.py")!r})
first = same()
try:
    load_agent_func({str(broken)!r})
except ConfigError:
    print(first, same(), issubclass(loaded.executor_cls, before.AgentExecutorBase))
"""
    assert printed(program, site) == "True True False"


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"OpenRLHF is not in {FOLDER}: make test-slow installs it")
def test_openrlhf_has_the_flags_that_its_page_names():
    known = set(re.findall(r'"--([\w.]+)"', (FOLDER / "openrlhf/cli/train_ppo_ray.py").read_text()))
    named = re.findall(r"^\| 0\.(?:11\.2|10\.2 to) .*", (ROOT / "docs/interop/openrlhf.md").read_text(), re.MULTILINE)
    flags = set(re.findall(r"--([\w.]+)", " ".join(named)))
    assert len(flags) == 5
    assert flags - known == {"algo.advantage.is_correction_enable"}  # up to 0.11.1


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"OpenRLHF is not in {FOLDER}: make test-slow installs it")
@pytest.mark.parametrize("module", ["utils/agent.py", "utils/logging_utils.py"])
def test_the_stand_in_has_the_public_names_that_the_real_module_defines(module):
    tree = ast.parse((FOLDER / "openrlhf" / module).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    of_trainers = {"NewLineFormatter", "WandbLogger", "TensorboardLogger"}
    script = (
        "import sys; from agentenv.interop.agent_files import OPENRLHF_NAMES\n"
        "from agentenv.interop.openrlhf.shim import openrlhf_stand_in\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "with openrlhf_stand_in(OPENRLHF_NAMES):\n"
        "    print(*vars(__import__(sys.argv[1], fromlist=['x'])))\n"
    )
    name = "openrlhf." + module.removesuffix(".py").replace("/", ".")
    done = subprocess.run([sys.executable, "-c", script, name, ROOT], capture_output=True, text=True, check=True)
    assert {each for each in names - of_trainers if not each.startswith("_")} <= {*done.stdout.split()}
