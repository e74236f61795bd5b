"""EnvAgentLoop: verl's agent loop over ours. verl's servers sample, our environment answers, tokens are never encoded
again.

Source: verl/experimental/agent_loop/agent_loop.py, trainer/ppo/v1/agent_loop_tq.py and workers/rollout/llm_server.py,
0.9.1. Each worker makes an instance for each row, from the entry of that name in the YAML file that
`actor_rollout_ref.rollout.agent.agent_loop_config_path` names:

    - name: agentenv
      _target_: agentenv.interop.verl.agent_loop.EnvAgentLoop
      env: math_retry
      limits: {max_turns: 3}

`rollout.agent.default_agent_loop=agentenv` chooses it, or a row's column `agent_name`. An installed environment needs
no file: our plugin registers it as `agentenv/NAME`.
"""

from __future__ import annotations

import itertools
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentenv._util.suggest import did_you_mean
from agentenv.chat.chat import ChatOptions
from agentenv.core.arguments import settings_from
from agentenv.core.dataset import read_rows
from agentenv.core.engine import Engine, engine_errors
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Limits, SamplingParams, StopReason, Task, own_limits
from agentenv.episode.registry import env_source, installed_envs
from agentenv.episode.runner import PlannedEpisode
from agentenv.episode.setup import EpisodeSetup
from agentenv.errors import ConfigError, ContractError, DataError, EngineError, PromptTooLong
from agentenv.interop._data_proto import plain
from agentenv.interop.hosted import (
    FailureCount,
    chat_of,
    client_params,
    problem_of,
    run_planned,
    stops_of,
    task_dataset,
    task_of,
)
from agentenv.interop.verl.records import to_records

logger = logging.getLogger(__name__)

_WHERE = "EnvAgentLoop"
_KEYS = ("env", "env_kwargs", "limits", "max_tokens", "chat_options")
"""Keys of an entry, besides `name` and hydra's own."""
_OF_VERL = frozenset(("name", "processor", "hf_model_type"))
"""Further arguments whose values a YAML file may hold, too. verl's others are objects."""
_TARGETS = (f"{__name__}.EnvAgentLoop", "agentenv.interop.verl.EnvAgentLoop")
_LOOPS_OF_VERL = ("single_turn_agent", "tool_agent")
"""What verl registers itself."""
_ROWS = itertools.count()
"""Numbers of the rows that verl does not number."""


def dataset(rows: Sequence[Mapping[str, Any] | Task], *, data_source: str | None = None) -> Any:
    """Return a `datasets.Dataset` in verl's columns, for `to_parquet`; each row holds its whole task.

    The `agent_name` of rows, verl's name of the entry that plays them, is a column, and so is `data_source`, by which
    verl groups validation: the argument, else the row's own, else "agentenv".

    verl shows the prompt, and drops rows whose prompt is too long. What the model sees comes from the environment's
    `reset`.

    Raises:
        MissingDependency: `datasets` is not installed.
        DataError: a row is not a task, has images, is not JSON, or lacks the `agent_name` that others have.
    """
    return task_dataset(rows, "interop.verl", data_source, "agent_name")


