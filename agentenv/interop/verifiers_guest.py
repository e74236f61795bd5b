"""Tasksets of verifiers 0.4: `--env verifiers:reverse-text`, one agent, in verifiers' own rollout."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pkgutil
import sys
from importlib.metadata import distributions
from itertools import islice
from types import ModuleType
from typing import Any

from agentenv.core.agent import ResetState, StepState
from agentenv.core.types import Message, StepResult
from agentenv.errors import ConfigError, ContractError, InfraError, MissingDependency
from agentenv.interop.guest import Guest, OwnRandom, clipped, guest_class, import_library, text_of_content

NUM_TASKS = 1000
"""A seed chooses one of so many first tasks of a taskset."""
_HARNESS = "agentenv_seat"
_OUTSIDE = ("SandboxError", "InterceptionError", "TunnelError", "ProviderError", "ToolsetError")
"""Errors of verifiers that are not the environment's."""
_ASKED, _OVER = "asked", "over"


class VerifiersTask(Guest):
    """A task of a taskset of verifiers, played by one agent in verifiers' own rollout.

    verifiers asks for each completion and the policy's action is the answer. The reward comes at the end: the sum of
    the task's rewards by their weights; the score is the same, in [0, 1].

    info of the last turn: each reward and metric by its name; stop_condition (text).
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.answer: asyncio.Future[str] | None = None
        self.rollout: asyncio.Task[Any] | None = None
        self.seen: list[Message] = []

    async def reset(self, states: ResetState) -> ResetState:  # type: ignore[override]  # Guest's are for threads
        """Begin verifiers' rollout of a task, and return the messages of its first request, which replace the prompt.

        Raises:
            InfraError: the taskset lacks its data.
            ConfigError: it does not fit.
        """
        env, task = await asyncio.to_thread(self._load, states.get("seed") or 0)
        self.rollout = asyncio.create_task(self._play(env, task))

        def ended(rollout: asyncio.Task[Any]) -> None:
            if not rollout.cancelled():
                rollout.exception()  # `_next` raises it, where a call waits for it
            self.events.put_nowait((_OVER, rollout))

        self.rollout.add_done_callback(ended)
        result = await self._next()
        if isinstance(result, StepResult):
            raise ContractError(f"{self.spec}: expected a request for a completion, got none. Report it to its author.")
        return {**states, "observation": result}

    async def step(self, states: StepState) -> StepResult:  # type: ignore[override]
        """Answer verifiers' request with the text of the action.

        Raises:
            InfraError: a part of verifiers failed that is not the environment's.
            ContractError: the environment begins a second conversation, or its code failed.
        """
        assert self.answer is not None
        self.seen.append({"role": "assistant", "content": states["action_text"]})
        self.answer.set_result(states["action_text"])
        result = await self._next()
        return result if isinstance(result, StepResult) else StepResult(result)

    async def close(self) -> None:
        """Cancel the rollout and wait until its server is closed."""
        if self.answer is not None:
            self.answer.cancel()  # or verifiers' server would wait a minute for it
        if self.rollout is not None:
            self.rollout.cancel()
            await asyncio.wait([self.rollout])

    def _load(self, seed: int) -> tuple[Any, Any]:
        with self._in_library("reset"), OwnRandom(seed).active():
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config

            _install_harness()
            name = self.spec.partition(":")[2]
            seat = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}}
            config = {"taskset": {"id": name, **self.kwargs}, _roles(name)[0]: seat}
            env = load_environment(resolve_env_config(config))
            taskset, task = env.taskset, type(env.taskset).task_type()
            if taskset.toolsets(taskset.config) or task.toolsets(taskset.config.task):
                raise ConfigError(f"--env {self.spec}: expected a taskset without tools, got one that serves some.")
            running = sorted(
                name
                for name, one in inspect.getmembers(task, inspect.isfunction)
                if not one.__module__.startswith("verifiers.") and "runtime" in inspect.signature(one).parameters
            )
            if running:
                raise ConfigError(
                    f"--env {self.spec}: expected a task that is scored by its texts, got one that runs commands, in "
                    f"{', '.join(running)}. They would run on this machine, unconfined."
                )
            tasks = list(islice(env.taskset, seed % NUM_TASKS + 1))
        if not tasks:
            raise ConfigError(f"{self.spec}: expected tasks, got none. Check env_kwargs.")
        return env, tasks[seed % len(tasks)]

    async def _play(self, env: Any, task: Any) -> Any:
        """Run the episode with a server of chat completions, whose texts are the actions."""
        from aiohttp import web
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        async def complete(request: Any) -> Any:
            asked = (_ASKED, (await request.json())["messages"])
            self.answer = asyncio.get_running_loop().create_future()
            self.events.put_nowait(asked)
            message = {"role": "assistant", "content": await self.answer}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
            body = {"id": "action", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
            return web.json_response({**body, "usage": usage})

        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            client = EvalClientConfig(base_url=url, api_key_var="AGENTENV_NO_KEY")
            async with env.serving():
                return await env.run_episode(task, ModelContext(model="policy", client=client))
        finally:
            await runner.cleanup()

    async def _next(self) -> StepResult | list[Message]:
        """Return the new messages of the next request, or the result once the rollout is over."""
        kind, value = await self.events.get()
        if kind == _ASKED:
            messages: list[Message] = [{"role": m["role"], "content": text_of_content(m, self.spec)} for m in value]
            if messages[: len(self.seen)] != self.seen or len(messages) == len(self.seen):
                raise ContractError(
                    f"{self.spec}: expected one conversation that only grows, got another one. Choose a taskset whose "
                    "episode is one rollout."
                )
            new, self.seen = messages[len(self.seen) :], messages
            return new
        episode = value.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or len(episode.traces) != 1:
            found = "; ".join(f"{one.type}: {one.message}" for one in errors)[:500] or f"{len(episode.traces)} rollouts"
            raised = InfraError if any(one.type in _OUTSIDE for one in errors) else ContractError
            raise raised(f"{self.spec}: expected one rollout without errors, got {found}.")
        trace = episode.traces[0]
        rewards = {name: (self.number(one.score), one.weight) for name, one in trace.rewards.items()}
        reward = sum(score * weight for score, weight in rewards.values())
        metrics = {name: value for name, value in trace.metrics.items() if isinstance(value, bool | int | float)}
        info: dict[str, float | str] = {name: float(value) for name, value in metrics.items()}
        info |= {name: score for name, (score, _) in rewards.items()}
        info |= {"stop_condition": str(trace.stop_condition or "")}
        return StepResult(reward=reward, score=clipped(reward), terminated=True, info=info)


def messages_of(system: str | None, prompt: Any) -> list[Message]:
    """Return verifiers' prompt as messages, after its own system prompt, which replaces that of the task."""
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    messages = [one if isinstance(one, dict) else one.model_dump(exclude_none=True) for one in given]
    if not system:
        return messages
    return [{"role": "system", "content": system}, *(one for one in messages if one["role"] != "system")]


