"""A process of Inspect: each line of its standard input asks for a sample of a task, each line of its output answers.

All samples that run at a time are tasks of one `eval`, since Inspect allows one in a process. Its first task is a pump:
it waits for lines and adds their tasks to the eval, and ends when no sample runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import anyio
import httpx
import openai
from inspect_ai import Task, TaskSource, enqueue_task, eval, task_with
from inspect_ai._eval.loader import load_tasks
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.model import GenerateConfig, get_model, modelapi
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.scorer import Scorer, value_to_float
from inspect_ai.solver import Generate, Solver, TaskState, chain, solver
from inspect_ai.util import LimitExceededError
from openai.types.chat import ChatCompletion

from agentenv.errors import ConfigError
from agentenv.interop.guest import OwnRandom

_MANY = 100_000
_ID = "agentenv_episode"
_OUTSIDE = (OSError, ImportError, httpx.TransportError, openai.APIConnectionError)
_is_scoring = ContextVar("is_scoring", default=False)


@modelapi(name="agentenv")
class Policy(OpenAICompatibleAPI):  # type: ignore[misc]  # without types
    """The policy of an episode, whose completions come from the asking process; it never grades itself."""

    episode: Episode

    async def _generate_completion(self, request: Mapping[str, Any], config: GenerateConfig) -> ChatCompletion:
        if _is_scoring.get():
            raise ConfigError(
                "expected a scorer that asks no model, or a model for its role, got one that asks the policy. "
                'Set env_kwargs to \'{"model_roles": {"grader": "PROVIDER/MODEL"}}\'.'
            )
        message = await self.episode.ask(request["messages"], request["tools"] or [])
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        body = {"id": "action", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        # Without counts, Inspect would download a tokenizer to estimate them.
        completion: ChatCompletion = ChatCompletion.model_validate(
            {**body, "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
        )
        return completion


class Episode:
    """A sample that runs: its request for a completion, and the error of the task's own code."""

    def __init__(self, number: int, send: Callable[[Mapping[str, Any]], None]) -> None:
        self.number, self.send = number, send
        self.reply: asyncio.Future[Mapping[str, Any]] | None = None
        self.error: Exception | None = None
        self.scopes: list[anyio.CancelScope] = []
        self.is_cancelled = False

    async def ask(self, messages: Sequence[Any], tools: Sequence[Any]) -> Mapping[str, Any]:
        """Return the policy's message.

        Raises:
            LimitExceededError: a limit of the episode ends the sample; Inspect scores it.
        """
        if self.reply is not None:
            raise ValueError("two requests for a completion at a time, where a policy has one conversation")
        self.reply = asyncio.get_running_loop().create_future()
        try:
            self.send({"id": self.number, "messages": messages, "tools": tools})
            answer = await self.reply
        finally:
            self.reply = None
        if "limit" in answer:
            raise LimitExceededError("turn", value=1, limit=1, message="a limit of the episode")
        message: Mapping[str, Any] = answer["message"]
        return message

    def cancel(self) -> None:
        """End the solver or the scorer that runs, and the next one at its first wait."""
        self.is_cancelled = True
        for scope in self.scopes:
            scope.cancel()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the error that the task's code raises, and end that code if the episode is cancelled."""
        with anyio.CancelScope() as scope:
            self.scopes.append(scope)
            if self.is_cancelled:
                scope.cancel()
            try:
                yield
            except Exception as error:
                self.error = error
                raise
            finally:
                self.scopes.remove(scope)
        if scope.cancelled_caught:
            raise RuntimeError("the episode was cancelled")

    def solver(self, inner: Solver) -> Solver:
        """Return a solver whose errors are noted."""

        @solver(name="task")  # type: ignore[untyped-decorator]
        def noted() -> Solver:
            async def solve(state: TaskState, generate: Generate) -> TaskState:
                with self.noting():
                    state = await inner(state, generate)
                return state

            return solve

        return noted()

    def scorer(self, inner: Scorer) -> Scorer:
        """Return a scorer of the same name and metrics whose errors are noted."""

        @functools.wraps(inner)
        async def score(*args: Any, **kwargs: Any) -> Any:
            token = _is_scoring.set(True)
            try:
                with self.noting():
                    found = await inner(*args, **kwargs)
                return found
            finally:
                _is_scoring.reset(token)

        return score


