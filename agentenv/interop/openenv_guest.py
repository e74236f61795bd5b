"""OpenEnv's environments: `--env openenv:echo_env` for an installed one, `--env openenv:http://HOST:8000` for a server.

Source: openenv/core/env_server/http_server.py and types.py, 0.10.0. A session is a WebSocket at `/ws`; each message has
one answer, and `GET /schema` has the action's JSON schema. OpenEnv's own client opens a new session where one was lost,
without a reset; here a lost session ends the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import httpx

from agentenv._util.calls import call
from agentenv._util.http.json_bodies import json_text, parse_json
from agentenv._util.http.responses import UvicornServer
from agentenv._util.loop_thread import LoopThread
from agentenv._util.suggest import did_you_mean
from agentenv.core.agent import ResetState, StepState
from agentenv.core.types import Message, StepResult, as_flag
from agentenv.errors import AgentEnvError, ConfigError, ContractError, InfraError
from agentenv.interop.guest import Guest, answer_of, clipped, guest_class, import_library
from agentenv.tools.calling import MalformedCall, result_message

_RUNS_ACTIONS = frozenset(
    {"coding_env", "coding_tools_env", "git_env", "julia_env", "jupyter_env", "kernrl", "repl_env"}
)
"""Environments of OpenEnv's repository that run what the model writes, in the process of their server."""
_FULL_S = 30.0
"""Longest wait for a session of a server that has no free one."""
_MAX_BYTES = 16 << 20
"""Longest message of a server."""


