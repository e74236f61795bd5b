"""`agentenv run --agent_func_path` for each file named; a JSON line of what came out for each. Run by a test."""

import json
import sys
from pathlib import Path

from agentenv.cli.main import main
from agentenv.runs.records.directory import read_trajectories

FILES = Path(__file__).parents[1] / "interop" / "agent_funcs"
SCRIPT = json.dumps({"script": ["4 = 1", "I say 7 is 42 = 42"]})


def told(trajectory):
    error = trajectory.error and f"{trajectory.error.type}: {trajectory.error.message}"
    return [error, len(trajectory.turns), trajectory.reward, str(trajectory.stop_reason)]


if __name__ == "__main__":
    out, names = Path(sys.argv[1]), sys.argv[2:]
    (out / "tasks.jsonl").write_text(json.dumps({"prompt": "What is 6 x 7?", "label": "42"}) + "\n")
    for name in names:
        run = out / name
        flags = ["--model", "tiny-math", "--engine", "scripted", "--engine_args", SCRIPT, "--n", 2, "--out", run]
        command = ["run", "--agent_func_path", FILES / f"{name}.py", "--data", out / "tasks.jsonl", *flags]
        code = main([*map(str, command), "--progress", "none"])
        print("FILE", json.dumps([name, code, [told(trajectory) for trajectory in read_trajectories(run)]]))
    import openrlhf.utils.agent as agent

    names = ("AgentExecutorBase", "AgentInstanceBase", "MultiTurnAgentExecutor")
    print("MODULE", json.dumps([getattr(agent, "__file__", None), [getattr(agent, n).__module__ for n in names]]))
