"""How deep a reader must follow the calls from the runner to the engine and to the environment's step."""

import inspect
from pathlib import Path

import agentenv
from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.types import StepResult, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.runner import EpisodeRunner, plan
from agentenv.episode.setup import EpisodeSetup
from agentenv.episode.source import EnvSource

LIBRARY = str(Path(agentenv.__file__).parent)


def frames_of_ours():
    """The library's functions on the stack, outermost first."""
    frames = [frame for frame in inspect.stack() if frame.filename.startswith(LIBRARY)]
    return [frame.function for frame in reversed(frames)]


async def test_the_engine_is_six_calls_below_the_runner_and_the_step_eight():
    calls = {}

    class Env(AgentInstance):
        async def step(self, states):
            calls["step"] = frames_of_ours()
            return StepResult(reward=1.0, terminated=True)

    class Engine(ScriptedEngine):
        async def generate(self, prompt_token_ids, sampling, *, request_id):
            calls["generate"] = frames_of_ours()
            return await super().generate(prompt_token_ids, sampling, request_id=request_id)

    engine = Engine(["yes"])
    runner = EpisodeRunner(EnvSource(Env), EpisodeSetup(engine, Chat(engine.tokenizer)))
    await runner.run(plan([Task("Say yes.", task_id="t")], 1), lambda _: None)
    assert calls["generate"] == ["_work", "run_one", "run", "run", "generate", "sample"]
    # `bounded` starts a task, so the stack below `step` is `call` alone; above it stand the same four and two more.
    assert calls["step"] == ["call"]
    above = ["_work", "run_one", "run", "run", "step", "bounded"]
    assert len(above) + len(calls["step"]) + 1 <= 8
