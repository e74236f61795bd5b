"""Runs for the tests of the page: small ones, and one with a payload in every field that models and authors write."""

import json
import zlib

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.runs.records.directory import RunWriter
from agentenv.runs.records.index import HEADER, INDEX

PAYLOADS = (
    "<script>alert(1)</script>", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)><animate onbegin=alert(1)>", "<!--<script>", "--><b>", "]]>", "'\"><b onmouseover=alert(1)>",
    "javascript:alert(1)", "<iframe srcdoc='<script>alert(1)</script>'>", "<a href=https://evil.example/>x</a>",
    "![x](https://evil.example/x.png)", "[x](javascript:alert(1))", "```\n<b>\n```", "````\n```", "@everyone #123 !7",
    "<details open ontoggle=alert(1)>", "$\\href{javascript:alert(1)}{x}$", "\u202egnp.exe", "a\u200bb\u2066c\u2069",
    "\x00\x07\x1b[31m", "\ud800", "\u2028\u2029", "__proto__", "constructor", "&lt;b&gt;&amp;", "%3Cscript%3E",
    "data:text/html,<script>alert(1)</script>", "<style>*{display:none}</style>", "<base href=//evil.example>",
    "<meta http-equiv=refresh content=0;url=//evil.example>", "{{constructor.constructor('alert(1)')()}}",
    "\n| a | b |\n|---|---|\n", "\n# heading\n---\n", "<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]>&e;",
)  # fmt: skip
"""What must stay text, wherever it stands."""


def tiny_math():
    """The tokenizer of the shipped model."""
    return load_tokenizer(resolve_model("tiny-math"))


def episode(
    episode_id="a/0", prompt="How many apples?", action="3 apples", observation="", reward=1.0, *, tokenizer=None,
    label=None, info=None, error=None,
):  # fmt: skip
    """An episode of one turn, with real tokens of its texts if there is a tokenizer."""
    messages = [{"role": "user", "content": prompt}]
    trajectory = Trajectory(
        Task(messages, label, task_id=episode_id.split("/")[0]), 10**6, episode_id, episode_id.split("/")[0]
    )
    trajectory.prompt = messages

    def encoded(text):  # an unpaired surrogate has no tokens
        return list(tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)) or [3]

    encode = encoded if tokenizer else None
    trajectory.append_observation(encode(f"<|im_start|>user\n{prompt}<|im_end|>\n") if encode else [1, 2])
    ids = tuple(encode(action)) if encode else (3, 4)
    trajectory.append_turn(Completion(ids, logprobs=tuple(-0.25 * k for k in range(len(ids)))), action)
    if error is None:
        result = StepResult(observation, reward, terminated=not observation, info=info or {})
        trajectory.set_result(result)
    if observation and error is None:
        trajectory.append_observation(encode(observation) if encode else [5], bridge="text")
    trajectory.finish(StopReason.ERROR if error else StopReason.TERMINATED, error)
    return trajectory


def write_run(folder, *episodes, flags=None):
    """A run directory with these episodes, and tiny-math as its model."""
    config = {"flags": {"env": "math_retry", "model": "tiny-math", "n": 2, **(flags or {})}}
    with RunWriter.open(folder, config) as writer:
        for each in episodes:
            writer.append(each)
    return folder


def hostile_run(folder):
    """A run in which each payload stands in every text, id, key and flag."""
    tokenizer = tiny_math()
    episodes = [
        episode(
            f"{payload}{number}/0", payload, payload, payload, tokenizer=tokenizer, label=payload,
            info={payload: 1.0, f"text{payload}": payload},
            error=EpisodeError("env", payload, payload, payload, payload) if number % 5 == 4 else None,
        )
        for number, payload in enumerate(PAYLOADS)
    ]  # fmt: skip
    text = " ".join(PAYLOADS).encode("utf-8", "replace").decode()
    write_run(folder, *episodes, flags={"env": text, "system_prompt": text, text: text})
    metrics = {"step": 1, "rollout/reward": 0.5, f"rollout/info/{text}": 1.0, "warnings": [text]}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    return folder


def forge_index(folder, row):
    """Make the value `row`, with the right checksum, the only one of the index."""
    text = json.dumps(row, ensure_ascii=False).encode()[:-1]
    (folder / INDEX).write_bytes(HEADER + text + b',"%08x"]\n' % zlib.crc32(text, zlib.crc32(HEADER)))
