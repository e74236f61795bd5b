"""OpenEnv's environments in our loop, and ours played by OpenEnv's client; prints what came of it, as JSON."""

import asyncio
import contextlib
import dataclasses
import json
import random
import sys
from functools import partial
from pathlib import Path

from agentenv import Limits, ScriptedEngine, load_env, run_episode
from agentenv._util.calls import create
from agentenv._util.http.responses import UvicornServer
from agentenv.chat.chat import Chat
from agentenv.core.dataset import in_messages, read_tasks
from agentenv.core.types import Task
from agentenv.engines.scripted import PlainTextTokenizer
from agentenv.episode.registry import env_source
from agentenv.episode.setup import EpisodeKey
from agentenv.errors import AgentEnvError
from agentenv.interop.openenv_guest import env_class
from agentenv.interop.openenv_server import ServedTasks, openenv_app
from tests.peers.played import error_of, said

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


async def episode(env, actions, *, seed=0, task=None, limits=None, **kwargs):
    tokenizer = PlainTextTokenizer()
    cls = load_env(env) if isinstance(env, str) else env
    return await run_episode(
        partial(create, cls, kwargs),
        task or Task([{"role": "user", "content": "x"}]),
        engine=ScriptedEngine(list(actions), tokenizer),
        chat=Chat(tokenizer),
        limits=limits or Limits(max_length=1_000_000, max_turns=len(actions)),
        key=EpisodeKey(f"{seed}", seed=seed),
    )


def facts(trajectory):
    results = [
        turn.result and [turn.result.observation, turn.result.reward, turn.result.score, turn.result.info]
        for turn in trajectory.turns
    ]
    return {
        "prompt": trajectory.prompt[0]["content"] if trajectory.prompt else None,
        "tools": [tool["function"]["name"] for tool in trajectory.tools],
        "turns": [[turn.action, result] for turn, result in zip(trajectory.turns, results, strict=True)],
        "reward": trajectory.reward,
        "stop": str(trajectory.stop_reason),
        "error": trajectory.error and [trajectory.error.type, trajectory.error.message, str(trajectory.error.kind)],
    }


async def theirs():
    found = {}
    random.seed(1)
    numbers = random.getstate()
    guesses = ("50", '{"number": 60}', "a dozen", '{"number": "x"}')
    alone = [facts(await episode("openenv:guessing_env", guesses, seed=seed)) for seed in range(4)]
    together = await asyncio.gather(*(episode("openenv:guessing_env", guesses, seed=seed) for seed in range(4)))
    found["alone"], found["same"] = alone, [facts(one) for one in together] == alone
    found["process_undisturbed"] = random.getstate() == numbers
    for name, guess in (("crash", "666"), ("unpaid", "777"), ("cut", "888")):
        found[name] = facts(await episode("openenv:guessing_env", ("50", guess)))
    every = await episode("openenv:guessing_env", list(map(str, range(10, 100))))
    found["right"] = facts(await episode("openenv:guessing_env", ("9", every.turns[-1].action), low=11))
    tools = (CALL % ("turn", '{"hours": 5}'), "no call", CALL % ("turn", '{"hours": 7}'))
    found["tools"] = facts(await episode("openenv:clock_env", tools))
    wrong = (CALL % ("turn", '{"hours": "x"}'), CALL % ("no", "{}"))
    found["wrong_tools"] = facts(await episode("openenv:clock_env", wrong))
    return found


async def played(url, actions, **reset):
    from openenv import GenericEnvClient

    async with GenericEnvClient(base_url=url) as client:
        results = [await client.reset(**reset)]
        for action in actions:
            results.append(await client.step({"message": action}))
            if results[-1].done:
                break
    return [dataclasses.asdict(one) for one in results]


async def served(app, play):
    server = UvicornServer("test", app, ws="auto")
    port = await server.start("127.0.0.1", 0)
    try:
        return await play(f"http://127.0.0.1:{port}")
    finally:
        await server.close(5)


