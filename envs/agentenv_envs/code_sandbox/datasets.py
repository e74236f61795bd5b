"""Rows of datasets to suites of tests: the plain form of `agentenv.rewards.code.plain`, and those of known datasets.

    python -m agentenv_envs.code_sandbox.datasets mbpp.jsonl OUT.jsonl --prompt_key text

The environment reads all of them itself; the command is for where only a prompt and a label get through, as in
OpenRLHF. What it writes under `label` is what the form needs of the row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from agentenv.dataset import read_tasks
from agentenv.rewards.code.forms import FORMS, code_task, form_of
from agentenv.rewards.code.task import CodeTask

__all__ = ["CodeTask", "code_task", "form_of", "main"]


def main() -> None:
    """Writes the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", help="a file or Hugging Face dataset, as --data")
    parser.add_argument("out", type=Path, help="JSONL to write")
    parser.add_argument("--prompt_key", default="prompt", help="column with the question")
    parser.add_argument("--split", default=None, help="of a Hugging Face dataset")
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        for task in read_tasks(args.data, prompt_key=args.prompt_key, label_key=None, split=args.split):
            columns = {**task.metadata, "prompt": task.prompt}
            _ = code_task(None, columns)
            label = {key: columns[key] for key in FORMS[form_of(columns)].columns if columns.get(key) is not None}
            file.write(json.dumps({"id": task.task_id, "prompt": task.prompt, "label": label}) + "\n")


if __name__ == "__main__":
    main()
