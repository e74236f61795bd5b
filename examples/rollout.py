"""Run episodes from Python and look at them row by row, in a script or in a notebook.

python examples/rollout.py
expected last line: 8 episodes of 4 tasks
"""

import agentenv

if __name__ == "__main__":
    run = agentenv.rollout("math_retry", model="tiny-math", n=2, limit=4, max_tokens=32, progress="none")
    for row in run.rows():
        print(row["episode_id"], row["reward"], row["num_turns"], row["stop_reason"])
    print(f"{len(run)} episodes of {run.metrics.num_tasks} tasks")
