"""Our rewards in verl itself: `rewards_inside.py`, in a process with what verl needs, each check as a test here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = Path(os.environ.get("AGENTENV_VERL") or Path(sys.prefix) / "verl")
"""Made by `make test-slow`: verl and, since hydra wants another antlr than the tests' own, what verl needs."""
INSIDE = HERE / "rewards_inside.py"
CHECKS = re.findall(r"^@check\n(?:async )?def (\w+)", INSIDE.read_text(), re.MULTILINE)
INSTALLED = {
    "METADATA": "Metadata-Version: 2.1\nName: agentenv-beside\nVersion: 1\n",
    "entry_points.txt": "[verl.plugins]\nagentenv = agentenv.interop.verl.plugin\n",
}
"""What an installed package tells verl; the source that is tested may not be installed."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all((FOLDER / name).is_dir() for name in ("verl", "tensordict", "hydra", "omegaconf", "antlr4")),
        reason=f"verl, or what it needs, is not in {FOLDER}: make test-slow installs it",
    ),
]


def ran(folder, arguments, *path, **variables):
    """A process with what verl needs first on its path."""
    first = os.pathsep.join(map(str, (ROOT, ROOT / "envs", FOLDER, *path)))
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": first, "TOKENIZERS_PARALLELISM": "false"} | variables,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, f"{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
    return finished.stdout


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What became of each check, from one process: importing verl takes seconds."""
    beside = tmp_path_factory.mktemp("beside")
    for name, text in INSTALLED.items():
        (beside / f"agentenv_beside-1.dist-info/{name}").parent.mkdir(exist_ok=True)
        (beside / f"agentenv_beside-1.dist-info/{name}").write_text(text)
    told = ran(tmp_path_factory.mktemp("inside"), [str(INSIDE)], beside)
    return json.loads(told.strip().splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_inside_of_verl(name, outcomes):
    assert outcomes[name]["error"] is None, outcomes[name]["error"]


def test_row_24_an_older_verl_finds_the_plugin_by_a_variable(tmp_path):
    code = (
        "import verl\n"
        "from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls\n"
        "print(get_reward_manager_cls('agentenv').__name__)"
    )
    given = {"VERL_USE_EXTERNAL_MODULES": "agentenv.interop.verl.plugin", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    assert ran(tmp_path, ["-W", "ignore", "-c", code], **given).strip() == "AgentEnvRewardManager"
