"""The shape of the library that import-linter cannot check: keys at the border, light imports, one broad except."""

import ast
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "agentenv"
HEAVY = {"torch", "transformers", "vllm", "ray", "openrlhf", "math_verify", "pyarrow", "datasets"}
OPENRLHF_KEYS = {"environment_feedback", "action_ranges", "rollout_log_probs", "observation_tokens", "extra_logs"}
BORDER = {
    "core/agent.py", "core/step_dict.py", "interop/openrlhf/response.py", "rewards/models/openrlhf_wire.py",
    "interop/molt/runner.py", "interop/molt/files.py", "rewards/serving/server.py",
    "interop/openrlhf/executor.py", "testing/conformance/contract.py",
}  # fmt: skip
"""Where those are read and written; others have them too."""
CARRIERS = {
    "_util/calls.py", "engines/hf/engine.py", "episode/env_actors/host.py", "episode/env_actors/frames.py",
    "episode/env_actors/process.py",
    "interop/inspect_worker.py", "rewards/rules/math/worker.py",
    "rewards/workers/main.py", "rewards/workers/threads.py", "rewards/grading.py", "rewards/models/hf.py",
    "sandbox/grading/guest/asserts.py", "sandbox/grading/guest/serve.py", "sandbox/grading/guest/pytest_runner.py",
    "sandbox/guest/child.py", "sandbox/guest/session_driver.py",
}  # fmt: skip
"""Where whatever was raised is carried to a waiting caller, in another thread or process, and not handled."""
IMPORTS_TORCH = (
    "engines/hf/slot_model.py", "engines/hf/sampling.py",
    "engines/hf/torch_settings.py",
    "engines/weights.py", "engines/vllm/worker.py",
    "rewards/models/classifier.py",
    "training/algorithm/", "training/learner/", "tools/schemas.py",
)  # fmt: skip
"""Files and folders of functions over tensors: others import them inside functions."""


@functools.cache
def sources():
    """The syntax tree of each file of the library."""
    return {path.relative_to(LIBRARY).as_posix(): ast.parse(path.read_text()) for path in sorted(LIBRARY.rglob("*.py"))}


def imported(nodes):
    """Dotted names that import statements among `nodes` name, with a line each."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def at_import_time(tree):
    """The nodes that run when a module is imported: not the insides of functions, nor what only type checkers read."""
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not typing_only and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))]


def files_named(name):
    """The library's files that importing the dotted `name` loads, the root package aside."""
    parts = name.split(".")[1:]
    paths = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return [file for path in paths for file in (f"{path}.py", f"{path}/__init__.py") if file in sources()]


def heavy(file):
    return {name.split(".")[0] for name, _ in imported(at_import_time(sources()[file]))} & HEAVY


def test_the_source_is_found():
    assert {"core/types.py", "episode/loop.py", "engines/scripted.py"} <= sources().keys()


def test_heavy_libraries_are_imported_inside_what_needs_them():
    wrong = {file: heavy(file) for file in sources() if heavy(file) and not file.startswith(IMPORTS_TORCH)}
    assert wrong == {}


def test_modules_that_import_heavy_libraries_are_imported_inside_functions():
    wrong = [
        f"agentenv/{file}:{line} imports {name}"
        for file, tree in sources().items()
        if not heavy(file)
        for name, line in imported(at_import_time(tree))
        if any(heavy(target) for target in files_named(name))
    ]
    assert wrong == []


def words(node):
    """Names and strings that this node puts into the code."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=name) | ast.arg(arg=name):
            return {name}
    return set()


def test_openrlhfs_keys_stay_at_the_border():
    wrong = [
        f"agentenv/{file}:{node.lineno} says {sorted(words(node) & OPENRLHF_KEYS)}"
        for file, tree in sources().items()
        if file not in BORDER
        for node in ast.walk(tree)
        if words(node) & OPENRLHF_KEYS
    ]
    assert wrong == []


def swallows(handler):
    """Whether an `except` takes everything and lets none of it on."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)
    return broad and not isinstance(handler.body[-1], ast.Raise)


def test_the_one_place_that_swallows_every_exception_is_the_loop():
    wrong = {
        file
        for file, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    }
    assert wrong - CARRIERS == {"episode/loop.py"}


# --- importing does nothing else ------------------------------------------------------------------------------------

REPORT = """
import json, sys, threading
import {module}
heavy = sorted({{name.split(".")[0] for name in sys.modules}} & set({heavy!r}))
print(json.dumps({{"heavy": heavy, "threads": threading.active_count()}}))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "module",
    [
        "agentenv",
        "agentenv.interop.openrlhf.executor",
        "agentenv.engines.scripted",
        "agentenv.interop.openrlhf.response",
        "agentenv.interop.verl.plugin, agentenv.interop.verl.records, agentenv.interop.roll, agentenv.interop.nemo_rl",
        "agentenv.interop.openrlhf, agentenv.interop.molt",
    ],
)
def test_importing_is_silent_light_and_leaves_nothing_behind(module, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)}
    code = REPORT.format(
        module=module, heavy=sorted(HEAVY | {"numpy", "rich", "tyro", "gymnasium", "httpx", "verl", "roll"})
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == {"heavy": [], "threads": 1}
    assert list(tmp_path.iterdir()) == []
