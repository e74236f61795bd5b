"""OpenRLHF's own argument parser, run from its source without its imports: what it takes.

The data file beside this one is made by `python openrlhf_parser.py PARENT`, where each PARENT/VERSION holds
`openrlhf/`, as `pip install --no-deps --target PARENT/VERSION openrlhf==VERSION` leaves it.
"""

import argparse
import ast
import json
import math
import os
import runpy
import sys
import types
from datetime import datetime
from pathlib import Path

DATA = Path(__file__).parent / "openrlhf_flags.json"


class _Done(BaseException):
    """The parser has what was asked for; nothing of the rest of its file is run."""


def main_block(folder):
    """The code under `if __name__ == "__main__":`."""
    tree = ast.parse((Path(folder) / "openrlhf/cli/train_ppo_ray.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return compile(ast.Module(block.body, []), "train_ppo_ray.py", "exec")


def run(folder, argv, parser_class=argparse.ArgumentParser):
    """What the file would train with: its parser's namespace after its own checks."""
    got = []
    config = Path(folder) / "openrlhf/utils/config.py"
    if config.is_file():  # it turns dotted names into nested ones; its package imports torch
        module = types.ModuleType("openrlhf.utils.config")
        module.__dict__.update(runpy.run_path(str(config)))
        sys.modules["openrlhf.utils.config"] = module
    sys.argv = ["train_ppo_ray", *argv]
    names = {"argparse": types.SimpleNamespace(ArgumentParser=parser_class), "os": os, "datetime": datetime}
    exec(main_block(folder), {**names, "train": got.append})
    return got[0]


def flags(folder):
    """Every flag: `takes` (a type's name, or "nothing"), `nargs`, `choices`, `default`."""
    found = {}

    class Recorder(argparse.ArgumentParser):
        def parse_args(self, *_):
            for action in self._actions:
                entry = {
                    "takes": "nothing" if action.nargs == 0 else getattr(action.type, "__name__", "str"),
                    "nargs": action.nargs or None,  # 0 is said by `takes`
                    "choices": list(action.choices) if action.choices else None,
                    "default": None if action.default is False or action.default == math.inf else action.default,
                }
                if action.dest.endswith("run_name"):
                    del entry["default"]  # the time of day
                for name in action.option_strings:
                    if name.startswith("--") and name != "--help":
                        found[name] = {key: value for key, value in entry.items() if value is not None}
            raise _Done

    try:
        run(folder, [], Recorder)
    except _Done:
        return found


def order(version):
    """A key that sorts versions as they came out."""
    return [int(part.removeprefix("post")) for part in version.split(".")]


def write(parent):
    """The data file: for each flag, in which versions (first, last) it takes what."""
    versions = sorted((path.name for path in Path(parent).iterdir() if path.is_dir()), key=order)
    spans = {}
    for version in versions:
        for name, entry in flags(Path(parent) / version).items():
            known = spans.setdefault(name, [])
            last = known[-1] if known else None
            before = versions[versions.index(version) - 1]
            if last and last["to"] == before and {k: v for k, v in last.items() if k not in ("from", "to")} == entry:
                last["to"] = version
            else:
                known.append({"from": version, "to": version, **entry})
    lines = [f"    {json.dumps(name)}: {json.dumps(spans[name])}" for name in sorted(spans)]
    head = f'{{\n  "versions": {json.dumps(versions)},\n  "flags": {{\n'
    DATA.write_text(head + ",\n".join(lines) + "\n  }\n}\n")


if __name__ == "__main__":
    write(sys.argv[1])