@contextlib.asynccontextmanager
async def serving(name):
    """What `agentenv serve` says of an environment: its line, and the exit code after a signal at the end."""
    words = ["-m", "agentenv.cli", "serve", name, "--port", "0"]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    said = {"line": (await process.stdout.readline()).decode()}
    try:
        yield said
    finally:
        process.terminate()
        said["rc"] = await process.wait()


async def ours(name, candidates):
    """Episodes of the first tasks by OpenEnv's client at `agentenv serve`, at the same time, and by our loop."""
    source = env_source(name, {})
    file = str(next(iter(source.datasets.values())))
    tasks = [in_messages(task) for task in read_tasks(file, needs_label=source.cls.needs_label)]
    actions = [candidates(task) for task in tasks[:24]]
    limits = Limits(max_length=1_000_000)
    async with serving(name) as said:
        url = said["line"].split(" at ")[1].split(",")[0]
        by_client = await asyncio.gather(*(played(url, each, index=i, seed=i) for i, each in enumerate(actions)))
        words = ["-m", "openenv.cli", "validate", "--url", url, "--json"]
        process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
        validated = json.loads((await process.communicate())[0])
    by_loop = [await episode(source.cls, each, seed=i, task=tasks[i], limits=limits) for i, each in enumerate(actions)]
    return {
        "command": said,
        "validated": validated,
        "client": [[[one["reward"], one["metadata"].get("score")] for one in each[1:]] for each in by_client],
        "loop": [[[turn.result.reward, turn.result.score] for turn in one.turns] for one in by_loop],
        "stops": [
            [each[-1]["metadata"].get("stop_reason") for each in by_client], [str(one.stop_reason) for one in by_loop]
        ],
        "prompts": [
            [[each[0]["observation"].get(name) for name in ("messages", "tools")] for each in by_client],
            [[list(one.prompt), list(one.tools)] for one in by_loop],
        ],
    }  # fmt: skip


async def refusals(folder):
    """What a client gets where our environment fails, and what our loop gets where a server is lost."""
    (folder / "broken.py").write_text(
        "from agentenv import AgentInstance\nclass Broken(AgentInstance):\n"
        "    needs_label = False\n    def step(self, states):\n        raise ValueError('broken')\n"
    )
    source = env_source(f"{folder}/broken.py", {})
    broken = openenv_app(ServedTasks(source, [Task([{"role": "user", "content": "x"}], task_id="0")]))

    async def fails(url):
        try:
            return await played(url, ["y"])
        except RuntimeError as error:
            return str(error)

    found = {"failed": await served(broken, fails)}
    from guessing_env.server.app import app

    server = UvicornServer("test", app, ws="auto")
    url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    found["by_url"] = facts(await episode(f"openenv:{url}", ("50", "888")))
    env = load_env(f"openenv:{url}")()
    await env.reset({"seed": 0, "observation": "x"})
    await server.close(0.1)
    for name, call in (("lost", lambda: asyncio.to_thread(env.step, {"action_text": "50"})), ("gone", None)):
        try:
            await (call() if call else load_env(f"openenv:{url}")().reset({"seed": 0, "observation": "x"}))
        except AgentEnvError as error:
            found[name] = said(error)
    await env.close()
    for name in ("nowhere_env", "coding_env"):
        found[name] = error_of(lambda name=name: env_class(name))
    return found


def in_gymnasium():
    import agentenv.gym

    env = agentenv.gym.make("openenv:guessing_env", data="gymnasium_seeds")
    first, _ = env.reset(seed=3)
    return [first, list(env.step("50"))[1:4]]


async def main():
    found = {"theirs": await theirs(), "refusals": await refusals(Path.cwd())}
    found["math_retry"] = await ours("math_retry", lambda task: ["#### 1", "none", f"#### {task.label}"])
    found["guess_number"] = await ours("guess_number", lambda task: ["8", "x", "12", "4"])
    calls = [CALL % ("calculator", '{"expression": "6 * 7"}'), CALL % ("no", "{}")]
    found["tool_use"] = await ours("tool_use", lambda task: [*calls, f"#### {min(task.label, '4')}"])
    found["gymnasium"] = await asyncio.to_thread(in_gymnasium)
    print(json.dumps(found))


asyncio.run(main())
