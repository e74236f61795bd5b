"""Dataset rows as test suites: the plain form of `rewards.rules.code.forms`, and the forms of known datasets.

    python -m agentenv_envs.code_sandbox.datasets mbpp.jsonl OUT.jsonl --prompt_key text

The environment reads all of them itself. Use the command for trainers that pass on only a prompt and a label, such as
OpenRLHF: it writes the row's columns that the form needs under `label`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from agentenv.core.dataset import read_tasks
from agentenv.rewards.rules.code.forms import FORMS, code_task, form_of
from agentenv.rewards.rules.code.task import CodeTask

__all__ = ["CodeTask", "code_task", "form_of", "main"]


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", help="a file or Hugging Face dataset, as for --data")
    parser.add_argument("out", type=Path, help="JSONL to write")
    parser.add_argument("--prompt_key", default="prompt", help="column with the question")
    parser.add_argument("--split", default=None, help="split of a Hugging Face dataset")
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        for task in read_tasks(args.data, prompt_key=args.prompt_key, label_key=None, split=args.split):
            columns = {**task.metadata, "prompt": task.prompt}
            _ = code_task(None, columns)
            label = {key: columns[key] for key in FORMS[form_of(columns)].columns if columns.get(key) is not None}
            file.write(json.dumps({"id": task.task_id, "prompt": task.prompt, "label": label}) + "\n")


if __name__ == "__main__":
    main()
