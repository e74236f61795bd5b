"""How many functions a reader follows from a flag to the engine, and how many files take the flags of a run."""

import asyncio
import contextvars
import dataclasses
import sys
import threading
from pathlib import Path

import agentenv
from agentenv.cli.main import main
from agentenv.engines.scripted import ScriptedEngine
from agentenv.runs import config

LIBRARY = str(Path(agentenv.__file__).parent)
FLAGS = tuple(each for each in vars(config).values() if dataclasses.is_dataclass(each))
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


def test_fifteen_files_take_the_flags_of_a_run_or_a_group_of_them(tmp_path):
    files = set()

    def on_call(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY):
            values = [
                frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            ]
            if any(isinstance(value, FLAGS) for value in values):
                files.add(str(Path(code.co_filename).relative_to(LIBRARY)))

    threading.setprofile(on_call)
    sys.setprofile(on_call)
    try:
        assert main([*RUN, "--out", str(tmp_path / "run")]) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert "runs/prepare.py" in files
    assert len(files) <= 15, sorted(files)