class ServerRefused(InfraError):
    """A server answered with an error; `code` is OpenEnv's."""

    def __init__(self, message: str, code: str = "", errors: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.code, self.errors = code, errors


class ServedEnvFailed(AgentEnvError, RuntimeError):
    """The code of a server's environment raised: OpenEnv's EXECUTION_ERROR, which an episode does not try again.

    Source: OpenEnv's tutorial of MCP environments, which calls such errors of tools bugs in the environment, and those
    of the transport and of time limits infrastructure.
    """


@dataclass(frozen=True, slots=True)
class ActionForm:
    """The JSON schema of a server's action, and how text becomes one."""

    schema: Mapping[str, Any]

    @property
    def _field(self) -> str | None:
        """The one field that an action needs, which the policy may write without its name."""
        fields = [name for name in self.schema.get("properties", {}) if name != "metadata"]
        needed = [name for name in self.schema.get("required", ()) if name in fields] or fields
        return needed[0] if len(needed) == 1 else None

    @property
    def rule(self) -> str:
        """What the policy is told of the form of its actions."""
        fields = {name: form for name, form in self.schema.get("properties", {}).items() if name != "metadata"}
        shown = {"properties": fields, **{key: self.schema[key] for key in ("required", "$defs") if key in self.schema}}
        kind = "a JSON object" if self._field is None else f"only the value of {self._field!r}, or with a JSON object"
        return f"Answer with {kind} of this schema: {json.dumps(shown, ensure_ascii=False)}"

    def read(self, text: str) -> Mapping[str, Any] | None:
        """Return the action that a text says; None if it is not in the form. The server checks its values."""
        field, text = self._field, text.strip()
        if field is not None and self.schema["properties"][field].get("type") == "string":
            return {field: text}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        if isinstance(value, dict) and (field is None or field in value):
            return value
        return None if field is None else {field: value}


class ServerSession:
    """One session of a server, from its first message to `close`.

    Raises:
        InfraError: the server cannot be reached.
    """

    def __init__(self, url: str, *, is_here: bool) -> None:
        self._url = url
        self._library = import_library("websockets.sync.client", "openenv")
        self._exceptions = import_library("websockets.exceptions", "openenv")
        # A ping draws from the global random numbers, which are the episode's if the server is in this process.
        options: dict[str, Any] = {"ping_interval": None, "proxy": None} if is_here else {}
        try:
            address = f"ws{url.removeprefix('http')}/ws"
            self._socket: Any = self._library.connect(address, max_size=_MAX_BYTES, **options)
        except (OSError, self._exceptions.WebSocketException) as error:
            raise InfraError(f"{url}: expected an OpenEnv server, got {error!r:.300}. Start it.") from error

    def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer.

        Raises:
            ServedEnvFailed: the environment raised.
            ServerRefused: the answer is another error.
            InfraError: the connection was lost.
        """
        text = json.dumps({"type": kind, "data": data})
        try:
            # A server without a free session says so and closes; the answer can still be read.
            with contextlib.suppress(self._exceptions.ConnectionClosed):
                self._socket.send(text)
            answer = parse_json(self._socket.recv(decode=False))
        except (OSError, ValueError, self._exceptions.WebSocketException) as error:
            raise InfraError(
                f"{self._url}: {kind}: expected an answer, got {error!r:.300}. See the server's log."
            ) from error
        found: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            code, message = str(found.get("code", "")), str(found.get("message", ""))
            text = f"{self._url}: {kind}: expected an observation, got {code}: {message:.500}. See the server's log."
            if code == "EXECUTION_ERROR":
                raise ServedEnvFailed(text)
            raise ServerRefused(text, code, found.get("errors") or ())
        return found

    def close(self) -> None:
        """End the session; a call that waits for its answer ends, too."""
        self._socket.close()


class OpenEnvGuest(Guest):
    """An environment of an OpenEnv server. `--env_kwargs` are arguments of its `reset`, beside the seed.

    The policy sees the fields of each observation as JSON, or as text if there is only one. Its actions are the text of
    the one field that an action needs, a JSON object, or calls of the server's tools. The rewards are the server's; the
    score is their sum so far, in [0, 1].

    info: numbers of the observation's metadata; invalid_action (0/1); at the end the last observation as `end`.
    """

    url: ClassVar[str] = ""
    """Address of the server; empty: the environment is installed, and each episode has a server in this process."""
    session: ServerSession | None = None
    address: str = ""
    is_closed: bool = False

    async def reset(self, states: ResetState) -> ResetState:  # type: ignore[override]  # a Guest's is plain
        """Open a session, wait for a free one if need be, and return the first observation, with the server's tools.

        Raises:
            InfraError: the server cannot be reached, or has no free session.
            ServedEnvFailed: the environment raised.
        """
        full_until = time.monotonic() + _FULL_S
        while True:
            try:
                begun: ResetState = await call(super().reset, states)
            except ServerRefused as error:
                if error.code != "CAPACITY_REACHED" or time.monotonic() > full_until:
                    raise
                await asyncio.sleep(0.05)
                continue
            return {**begun, "tools": self.tools} if self.tools else begun

    def begin(self, seed: int) -> str:
        """Open a session, reset it, and return its first text."""
        self._release()
        self.address = self.url or _lease(self.spec.partition(":")[2])
        self.session = ServerSession(self.address, is_here=self.is_here)
        self.form = action_form(self.address, os.getpid())
        if self.is_closed:  # the episode was cancelled, and this thread is late
            self._release()
            raise InfraError(f"{self.spec}: reset: expected a running episode, got a closed one. Run it again.")
        first = self.session.ask("reset", {**self.kwargs, "seed": seed % 2**32})  # numpy takes no larger one
        self.total, self.tools = 0.0, list[dict[str, Any]]()
        text = _text(first.get("observation") or {})
        if not {"tool_name", "arguments"} <= set(self.form.schema.get("properties", ())):  # an action is not a call
            return f"{text}\n\n{self.form.rule}".strip()
        listed = self.session.ask("step", {"type": "list_tools"})["observation"]["tools"]
        for tool in listed:
            named = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
            self.tools.append({"type": "function", "function": named})
        return text or "Call the tools."

    def step(self, states: StepState) -> StepResult:  # type: ignore[override]  # in a separate thread
        """Step the server's environment with the text of the answer, or with each of its tool calls.

        Raises:
            ServedEnvFailed: the environment raised.
            InfraError: the session was lost.
            ContractError: a reward is not a number, or the last one is missing.
        """
        with self._in_library("step"):
            if not self.tools:
                return self.act(answer_of(states))
            items = states["tool_calls"].items
            if not items:
                return StepResult("Call one of the tools.", info={"invalid_action": 1.0})
            messages: list[Message] = []
            reward, last = 0.0, StepResult()
            for item in items:
                if isinstance(item, MalformedCall):
                    messages.append(result_message(item, f"Error: {item.problem}"))
                    continue
                last = self._stepped({"type": "call_tool", "tool_name": item.name, "arguments": dict(item.arguments)})
                messages.append(result_message(item, last.observation))
                reward += last.reward
                if last.done:
                    break
            return replace(last, observation=messages, reward=reward)

    def act(self, action: str) -> StepResult:
        """Step with a text; what the server does not accept as an action becomes a message to the policy."""
        read = self.form.read(action)
        try:
            return self._invalid("no such object") if read is None else self._stepped(read)
        except ServerRefused as error:
            if error.code != "VALIDATION_ERROR":
                raise
            wrong = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in error.errors]
            return self._invalid("; ".join(wrong) or "an invalid one")

    def _invalid(self, problem: str) -> StepResult:
        return StepResult(f"Not an action: {problem}. {self.form.rule}", info={"invalid_action": 1.0})

    def _stepped(self, action: Mapping[str, Any]) -> StepResult:
        if self.session is None:
            raise InfraError(f"{self.spec}: step: expected an open session, got a closed one. Run the episode again.")
        answer = self.session.ask("step", action)
        observation, reward, done = answer.get("observation") or {}, answer.get("reward"), answer.get("done", False)
        done = as_flag(done, f"{self.spec}: done")
        if done and reward is None:
            raise ContractError(f"{self.spec}: expected a reward at the end, got none. Report it to the environment.")
        number = 0.0 if reward is None else self.number(reward)
        self.total += number
        metadata = observation.get("metadata") or {}
        info = {key: float(value) for key, value in metadata.items() if isinstance(value, bool | int | float)}
        is_cut = done and bool(metadata.get("truncated") or observation.get("truncated"))
        text = _text(observation)
        return StepResult(
            text,
            reward=number,
            score=clipped(self.total),
            terminated=done and not is_cut,
            truncated=is_cut,
            info=info | ({"end": text} if done else {}),
        )

    async def close(self) -> None:
        """End the session."""
        self.is_closed = True
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()
            if self.is_here:
                _free(self.spec, os.getpid()).append(self.address)


def _text(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: a tool's answer, or the fields; metadata only if there is nothing else."""
    fields = {key: value for key, value in observation.items() if key != "metadata" and value not in (None, "", [], {})}
    if "tool_name" in fields:
        error, result = fields.get("error"), fields.get("result")
        parts = result.get("content", ()) if isinstance(result, dict) else ()
        texts = [str(part["text"]) for part in parts if "text" in part]
        return f"Error: {error['message']}" if error else "\n".join(texts) or json_text(result, ensure_ascii=False)
    fields = fields or dict(observation.get("metadata") or {})
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json_text(fields, ensure_ascii=False)


@functools.cache
def _free(spec: str, pid: int) -> list[str]:
    """Return the addresses of the servers of an installed environment in this process that no episode uses."""
    return []


@functools.cache
def _loop(pid: int) -> LoopThread:
    return LoopThread("agentenv-openenv")


def _lease(name: str) -> str:
    """Return the address of a server for one episode, whatever the number of sessions that it allows.

    Its application is made by running the module of the environment's server once more, which other modules do not see.
    """
    with contextlib.suppress(IndexError):
        return _free(f"openenv:{name}", os.getpid()).pop()
    spec = importlib.util.find_spec(f"{name}.server.app")
    if spec is None or spec.loader is None:
        raise InfraError(f"openenv:{name}: expected its module server.app, got none. Install it again.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = UvicornServer(f"openenv:{name}", module.app, ws="auto", ws_ping_interval=None, ws_max_size=_MAX_BYTES)
    return f"http://127.0.0.1:{_loop(os.getpid()).run(server.start('127.0.0.1', 0))}"


@functools.cache
def action_form(url: str, pid: int) -> ActionForm:
    """Return the form of a server's actions, asked once in a process.

    Raises:
        InfraError: the server cannot be reached, or has no schema.
    """
    try:
        return ActionForm(httpx.get(f"{url}/schema", timeout=_FULL_S).raise_for_status().json()["action"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise InfraError(f"{url}/schema: expected an OpenEnv server's schema, got {error!r:.300}. Start it.") from error


@functools.cache
def env_class(name: str) -> type[OpenEnvGuest]:
    """Return the class of an installed environment by its module's name, or of a server by its address.

    Raises:
        ConfigError: there is none, its server cannot be imported, or it runs what the model writes.
        MissingDependency: OpenEnv, or something that the environment imports, is not installed.
    """
    import_library("websockets", "openenv")
    if name.startswith(("http://", "https://")):
        cls = guest_class(OpenEnvGuest, f"openenv:{name}", f"OpenEnv's server {name}.", None)
        cls.url, cls.is_here = name.rstrip("/"), False
        return cls
    if name in _RUNS_ACTIONS:
        raise ConfigError(
            f"--env openenv:{name}: expected an environment that only reads actions, got one that runs them."
            " Start its server in a container, and name that: --env openenv:http://HOST:PORT."
        )
    if not name.isidentifier() or importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"--env openenv:{name}: expected the address of a server or an installed environment, got neither."
            f"{did_you_mean(name, names())} `agentenv list --from openenv` shows those of installed packages."
        )
    try:
        import_library(f"{name}.server.app", "openenv", f"'agentenv-rl[openenv]', and what {name} requires")
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, AgentEnvError):
            raise
        raise ConfigError(
            f"--env openenv:{name}: expected to import {name}.server.app, got {error!r:.300}. Fix what it names."
        ) from error
    return guest_class(OpenEnvGuest, f"openenv:{name}", f"OpenEnv's {name}.", None)


def names() -> dict[str, str]:
    """Return the modules with a server of installed packages named openenv-*, each with its package.

    Raises:
        MissingDependency: OpenEnv is not installed.
    """
    import_library("openenv", "openenv")
    found = {}
    for package in importlib.metadata.distributions():
        if package.name.lower().startswith("openenv-"):
            modules = {file.parts[0] for file in package.files or () if file.parts[1:] == ("server", "app.py")}
            found.update(dict.fromkeys(modules - _RUNS_ACTIONS, f"Package {package.name} {package.version}."))
    return dict(sorted(found.items()))