class Episodes(TaskSource):  # type: ignore[misc]  # without types
    """The tasks of an eval: a pump of lines, and a task of one sample for each of them."""

    def __init__(self, lines: queue.SimpleQueue[str], first: str, send: Callable[[Mapping[str, Any]], None]) -> None:
        self.lines, self.first, self.send = lines, first, send
        self.running: dict[int, Episode] = {}

    def initial_tasks(self) -> list[Task]:
        """Return the pump."""

        @solver  # type: ignore[untyped-decorator]
        def pump() -> Solver:
            async def solve(state: TaskState, generate: Generate) -> TaskState:
                self.take(self.first)
                while self.running or not self.lines.empty():
                    self.take(await anyio.to_thread.run_sync(self.lines.get))
                return state

            return solve

        return [Task(name="pump", dataset=[Sample(input="")], solver=pump())]

    def take(self, line: str) -> None:
        """Begin the sample that a line asks for, or cancel one; an empty line says that none runs."""
        if not line:
            return
        request = json.loads(line)
        number = request["id"]
        if "task" not in request:
            episode = self.running.get(number)
            if episode is not None and "cancel" in request:
                episode.cancel()
            elif episode is not None and episode.reply is not None:
                episode.reply.set_result(request)
            return
        try:
            task = self.task(request)
        except Exception as error:  # noqa: BLE001 -- the asking process raises it
            self.send({"id": number, **_failure(error)})
        else:
            enqueue_task(task)

    def task(self, request: Mapping[str, Any]) -> Task:
        """Return the task of one sample, with the policy as its model."""
        kwargs = dict(request["kwargs"])
        roles = kwargs.pop("model_roles", {})
        task = copy.copy(_loaded(request["task"], json.dumps(kwargs)))
        row = request["seed"] % len(task.dataset)
        sample = task.dataset[row]
        model = get_model(
            "agentenv/agentenv/policy",
            config=GenerateConfig(max_retries=0),
            base_url="http://agentenv.invalid",
            api_key="none",
            memoize=False,
        )
        episode = model.api.episode = Episode(request["id"], self.send)
        inner = chain(task.setup, task.solver) if task.setup else task.solver
        task_with(
            task,
            dataset=MemoryDataset([sample.model_copy(update={"id": sample.id or row + 1})], name=task.dataset.name),
            setup=None,
            solver=episode.solver(inner),
            scorer=[episode.scorer(one) for one in task.scorer],
            model=model,
            model_roles={**(task.model_roles or {}), **roles},
            epochs=1,
            score_on_error=False,
            metadata={**(task.metadata or {}), _ID: episode.number},
        )
        self.running[episode.number] = episode
        return task

    async def sample_complete(self, sample: EvalSample, task: Task) -> None:
        """Send the values of the scorers, or the error."""
        episode = self.running.get((task.metadata or {}).get(_ID, -1))
        if episode is None:
            return
        scores = sample.scores or {}
        first = next(iter(scores.values()), None)
        answer: dict[str, Any]
        if sample.error is not None and episode.error is not None:
            answer = _failure(episode.error)
        elif sample.error is not None:
            what = f"expected a sample that ran, got {sample.error.message}. Run it again."
            answer = {"kind": "infra", "error": what}
        elif first is None or isinstance(first.value, dict | list):
            found = "none" if first is None else f"{first.value!r:.200}"
            what = f"expected one value of the first scorer, got {found}. Choose another task."
            answer = {"kind": "contract", "error": what}
        else:
            values: dict[str, float] = {}
            for name, score in scores.items():
                parts = score.value if isinstance(score.value, dict) else {"": score.value}
                numbers = {key: value_to_float()(one) for key, one in parts.items() if not isinstance(one, list)}
                values |= {f"{name}/{key}".rstrip("/"): number for key, number in numbers.items()}
            limit = sample.limit.type if sample.limit else ""
            answer = {"values": values, "num_messages": len(sample.messages), "limit": limit}
        self.end(episode, answer)

    async def task_complete(self, log: EvalLog) -> None:
        """Send the error of a task that failed before its sample began."""
        episode = self.running.get((log.eval.metadata or {}).get(_ID, -1))
        if episode is not None:
            reason = log.error.message if log.error else "no sample"
            self.end(episode, {"kind": "infra", "error": f"expected a sample that ran, got {reason}. Run it again."})

    def end(self, episode: Episode, answer: Mapping[str, Any]) -> None:
        """Send an answer, and wake the pump if no sample runs."""
        del self.running[episode.number]
        self.send({"id": episode.number, **answer})
        if not self.running:
            self.lines.put("")


@functools.cache
def _loaded(name: str, kwargs: str) -> Task:
    with OwnRandom(0).active():
        tasks = load_tasks([name], json.loads(kwargs))
    if len(tasks) != 1:
        raise ConfigError(f"expected one task, got {len(tasks)}. Check the name.")
    task = tasks[0]
    sandboxes = {one.type for one in (task.sandbox, *(sample.sandbox for sample in task.dataset)) if one is not None}
    if sandboxes:
        raise ConfigError(
            f"expected a task without a sandbox, got {', '.join(sorted(sandboxes))}. It runs what the model writes: "
            "'local' is this machine, unconfined, and agentenv does not manage the others. Choose another task."
        )
    if task.sample_source is not None or not len(task.dataset):
        raise ConfigError("expected a dataset of samples, got none. Choose another task.")
    if not task.scorer:
        raise ConfigError("expected a task with a scorer, got none. Add one to the task.")
    return task


def _failure(error: Exception) -> dict[str, Any]:
    """Return the kind and the text of an error, which the asking process raises."""
    text = f"{type(error).__name__}: {error}"[:500]
    if isinstance(error, ConfigError):
        return {"kind": "config", "error": str(error)}
    if isinstance(error, _OUTSIDE):
        return {"kind": "infra", "error": f"expected its data and services, got {text}. Install what it names."}
    return {"kind": "contract", "error": f"expected a task that runs, got {text}. Report it to its author."}


def main() -> None:
    """Run evals for the lines of the standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a task's own output must not be read as an answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # the asking process ended, whatever a task waits for

    def send(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    threading.Thread(target=read, daemon=True).start()
    while True:
        first = lines.get()
        with tempfile.TemporaryDirectory() as logs:
            if first:
                eval(
                    Episodes(lines, first, send),
                    model="none/none",
                    display="log",
                    log_dir=logs,
                    log_level="critical",
                    log_samples=False,
                    log_realtime=False,
                    score_display=False,
                    ctl_server=False,
                    max_tasks=_MANY,
                    max_connections=_MANY,
                )


if __name__ == "__main__":
    main()
