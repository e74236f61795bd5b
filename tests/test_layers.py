"""The shape of the library, read from its source: imports point up, dicts stay outside, importing does nothing."""

import ast
import json
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "agentenv"
LAYERS = (
    {"types", "trajectory", "errors", "outside"},
    {
        "agent", "chat", "cluster", "deadlines", "dialogue", "encoding", "http_serving", "openrlhf", "openrlhf_module",
        "openrlhf_rewards", "ray_import", "restarts", "rewards", "sandbox", "template", "tool_formats", "tools",
        "toolsets", "mcp_tools", "mcp_wire", "held", "vllm_start",
    },
    {"episode"},
    {"endpoint", "engines", "executor", "molt", "molt_files", "stepping"},
    {
        "runner", "record", "outbox", "env_actors", "serialize", "dataset", "loading", "catalog", "metrics",
        "estimates", "id_set", "progress", "report", "config", "run", "doctor", "check", "tokens", "gym", "testing",
        "interop", "trainer", "viewer", "watchdog", "signals", "reward_func", "reward_http", "check_watch", "opening",
        "reward_hygiene", "rm", "conformance", "audit", "play", "scaffold",
    },
    {
        "cli", "cli_flags", "cli_launch", "cli_rm", "cli_rm_serve", "cli_sandbox", "cli_sandbox_serve", "cli_tokens",
        "cli_train", "cli_audit", "cli_new", "cli_play", "__main__",
    },
)  # fmt: skip
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}
HEAVY = {"torch", "transformers", "vllm", "ray", "openrlhf", "math_verify", "pyarrow", "datasets"}
OPENRLHF_KEYS = {"environment_feedback", "action_ranges", "rollout_log_probs", "observation_tokens", "extra_logs"}
BORDER = {
    "agent.py", "openrlhf.py", "openrlhf_rewards.py", "molt.py", "molt_files.py", "interop/slime.py",
    "rm/serve_wire.py",
}  # fmt: skip
"""Where those are read and written; others have them too."""
CARRIERS = {
    "agent.py", "engines/hf.py", "env_actors/host.py", "rewards/_math_worker.py", "rewards/_worker.py",
    "rewards/_threads.py", "rewards/grading.py", "rewards/models/batching.py", "sandbox/grading/_asserts.py",
    "sandbox/grading/_serve.py",
}  # fmt: skip
"""Where whatever was raised is carried to a waiting caller, in another thread or process, and not handled."""
ARITHMETIC = {
    f"trainer/{name}.py"
    for name in (
        "advantages", "batch", "corrections", "critic", "experience", "learner", "logprobs", "losses", "objective",
        "optimizer", "policy", "ranks", "scoring", "shaping", "sharding", "sweep",
    )
}  # fmt: skip
"""Functions over tensors: they import torch as private modules may, so others import them inside functions."""

SOURCES = {path.relative_to(LIBRARY).as_posix(): ast.parse(path.read_text()) for path in sorted(LIBRARY.rglob("*.py"))}


def component(file):
    """The name of a file in LAYERS: that of its module, or of the package it is in."""
    return file.split("/")[0].removesuffix(".py")


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
    return [file for path in paths for file in (f"{path}.py", f"{path}/__init__.py") if file in SOURCES]


def heavy(file):
    return {name.split(".")[0] for name, _ in imported(at_import_time(SOURCES[file]))} & HEAVY


def test_the_source_is_found():
    assert {"types.py", "episode.py", "engines/scripted.py"} <= SOURCES.keys()


def test_every_module_has_its_layer():
    unknown = {component(file) for file in SOURCES if file != "__init__.py"} - LAYER_OF.keys()
    assert not unknown, "name them in LAYERS"


def test_imports_point_up_the_layers_only():
    wrong = [
        f"agentenv/{file}:{line} imports {name}"
        for file, tree in SOURCES.items()
        for name, line in imported(ast.walk(tree))
        if name.startswith("agentenv.") and (target := name.split(".")[1]) in LAYER_OF
        if file != "__init__.py" and LAYER_OF[target] > LAYER_OF[component(file)]
    ]
    assert wrong == []


def test_no_import_goes_in_a_circle():
    graph = {
        file: {target for name, _ in imported(at_import_time(tree)) for target in files_named(name)} - {file}
        for file, tree in SOURCES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_library_never_imports_the_environments():
    wrong = [
        f"agentenv/{file}:{line} imports {name}"
        for file, tree in SOURCES.items()
        for name, line in imported(ast.walk(tree))
        if name.split(".")[0] in ("agentenv_envs", "envs", "agent_funcs", "tests")
    ]
    assert wrong == []


def test_only_tests_and_the_checker_of_environments_use_the_test_tools():
    users = {
        component(file)
        for file, tree in SOURCES.items()
        for name, _ in imported(ast.walk(tree))
        if name.startswith("agentenv.testing")
    }
    assert users <= {"testing", "check", "conformance", "audit", "cli_audit"}


def test_heavy_libraries_are_imported_inside_what_needs_them():
    private = {file for file in SOURCES if Path(file).name.startswith("_")} | ARITHMETIC
    wrong = {file: heavy(file) for file in SOURCES if heavy(file) and file not in private}
    assert wrong == {}


def test_private_modules_that_are_heavy_are_imported_inside_functions():
    wrong = [
        f"agentenv/{file}:{line} imports {name}"
        for file, tree in SOURCES.items()
        if not heavy(file)
        for name, line in imported(at_import_time(tree))
        if any(heavy(target) for target in files_named(name))
    ]
    assert wrong == []


def test_the_library_never_prints():
    wrong = [
        f"agentenv/{file}:{node.lineno}"
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
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
        for file, tree in SOURCES.items()
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
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    }
    assert wrong - CARRIERS == {"episode.py"}


# --- importing does nothing else ------------------------------------------------------------------------------------

REPORT = """
import json, sys, threading
import {module}
heavy = sorted({{name.split(".")[0] for name in sys.modules}} & set({heavy!r}))
print(json.dumps({{"heavy": heavy, "threads": threading.active_count()}}))
"""


@pytest.mark.parametrize("module", ["agentenv", "agentenv.executor", "agentenv.engines.scripted", "agentenv.openrlhf"])
def test_importing_is_silent_light_and_leaves_nothing_behind(module, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)}
    code = REPORT.format(module=module, heavy=sorted(HEAVY | {"numpy", "rich", "tyro", "gymnasium", "httpx"}))
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == {"heavy": [], "threads": 1}
    assert list(tmp_path.iterdir()) == []