def _roles(name: str) -> list[str]:
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    return [key for key, field in env_config_type(name).model_fields.items() if isinstance(field.default, AgentConfig)]


@functools.cache
def _install_harness() -> None:
    """Put a harness under a name that verifiers imports: one request per turn, in this process."""
    import aiohttp
    import verifiers.v1 as vf

    class SeatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # without types
        """Ask for one completion of the conversation so far."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            messages = messages_of(*self.resolve_prompt(data))
            body = {
                "model": ctx.model,
                "messages": [{k: m[k] for k in ("role", "content") if k in m} for m in messages],
            }
            timeout = aiohttp.ClientTimeout(total=None)
            async with (
                aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}, timeout=timeout) as session,
                session.post(f"{endpoint}/chat/completions", json=body) as reply,
            ):
                failed = reply.status != 200
                return vf.ProgramResult(int(failed), "", (await reply.text())[:500] if failed else "")

    module = ModuleType(_HARNESS)
    vars(module).update({"__all__": ["SeatHarness"], "SeatHarness": SeatHarness})
    sys.modules[_HARNESS] = module


@functools.cache
def env_class(name: str) -> type[VerifiersTask]:
    """Return the class of a taskset by its id in verifiers.

    Raises:
        ConfigError: there is no such taskset, or its environment has several agents.
        MissingDependency: verifiers, or something that the taskset imports, is not installed.
    """
    import_library("verifiers.v1", "verifiers")
    from verifiers.v1.utils.loaders import taskset_class

    try:
        cls = taskset_class(name)
        roles = _roles(name)
    except ModuleNotFoundError as error:
        if "not found (tried to import" not in str(error):
            raise MissingDependency(
                f"--env verifiers:{name}: expected its packages, got {error}. Install them."
            ) from error
        raise ConfigError(
            f"--env verifiers:{name}: expected an installed taskset, got none. Install its package, or put its folder "
            "on PYTHONPATH; `agentenv list --from verifiers` shows those of installed packages."
        ) from error
    except ImportError as error:
        raise MissingDependency(f"--env verifiers:{name}: expected its packages, got {error}. Install them.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"--env verifiers:{name}: expected a taskset, got {error}.") from error
    if len(roles) != 1:
        raise ConfigError(
            f"--env verifiers:{name}: expected one agent, got {', '.join(roles)}: agentenv has no policy for "
            "the others."
        )
    return guest_class(VerifiersTask, f"verifiers:{name}", f"Taskset {cls.__name__} of verifiers.", None)


def names() -> dict[str, str]:
    """Return the ids of verifiers' own tasksets and of installed packages that require verifiers, with a summary.

    Raises:
        MissingDependency: verifiers is not installed.
    """
    import_library("verifiers.v1", "verifiers")
    from verifiers.v1 import tasksets

    found = {module.name: "Part of verifiers." for module in pkgutil.iter_modules(tasksets.__path__)}
    for package in distributions():
        if any(required.partition(";")[0].strip().startswith("verifiers") for required in package.requires or ()):
            found[package.name] = f"Package {package.name} {package.version}."
    return dict(sorted(found.items()))
