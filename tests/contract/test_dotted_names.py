"""Every dotted name that the library has as a string leads to something: no move of a file can break one silently."""

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOTTED = re.compile(r"""(["'])(?P<name>agentenv(_envs)?(\.\w+)+(:\w+)?)\1""")
NO_PATHS = {
    "agentenv.envs",  # the group of entry points
    "agentenv.tool_error",  # an audit event
}
NEED_PEERS = {"agentenv.interop.verifiers_renderer.ChatRenderer"}  # its trainer loads it in tests/peers
NEED_RAY = {f"agentenv.interop.nemo_rl.{name}" for name in ("AgentEnvironmentActor", "RewardModelEnvironmentActor")}


def strings():
    """Each dotted string of the library, with the files that have it."""
    found = {}
    for file in sorted((ROOT / "agentenv").rglob("*.py")):
        for match in DOTTED.finditer(file.read_text()):
            found.setdefault(match["name"], []).append(file.relative_to(ROOT).as_posix())
    return found


def entry_points():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    return [value for group in groups for value in group.values()]


def source(module):
    return ROOT / "agentenv" / f"{module.removeprefix('agentenv.').replace('.', '/')}.py"


def defined_in(module):
    """Names of the classes and functions of a module's source; none for what is not a file."""
    if not source(module).is_file():
        return set()
    return {node.name for node in ast.parse(source(module).read_text()).body if hasattr(node, "name")}


def resolve(name):
    """The module or attribute behind `package.module`, `package.module.Attr` or `package.module:Attr`."""
    path, _, attribute = name.partition(":")
    module, _, last = (path, "", attribute) if attribute else path.rpartition(".")
    if last in defined_in(module) or (not attribute and source(path).is_file()):
        return name  # without importing it: some modules import vLLM, or a peer
    try:
        value = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        module, _, last = path.rpartition(".")
        value = getattr(import_module(module), last)
    return getattr(value, attribute) if attribute else value


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in NEED_RAY else name
        for name in sorted(strings().keys() - NO_PATHS - NEED_PEERS)
    ],
)
def test_a_dotted_string_leads_somewhere(name):
    assert resolve(name) is not None, strings()[name]


@pytest.mark.parametrize("name", entry_points())
def test_an_entry_point_leads_somewhere(name):
    assert resolve(name) is not None