@dataclass(eq=False)
class VerlEngine(Engine):
    """The engine behind one episode: verl's client, and verl's two budgets of tokens."""

    server: Any
    """verl's LLMServerClient: `await generate(request_id, prompt_ids=, sampling_params=)`."""
    params: Mapping[str, Any]
    """verl's sampling parameters, which win over the episode's."""
    max_prompt: int
    """`rollout.prompt_length`, in tokens."""
    max_response: int
    """`rollout.response_length`, in tokens."""
    stops: frozenset[int]
    """Ids that end an action; verl's vLLM says "completed" for an action that was cut, too."""
    more: Mapping[str, Any]
    """Further arguments of each call."""
    versions: list[tuple[int | None, int | None]] = field(default_factory=list)
    """The oldest and the newest weights of each action so far, as verl's steps."""
    _session: str = field(default_factory=lambda: uuid.uuid4().hex)
    _num_prompt: int = 0

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.core.engine.Engine`.

        Raises:
            PromptTooLong: the first prompt is longer than `max_prompt`, or the response has no room left.
            ConfigError: the action must match a grammar.
            EngineError: verl's server failed.
        """
        num = len(prompt_token_ids)
        if request_id.endswith("/0"):  # the first action of an attempt
            self._num_prompt, self.versions = num, []
        if num > self.max_prompt and num == self._num_prompt:
            raise PromptTooLong(
                f"expected at most rollout.prompt_length={self.max_prompt} tokens, got {num}. Raise it, or remove the "
                "row."
            )
        room = min(self.max_response, self._num_prompt + self.max_response - num)
        if room < 1:
            raise PromptTooLong(f"expected room within rollout.response_length={self.max_response}, got none.")
        max_tokens = min(sampling.max_tokens or room, room)
        params = client_params(self.params, sampling, max_tokens, _WHERE)
        with engine_errors("generate"):
            out = await self.server.generate(
                self._session, prompt_ids=list(prompt_token_ids), sampling_params=params, **self.more
            )
        token_ids, reason = tuple(map(int, out.token_ids)), out.stop_reason
        if reason not in (None, "completed", "stop", "length", "aborted", "abort"):
            raise EngineError(f"generate: expected a stop reason of verl, got {reason!r}. Look at the server's log.")
        steps = out.extra_fields.get("global_steps")
        oldest, newest = (out.extra_fields.get(f"{which}_global_steps", steps) for which in ("min", "max"))
        self.versions.append((oldest, newest))
        is_cut = len(token_ids) >= max_tokens and token_ids[-1] not in self.stops | {*sampling.stop_token_ids}
        return Completion(
            token_ids,
            "abort" if reason in ("aborted", "abort") else "length" if is_cut else "stop",
            logprobs=None if out.log_probs is None else tuple(map(float, out.log_probs)),
            policy_version=oldest or 0,
        )

    @property
    def steps(self) -> dict[str, int | None]:
        """The oldest and newest weights of the episode, under verl's names, by which it drops stale samples."""
        oldest = [first for first, _ in self.versions if first is not None]
        newest = [last for _, last in self.versions if last is not None]
        return {"min_global_steps": min(oldest, default=None), "max_global_steps": max(newest, default=None)}


@lru_cache(maxsize=64)
def _source(env: str, env_kwargs: str) -> Any:
    """Return the source of episodes, one for each entry: verl makes an EnvAgentLoop for each row."""
    return env_source(env, json.loads(env_kwargs))


class EnvAgentLoop:
    """Runs a row's episode and returns verl's AgentLoopOutput. verl's worker constructs it.

    Args:
        trainer_config: verl's configuration, in its wrapper.
        server_manager: verl's client of the servers that sample.
        tokenizer: the policy's.
        env: an installed environment's name, `module:Attr` or `FILE.py:Attr`.
        env_kwargs: arguments of its constructor.
        limits: fields of `Limits`, by default with the class's `max_turns`. Without `max_length`: verl's
            `rollout.prompt_length` and `rollout.response_length` limit the tokens, or the class's, if that is less.
        max_tokens: maximum number of new tokens of one action; None: the room that is left.
        chat_options: fields of `ChatOptions`; `data.apply_chat_template_kwargs` goes to `chat_template_kwargs`.
        others: what verl passes besides, which is not used.

    Raises:
        ConfigError: the entry has an unknown key, or a value that its key does not take.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        env: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        chat_options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        for key, value in others.items():
            if key not in _OF_VERL and isinstance(plain(value), str | float | int | list | dict | None):
                advice = did_you_mean(key, _KEYS)
                raise ConfigError(f"{_WHERE}: expected keys among {', '.join(_KEYS)}, got {key!r}.{advice}")
        arguments = plain(env_kwargs) or {}
        if not isinstance(env, str) or not isinstance(arguments, dict):
            raise ConfigError(
                f"{_WHERE}: expected an environment's name in env and an object in env_kwargs, got {env!r} and "
                f"{arguments!r}. Change the entry."
            )
        config = trainer_config.config
        rollout = config.actor_rollout_ref.rollout
        self._max_prompt, self._max_response = int(rollout.prompt_length), int(rollout.response_length)
        self._server, self._tokenizer = server_manager, tokenizer
        self._sampling = SamplingParams(max_tokens=max_tokens, seed=config.data.get("seed"))
        self._source = _source(env, json.dumps(arguments, sort_keys=True))
        given = plain(limits)
        if isinstance(given, dict) and "max_length" in given:
            raise ConfigError(
                f"{_WHERE}.limits: expected no max_length, got {given['max_length']!r}. Set verl's "
                "rollout.prompt_length and rollout.response_length."
            )
        own = own_limits(self._source.cls, max_length=self._max_prompt + self._max_response)
        self._limits = settings_from(f"{_WHERE}.limits", given, Limits(**own))
        template = ChatOptions(chat_template_kwargs=plain(config.data.get("apply_chat_template_kwargs")) or {})
        self._options = settings_from(f"{_WHERE}.chat_options", plain(chat_options), template)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Run one episode and return its AgentLoopOutput; in verl's v1 trainer a list, one for each segment.

        Raises:
            InfraError: the episode failed.
            DataError: a segment does not fit into `rollout.prompt_length` and `rollout.response_length`.
            ContractError: the episode has several segments, and the trainer is v0.
        """
        engine = VerlEngine(
            self._server,
            sampling_params,
            max_prompt=self._max_prompt,
            max_response=self._max_response,
            stops=frozenset((*stops_of(self._tokenizer), self._tokenizer.eos_token_id)),
            more={"priority": int(row["priority"])} if "priority" in row else {},
        )
        chat = chat_of(self._tokenizer, self._options)
        setup = EpisodeSetup(engine, chat, self._sampling, self._limits)
        task = task_of(row["raw_prompt"], row, str(row.get("uid", "task")), self._source)
        # v1 numbers the siblings, v0's manager all rows of a step; a worker without a manager none.
        number = row.get("session_id", row.get("priority"))
        planned = PlannedEpisode(task, next(_ROWS) if number is None else int(number))
        (trajectory,) = await run_planned(self._source, setup, [planned])
        FailureCount(_WHERE).add(trajectory, problem_of(trajectory))
        if trajectory.stop_reason == StopReason.EPISODE_TIMEOUT:
            limit_s = self._limits.episode_timeout_s
            logger.warning("%s: %s ended after episode_timeout_s=%g", _WHERE, trajectory.episode_id, limit_s)
        outputs = [self._output(record, trajectory, engine) for record in to_records(trajectory)]
        if "session_id" in row:
            return outputs
        if len(outputs) != 1:
            raise ContractError(
                f"{_WHERE}: expected one segment with actions, got {len(outputs)} in {trajectory.episode_id}. verl's "
                "v0 trainer takes one sequence of a row: set trainer.use_v1=true."
            )
        return outputs[0]

    def _output(self, record: dict[str, Any], trajectory: Trajectory, engine: VerlEngine) -> Any:
        verl = import_module("verl.experimental.agent_loop.agent_loop")
        for key, most in (("prompt", self._max_prompt), ("response", self._max_response)):
            if (num := len(record[f"{key}_ids"])) > most:  # v0 would cut it, without a word
                raise DataError(
                    f"{_WHERE}: expected at most rollout.{key}_length={most} tokens, got {num} in "
                    f"{trajectory.episode_id}. Raise it, or remove the row."
                )
        reward, score = record["reward_score"], trajectory.score
        # The same keys in every row: verl takes them from the first one. A key `reward` would count twice.
        told = {
            "score": reward,
            "acc": reward if score is None else score,
            "truncated": float(trajectory.truncated),
        }
        extra = {**record.pop("extra_fields"), **engine.steps, "reward_extra_info": told}
        metrics = verl.AgentLoopMetrics(**record["metrics"])
        return verl.AgentLoopOutput(**{**record, "metrics": metrics}, extra_fields=extra)


def check(agent_loops: str | Path, files: Sequence[str | Path], default_agent_loop: str) -> None:
    """Construct our entries of a YAML file, and read our rows of verl's parquet files, as verl does after its start.

    Raises:
        ConfigError: the file has no list of entries, or two of one name. An entry lacks `name` or `_target_`, nearly
            names this class, has an unknown key, or a value that its key does not take.
        DataError: a row's `agent_name`, or `default_agent_loop` without it, names no loop, or a row of ours has no
            label that it needs.
    """
    rollout = SimpleNamespace(prompt_length=1, response_length=1)
    config = SimpleNamespace(data={}, actor_rollout_ref=SimpleNamespace(rollout=rollout))
    make = partial(EnvAgentLoop, SimpleNamespace(config=config), None, None)
    loops: dict[str, Callable[[], EnvAgentLoop] | None] = dict.fromkeys(_LOOPS_OF_VERL)
    loops |= {f"agentenv/{name}": partial(make, name) for name in installed_envs()}
    for name, entry in _entries(agent_loops).items():
        loops[name] = None
        if entry["_target_"] in _TARGETS:
            loops[name] = loop = partial(make, **{key: entry[key] for key in entry if not key.startswith("_")})
            try:
                loop()
            except ConfigError as error:
                raise ConfigError(f"{agent_loops}, entry {name!r}: {error}") from error
    sources: dict[str, Any] = {}
    for where, row in (each for file in files for each in read_rows(str(file))):
        name = row.get("agent_name", default_agent_loop)
        if name not in loops:
            advice = " Fill the column in all rows, or in none." if name is None else did_you_mean(str(name), loops)
            raise DataError(f"{where}: expected an agent_name among {', '.join(loops)}, got {name!r}.{advice}")
        if (make_loop := loops[name]) is None:
            continue
        if name not in sources:
            sources[name] = make_loop()._source
        task_of(row["prompt"], row, where, sources[name])


def _entries(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return the entries of verl's YAML file by name."""
    import yaml

    try:
        listed = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: expected YAML, got an error: {error}.") from error
    entries: dict[str, dict[str, Any]] = {}
    for entry in listed if isinstance(listed, list) and listed else (listed,):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
            raise ConfigError(f"{path}: expected a list of entries with name and _target_, got {entry!r:.200}.")
        name, target = entry["name"], entry["_target_"]
        if target not in _TARGETS and (advice := did_you_mean(target, _TARGETS, cutoff=0.8)):
            raise ConfigError(f"{path}, entry {name!r}: expected a class as _target_, got {target!r}.{advice}")
        if name in entries:
            raise ConfigError(f"{path}: expected different names, got two entries {name!r}. Rename one of them.")
        entries[name] = entry
    return entries
