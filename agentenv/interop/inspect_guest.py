"""Inspect's tasks: `--env inspect:FILE.py@TASK` or `--env inspect:PACKAGE/TASK`, solved and scored by Inspect itself.

Inspect runs one `eval` at a time in a process and changes what is global there (logging, environment variables). All
episodes of this process therefore share one process of Inspect, `inspect_worker.py`, which asks for each completion.
"""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from agentenv._util.suggest import did_you_mean
from agentenv.core.agent import ResetState, StepState
from agentenv.core.types import Message, StepResult
from agentenv.errors import AgentEnvError, ConfigError, ContractError, InfraError
from agentenv.interop.guest import Guest, clipped, guest_class, import_library, text_of_content
from agentenv.tools.calling import assistant_message

_ERRORS: dict[str, type[AgentEnvError]] = {"config": ConfigError, "contract": ContractError, "infra": InfraError}
_ids = itertools.count()


class GuestProcess:
    """A process of a library that answers messages, each by the `id` of its episode; it ends with this one.

    Messages are lines of JSON.
    """

    def __init__(self, module: str) -> None:
        self._waiting: dict[int, concurrent.futures.Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        command = [sys.executable, "-m", module]
        # Another session: Ctrl-C is for this process, whose end closes the pipe.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
        )
        threading.Thread(target=self._read, name=f"agentenv-{module}", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    def ask(self, message: dict[str, Any]) -> concurrent.futures.Future[dict[str, Any]]:
        """Send a message of an episode, by its `id`, and return the future of the next one that comes back.

        Raises:
            ConfigError: the arguments are not JSON.
        """
        future = concurrent.futures.Future[dict[str, Any]]()
        self._waiting[message["id"]] = future
        self._send(message)
        return future

    def end(self, number: int) -> None:
        """End an episode, which sends nothing more."""
        self._waiting.pop(number, None)
        self._send({"id": number, "cancel": True})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            text = json.dumps(message)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"env_kwargs: expected JSON, got {error}.") from error
        try:
            with self._lock:
                self._process.stdin.write(text + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError):  # ended, or ended and closed
            self._fail()

    def _read(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._answer(answer["id"], answer)
        self._process.wait()
        self._process.stdout.close()
        with self._lock, contextlib.suppress(OSError):  # a message that it did not read
            self._process.stdin.close()
        self._fail()

    def _fail(self) -> None:
        error = f"expected its process to run, got its end, {self._process.returncode}. Read what it printed."
        for number in list(self._waiting):
            self._answer(number, {"kind": "infra", "error": error})

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        future = self._waiting.pop(number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(answer)


_processes: dict[tuple[str, int], GuestProcess] = {}
_starting = threading.Lock()


def guest_process(module: str) -> GuestProcess:
    """Return the process that runs a module, started if need be; a forked process has its own."""
    key = module, os.getpid()
    with _starting:
        if key not in _processes or not _processes[key].is_alive:
            _processes[key] = GuestProcess(module)
        return _processes[key]


class InspectTask(Guest):
    """A task of Inspect: its solver asks for completions, and its first scorer decides the reward at the end.

    The seed chooses a sample of the task's dataset. The policy's action, with its calls of tools, answers each request.
    A value that is not a number becomes one by Inspect's `value_to_float`; the score is the reward, in [0, 1].
    `--env_kwargs` are arguments of the task, and `model_roles`, Inspect's models that grade or play a role, by role.

    info of the last turn: the value of each scorer by its name; num_messages; limit, the kind of the limit that ended
    the sample (text).
    """

    is_here = False
    process: GuestProcess | None = None

    async def reset(self, states: ResetState) -> ResetState:  # type: ignore[override]  # a Guest's are for threads
        """Begin a sample, and return the messages and tools of the first request, which replace the prompt.

        Raises:
            ConfigError: the task does not fit, or takes other arguments.
            ContractError: its solver asks for no completion, or failed.
            InfraError: something outside of the task failed.
        """
        self.process = guest_process("agentenv.interop.inspect_worker")
        self.id = next(_ids)
        self.seen, self.tools = list[Message](), list[dict[str, Any]]()
        first = {"task": self.spec.partition(":")[2], "kwargs": self.kwargs, "seed": states.get("seed") or 0}
        asked = await self._ask(first)
        if "messages" not in asked:
            raise ContractError(f"{self.spec}: expected a request for a completion, got none. Report it to its author.")
        self.seen, self.tools = asked["messages"], asked["tools"]
        begun: ResetState = {**states, "observation": self._shown(self.seen)}
        return {**begun, "tools": self.tools} if self.tools else begun

    async def step(self, states: StepState) -> StepResult:  # type: ignore[override]
        """Answer the request for a completion.

        Raises:
            ContractError: the solver begins another conversation, the solver or a scorer failed, or the score is not
                one number.
            InfraError: something outside of the task failed.
        """
        message: Message = {"role": "assistant", "content": states["action_text"]}
        if self.tools:
            message = assistant_message(states["tool_calls"], as_json=True)
        asked = await self._ask({"message": message})
        if "messages" not in asked:
            return self._last(asked)
        messages, seen = asked["messages"], self.seen
        new = messages[len(seen) + 1 :]
        if messages[: len(seen)] != seen or not new or asked["tools"] != self.tools:
            raise ContractError(
                f"{self.spec}: expected one conversation that only grows, with the same tools, got another one. Choose "
                "a task whose solver keeps it."
            )
        self.seen = messages
        return StepResult(self._shown(new))

    async def on_truncate(self, states: StepState) -> StepResult | None:
        """Return what Inspect's scorers say of the sample that a limit of the episode ends."""
        result = await self._ask({"limit": True})
        return self._last(result) if "values" in result else None

    async def close(self) -> None:
        """End the sample."""
        if self.process is not None:
            self.process.end(self.id)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        return [{**message, "content": text_of_content(message, self.spec)} for message in messages]

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process is not None
        answer = await asyncio.wrap_future(self.process.ask({"id": self.id, **message}))
        if "error" in answer:
            raise _ERRORS[answer["kind"]](f"{self.spec}: {answer['error']}")
        return answer

    def _last(self, answer: Mapping[str, Any]) -> StepResult:
        numbers = {name: self.number(value) for name, value in answer["values"].items()}
        reward = next(iter(numbers.values()))
        info: dict[str, float | str] = {"num_messages": float(answer["num_messages"]), "limit": answer["limit"]}
        return StepResult(reward=reward, score=clipped(reward), terminated=True, info=info | numbers)


def tasks_in(path: Path) -> list[str]:
    """Return the names of the functions of a file that Inspect's decorator `task` marks, without running it.

    Raises:
        ConfigError: it is not a readable Python file.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(f"--env inspect:{path}: expected a Python file, got {error}. Check the path.") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    is_task = re.compile(r"(?:[\w.]+\.)?task(?:\(|$)")
    return [one.name for one in functions if any(is_task.match(ast.unparse(each)) for each in one.decorator_list)]


@functools.cache
def env_class(name: str) -> type[InspectTask]:
    """Return the class of a task by its name in Inspect.

    Raises:
        ConfigError: there is no such file, task or package.
        MissingDependency: Inspect is not installed.
    """
    if importlib.util.find_spec("inspect_ai") is None:
        import_library("inspect_ai", "inspect")
    file, _, task = name.partition("@")
    if not file.endswith(".py"):
        packages = sorted({point.name for point in entry_points(group="inspect_ai")})
        if name.partition("/")[0] not in packages or "/" not in name:
            raise ConfigError(
                f"--env inspect:{name}: expected FILE.py@TASK or PACKAGE/TASK with a package of tasks "
                f"({', '.join(packages) or 'none is installed'}), got neither."
                f"{did_you_mean(name, names(), '`agentenv list --from inspect` shows the tasks of packages.')}"
            )
        return guest_class(InspectTask, f"inspect:{name}", f"Task {name} of Inspect.", None)
    path = Path(file).expanduser().resolve()
    found = tasks_in(path)
    if not task and len(found) == 1:
        task = found[0]
    if task not in found:
        raise ConfigError(
            f"--env inspect:{name}: expected one of the tasks {found} of the file, got {task!r}. "
            f"Write inspect:{file}@TASK."
        )
    return guest_class(InspectTask, f"inspect:{path}@{task}", f"Task {task} of Inspect, in {path.name}.", None)


def names() -> dict[str, str]:
    """Return the tasks of installed packages that register some with Inspect, as PACKAGE/TASK, with a summary.

    Raises:
        MissingDependency: Inspect, or something that a package imports, is not installed.
    """
    registry = import_library("inspect_ai._util.registry", "inspect")
    for point in entry_points(group="inspect_ai"):
        import_library(point.module, "inspect", point.dist.name if point.dist is not None else point.module)
    found = registry.registry_find(lambda info: info.type == "task")
    tasks = sorted(registry.registry_info(one).name for one in found)
    return {name: f"Task of {name.partition('/')[0]}." for name in tasks if "/" in name}
