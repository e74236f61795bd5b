"""EnvText: SkyRL-gym's BaseTextEnv over a stepped episode, for SkyRL's own generators, which make the tokens.

Source: skyrl_gym/envs/base_text_env.py and registration.py, 0.4.0; skyrl/train/generators/skyrl_gym_generator.py and
backends/skyrl_train/inference_servers/remote_inference_client.py, 0.3.0. SkyRL finds it in its registry, in the process
of the generator:

    options = {"env": "math_retry", "ends": [tokenizer.eos_token]}
    skyrl_gym.register("math_retry", "agentenv.interop.skyrl.text_env:EnvText", options)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv

from agentenv._util.loop_thread import run_sync
from agentenv.core.messages import as_messages
from agentenv.core.types import Limits, Message, own_limits
from agentenv.errors import ConfigError
from agentenv.interop.hosted import stepped_source, task_of, text_episode

_MAX_CHARS = 1_000_000
"""`max_length` of an episode, whose tokens are characters here; SkyRL has its own limit."""


class EnvText(BaseTextEnv):  # type: ignore[misc]
    """One episode in text. SkyRL calls it from threads; it runs on the loop that plain functions share.

    A failed episode raises EpisodeFailed, which ends SkyRL's batch; it has no reward.

    Args:
        env: an installed environment's name, `module:Attr` or `FILE.py:Attr`.
        env_kwargs: arguments of its constructor.
        ends: texts that end an action, such as the policy's EOS: SkyRL's client leaves it in the action.
        env_config: SkyRL's configuration of the environment, which is not used.
        extras: the row's columns, and SkyRL's `max_turns`.
    """

    def __init__(
        self,
        env: str,
        env_kwargs: Mapping[str, Any] | None = None,
        ends: Sequence[str] = (),
        env_config: Any = None,
        extras: Any = None,
    ) -> None:
        super().__init__()
        self._source = stepped_source(env, env_kwargs or {}, "EnvText.env", "Train it with EnvGenerator.")
        self._ends, self._extras = ends, extras

    def init(self, prompt: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Begin the episode of the row; return its messages.

        Raises:
            EpisodeFailed: the environment raised.
            ConfigError: the environment has tools or settings of sampling, which SkyRL's generator does not read.
        """
        own = own_limits(self._source.cls, max_turns=self._extras["max_turns"])
        limits = Limits(**{**own, "max_length": _MAX_CHARS})
        self._episode = text_episode(self._source, task_of(prompt, self._extras, "task", self._source), limits)
        messages = run_sync(self._episode.begin())
        self._check()
        return as_messages(messages), {}

    def step(self, action: str) -> dict[str, Any]:
        """Play an action.

        Raises:
            EpisodeFailed: the environment raised.
            ConfigError: the environment asks for settings of sampling.
        """
        for end in self._ends:
            action = action.removesuffix(end)
        result = run_sync(self._episode.act(action))
        self._check()
        return {
            "observations": [] if self._episode.over else as_messages(result.observation),
            "reward": result.reward,
            "done": self._episode.over,
            "metadata": dict(result.info),
        }

    def close(self) -> None:
        """End the episode."""
        run_sync(self._episode.aclose())

    def get_metrics(self) -> dict[str, Any]:
        """Return the episode's score, if it has one, and 1 if a limit of turns or the environment cut it."""
        trajectory = self._episode.trajectory
        score = {} if trajectory.score is None else {"score": trajectory.score}
        return {**score, "truncated": float(trajectory.truncated)}

    def _check(self) -> None:
        turns, tools = self._episode.trajectory.turns, self._episode.trajectory.tools
        sampling = turns[-1].result.sampling if turns and turns[-1].result else None
        is_plain = sampling is None or not (sampling.stop or sampling.stop_token_ids or sampling.structural_tag)
        if tools or not is_plain:
            got = f"{len(tools)} tools" if tools else repr(sampling)
            raise ConfigError(
                f"EnvText: expected an environment without tools, stops and grammars, got {got}. SkyRL's generator "
                "reads only messages: use EnvGenerator."
            )
