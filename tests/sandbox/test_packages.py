"""What a program sees of the packages that are installed beside agentenv: those that it asked for, and no labels."""

import importlib.util
import json
import os
import tempfile
from pathlib import Path

import pytest

from agentenv.sandbox.local import plan
from agentenv.sandbox.local.plan import entries_of, environment_folders
from tests.sandbox.conftest import LEVELS, opened

LABELS = "the labels of somebody's tasks"
SEE = """
import importlib.metadata, json, os, pkgutil, sys
def of(deed):
    try:
        return deed()
    except (ImportError, OSError) as error:
        return type(error).__name__
def read(*parts):
    return open(os.path.join(FOLDER, *parts)).read()
print(json.dumps({
    "asked": of(lambda: __import__("asked").VALUE),
    "read": of(lambda: open(os.path.join(os.path.dirname(__import__("asked").__file__), "more.txt")).read()),
    "lazily": of(lambda: __import__("asked.lazily").lazily.VALUE),
    "needed": of(lambda: __import__("needed_module").VALUE),
    "shared": of(lambda: __import__("shared.needed").needed.VALUE),
    "other": of(lambda: __import__("other")),
    "tasks": of(lambda: __import__("tasks")),
    "beside": of(lambda: __import__("shared.labels")),
    "labels": [of(lambda: read("tasks", "tasks.jsonl")), of(lambda: read("shared", "labels", "tasks.jsonl"))],
    "versions": sorted(dist.name for dist in importlib.metadata.distributions()),
    "modules": sorted({"asked", "tasks", "other", "needed_module"} & set(sys.modules)),
}))
"""


def install(folder, name, files, *, requires=(), entry_points=""):
    """Install a distribution, as pip does."""
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {other}" for other in requires)]
    files = {**files, f"{info}/METADATA": "\n".join([*lines, "", "Requires-Dist: no\n"]), "../../../bin/x": ""}
    if entry_points:
        files[f"{info}/entry_points.txt"] = entry_points
    record = "".join(f"{path},sha256=x,1\n" for path in [*files, f"{info}/RECORD"])
    for path, content in {**files, f"{info}/RECORD": record}.items():
        if not path.startswith(".."):
            Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, path).write_text(content)


@pytest.fixture
def packages(monkeypatch):
    """An import folder with packages, of which one holds tasks; its parents are open to all users."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        folder = os.path.realpath(os.path.join(root, "site-packages"))
        install(
            folder,
            "asked",
            {
                "asked/__init__.py": "try:\n    import tasks\nexcept ImportError:\n    VALUE = 'asked'\n",
                "asked/lazily.py": "VALUE = 'lazily'",
                "asked/more.txt": "more",
            },
            requires=["Needed_Module [fast] >= 1; python_version > '3'", "other; extra == 'dev'", "tasks", "missing"],
        )
        install(folder, "needed.module", {"needed_module.py": "VALUE = 'needed'"}, requires=["fast; extra == 'fast'"])
        install(folder, "fast", {"shared/needed/__init__.py": "VALUE = 'fast'"})
        install(folder, "other", {"other/__init__.py": ""})
        entry = "[agentenv.envs]\nthe_tasks = tasks:Tasks\n"
        install(folder, "tasks", {"tasks/__init__.py": "", "tasks/tasks.jsonl": LABELS}, entry_points=entry)
        install(folder, "labels", {"shared/labels/__init__.py": "", "shared/labels/tasks.jsonl": LABELS})
        monkeypatch.setattr(plan, "package_folders", lambda: (folder,))
        yield folder


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_programs_see_the_packages_that_they_ask_for_and_what_these_require(packages, level):
    umask = os.umask(0o077)
    try:
        sandbox = await opened(isolation=level, preimport=("asked",))
    finally:
        os.umask(umask)
    async with sandbox:
        seen = await sandbox.run(f"FOLDER = {packages!r}\n{SEE}")
    assert seen.exit_code == 0, seen.stderr
    found = json.loads(seen.stdout)
    assert {key: found[key] for key in ("asked", "read", "lazily", "needed", "shared")} == {
        "asked": "asked", "read": "more", "lazily": "lazily", "needed": "needed", "shared": "fast",
    }  # fmt: skip
    assert {found[key] for key in ("other", "tasks", "beside")} == {"ModuleNotFoundError"}
    assert set(found["labels"]) <= {"FileNotFoundError", "PermissionError"}
    assert found["versions"] == ["asked", "fast", "needed.module"]
    assert found["modules"] == ["asked", "needed_module"]


def test_entries_are_packages_their_metadata_and_single_files(packages):
    def names(*modules):
        return [os.path.relpath(path, packages) for path in entries_of(modules, [packages])]

    assert names("asked") == [
        "asked", "asked-1.0.dist-info", "fast-1.0.dist-info", "needed.module-1.0.dist-info", "needed_module.py",
        "shared/needed",
    ]  # fmt: skip
    assert names("shared.labels") == ["labels-1.0.dist-info", "shared/labels"]
    assert names("tasks") == names("json") == names("no_such_module") == []


def test_a_package_without_a_record_is_shown_as_it_is(packages):
    Path(packages, "plain").mkdir()
    Path(packages, "plain", "__init__.py").touch()
    Path(packages, "single.py").touch()
    assert entries_of(["plain", "single"], [packages]) == (f"{packages}/plain", f"{packages}/single.py")


def test_folders_of_packages_with_environments_are_hidden(packages):
    assert set(environment_folders([packages])) == {f"{packages}/tasks", f"{packages}/tasks-1.0.dist-info"}
    assert os.path.realpath(importlib.util.find_spec("agentenv").submodule_search_locations[0]) in plan.own_folders()
    assert f"{packages}/tasks" in plan.own_folders()
