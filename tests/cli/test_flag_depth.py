"""How many functions a reader follows from a flag to the engine."""

import asyncio
import contextvars
import sys
from pathlib import Path

import agentenv
from agentenv.cli.main import main
from agentenv.engines.scripted import ScriptedEngine

LIBRARY = str(Path(agentenv.__file__).parent)
RUN = ["run", "--env", "math_retry", "--limit", "1", "--engine", "scripted", "--max_error_share", "1"]


def frames_of_ours():
    """The library's functions on the stack, outermost first, each once."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(LIBRARY):
            found.append(frame.f_code)
        frame = frame.f_back
    return found[::-1]


def test_fourteen_functions_lead_from_the_flag_to_the_engine(tmp_path, monkeypatch):
    chains = []
    above = contextvars.ContextVar("above", default=())
    create_task = asyncio.BaseEventLoop.create_task

    def create_with_chain(loop, work, **more):
        known = above.get()
        above.set((*known, *(code for code in frames_of_ours() if code not in known)))
        try:
            return create_task(loop, work, **more)
        finally:
            above.set(known)

    async def generate(engine, *args, **kwargs):
        chains.append([*above.get(), *(code for code in frames_of_ours() if code not in above.get())])
        return await scripted(engine, *args, **kwargs)

    scripted = ScriptedEngine.generate
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_task", create_with_chain)
    monkeypatch.setattr(ScriptedEngine, "generate", generate)
    assert main([*RUN, "--out", str(tmp_path / "run")]) == 0
    names = [code.co_qualname for code in chains[0]]
    assert (names[0], names[-1]) == ("main", "sample")
    assert len(names) <= 14, names
