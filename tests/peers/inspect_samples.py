"""Tasks in Inspect's own eval, played by our loop; prints what came of them, as JSON."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from transformers import AutoTokenizer

from agentenv import Limits, load_env
from agentenv.engines.models import resolve_model
from agentenv.errors import AgentEnvError
from agentenv.interop.inspect_guest import guest_process, names
from agentenv.testing.episodes import Setup, play
from tests.peers.played import error_of, said

FILE = sys.argv[1]
TOKENIZER = AutoTokenizer.from_pretrained(resolve_model("tiny-math"))
LIMITS = Limits(max_length=8000, max_turns=8)


def calls(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def submit(answer):
    return calls("submit", answer=answer)


async def episode(task, actions, limits=LIMITS, **kwargs):
    name = task if "/" in task else f"{FILE}@{task}"
    trajectory = await play(Setup(f"inspect:{name}", actions, kwargs, tokenizer=TOKENIZER, limits=limits))
    last = trajectory.turns[-1].result if trajectory.turns else None
    error = trajectory.error
    return {
        "reward": trajectory.reward,
        "score": last and last.score,
        "info": dict(last.info) if last else {},
        "stop": str(trajectory.stop_reason),
        "error": [error.kind, error.message] if error else None,
        "text": TOKENIZER.decode(trajectory.segments[0].token_ids) if trajectory.segments else "",
        "segments": len(trajectory.segments),
        "actions": [turn.action for turn in trajectory.turns],
    }


async def prompt(task, seed, **kwargs):
    env = load_env(f"inspect:{FILE}@{task}")(**kwargs)
    try:
        begun = await env.reset({"seed": seed, "observation": "x"})
        return [[message["role"], message["content"]] for message in begun["observation"]]
    finally:
        await env.close()


async def killed():
    """The error of an episode during which Inspect's process is killed, and the prompt of the next one."""
    env = load_env(f"inspect:{FILE}@arithmetic")()
    await env.reset({"seed": 0, "observation": "x"})
    os.kill(guest_process("agentenv.interop.inspect_worker")._process.pid, signal.SIGKILL)
    try:
        await env.step({"action_text": "4"})
    except AgentEnvError as error:
        return said(error), await prompt("arithmetic", 0)
    finally:
        await env.close()


def install(name):
    """Put a package with the tasks of the file where Inspect takes packages for installed, for its process, too."""
    folder = Path("site-packages").resolve()
    (folder / name).mkdir(parents=True)
    (folder / f"{name}-1.0.dist-info").mkdir()
    (folder / name / "__init__.py").touch()
    (folder / name / "_registry.py").write_text(Path(FILE).read_text())
    (folder / f"{name}-1.0.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / f"{name}-1.0.dist-info/entry_points.txt").write_text(f"[inspect_ai]\n{name} = {name}._registry\n")
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(folder)])


async def main():
    install("small_evals")
    one = {"x": 2, "y": 2}
    two = await asyncio.gather(*(prompt("shuffled", 1) for _ in range(2)))
    print(
        json.dumps(
            {
                "right": await episode("arithmetic", ["4"]),
                "of_a_package": await episode("small_evals/arithmetic", ["4"]),
                "not_in_it": await episode("small_evals/nothing", ["4"]),
                "wrong": await episode("arithmetic", ["5"]),
                "choice": await episode("capitals", ["ANSWER: A"]),
                "partial": await episode("guessing", ["3", "4"]),
                "tools": await episode("adding", [calls("add", **one), submit("5"), submit("4")]),
                "react": await episode("reacting", [calls("add", **one), submit("4")]),
                "tool_error": await episode("adding", [calls("add", x=100, y=2), submit("4")]),
                "outside": await episode("adding", [calls("add", x=13, y=2)]),
                "broken_scorer": await episode("guessing", ["crash"]),
                "cut": await episode("guessing", ["3", "4"], Limits(max_length=8000, max_turns=1)),
                "graded": await episode("graded", ["4"]),
                "stand_in": await episode("graded", ["4"], model_roles={"grader": "stand_in/grader"}),
                "self_graded": await episode("self_graded", ["4"]),
                "two_values": await episode("two_values", ["4"]),
                "sandbox": await episode("boxed", ["4"]),
                "unscored": await episode("unscored", ["4"]),
                "other_seed": await prompt("arithmetic", 1),
                "configured": await prompt("arithmetic", 0, system="Only digits."),
                "shuffled": [two, await prompt("shuffled", 2)],
                "killed": await killed(),
                "unknown": [
                    error_of(lambda: load_env(f"inspect:{FILE}@nothing")),
                    error_of(lambda: load_env("inspect:no_such/task")),
                ],
                "names": names(),
            }
        )
    )


asyncio.run(main())
