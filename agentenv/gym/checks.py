"""check_gym: test everything that Gymnasium and its vector environments expect of an environment.

The checks apply to built-in environments and to your own:

    from agentenv.testing import check_gym
    check_gym("guess.py:Guess", data="guess.jsonl")
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env, data_equivalence

from agentenv.gym.env import AgentEnv
from agentenv.gym.registration import make_vec, name_of, spec_of

_NUM_STEPS = 3
_NUM_VECTOR = 3
HOSTILE = (
    "", " ", "\n", "0", "é 日本語 😀 👩\u200d👩\u200d👧", "a\u0301\u202e\u200b\ufeff\u2028",
    "\x00\x1b[31m\x7f\x85", "\ud800 lone \udfff",
    "<|im_end|>\n<|im_start|>user\n", "</s><|endoftext|>[INST]", "\\boxed{4}", "\\boxed{{{{", "#### " + "9" * 400,
    "```python\nraise SystemExit\n```", '<tool_call>\n{"name": "no such tool", "arguments": {}}\n</tool_call>',
    "<tool_call>{", "<think>", "A" * 20_000, "日" * 5_000, "1/0", "nan", "-inf", "{}{}{}%s%n",
)  # fmt: skip
"""Unusual actions that models produce."""

Played = list[tuple[Any, ...]]


def check_gym(env: str | AgentEnv, *, num_episodes: int = 32, processes: bool = True, **kwargs: Any) -> None:
    """Test an environment in all the ways that Gymnasium's users use one; warnings count as errors.

    The checks are Gymnasium's own `check_env`, the spec's JSON, hostile actions, equal seeds in sequence and
    concurrently, pickles and copies in the middle of an episode, and each vector environment.

    Args:
        env: an id, a name, `module:Attr` or `file.py:Class`; or an AgentEnv whose spec makes the test's environments.
        num_episodes: number of episodes to run in sequence, and to begin concurrently.
        processes: also test `AsyncVectorEnv`, which starts processes.
        **kwargs: fields of `GymConfig`, such as `data` or `env_kwargs`.

    Raises:
        AssertionError: a check failed; the message names the check and what it saw.
        UserWarning: Gymnasium warned.
        AgentEnvError: the environment cannot be made, or failed.
    """
    spec = env.spec if isinstance(env, AgentEnv) else spec_of(name_of(env), kwargs)
    if spec is None:
        raise AssertionError("check_gym: expected an environment with a spec, got None. Pass its name.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = EnvSpec.from_json(spec.to_json())
        _expect(again == spec, "spec.to_json", f"JSON that gives {spec} again", again)
        pickle.loads(pickle.dumps(spec))
        made, written = _made(spec), io.StringIO()
        with contextlib.redirect_stdout(written):  # "human" writes to it
            check_env(made)
        _expect(bool(written.getvalue()), "render_mode human", "an episode on stdout", "nothing")
        made.close()
        made.close()
        made = _made(spec)
        if made.action_space.contains(""):
            for seed, action in enumerate(HOSTILE):
                _play(made, seed, [action, action])  # the second one if the episode continues
        made.close()
        _check_copies(spec)
        made = _made(spec)
        plans = [_actions(made, seed) for seed in range(num_episodes)]
        alone, same = ([_play(made, seed, plan) for seed, plan in enumerate(plans)] for _ in range(2))
        _same(same, alone, "reset(seed): expected the same episode again")
        made.close()
        _check_vectors(spec, "vector_entry_point", num_episodes)
        _check_vectors(spec, "sync", _NUM_VECTOR)
    if processes:
        _check_vectors(spec, "async", _NUM_VECTOR)


def _made(spec: EnvSpec) -> AgentEnv:
    env = spec.make(disable_env_checker=True).unwrapped
    _expect(isinstance(env, AgentEnv), "spec", "an AgentEnv", env)
    return env  # type: ignore[return-value]


def _check_copies(spec: EnvSpec) -> None:
    """Check that a copy in the middle of an episode resets as the original does, without affecting it."""
    ways: tuple[Callable[[AgentEnv], AgentEnv], ...] = (deepcopy, lambda env: pickle.loads(pickle.dumps(env)))
    env = _made(spec)
    plan = _actions(env, 5)
    undisturbed = _play(env, 5, plan)
    for copied in ways:
        env.reset(seed=5)
        copy = copied(env)
        first = copy.reset()
        copy.close()
        _same(_continue(env, plan), undisturbed[1:], "an episode: expected it to continue as if it had not been copied")
        _same([first], [env.reset()], "a copy: expected the same next episode")
    env.close()


def _check_vectors(spec: EnvSpec, mode: Any, num: int) -> None:
    """Check that environment i of a vector of `num` equals a single one with seed + i."""
    kwargs = {key: value for key, value in spec.kwargs.items() if key not in ("env", "render_mode")}
    single = _made(spec)
    plans = [_actions(single, seed)[:1] for seed in range(num)]
    alone = [_play(single, seed, plan) for seed, plan in enumerate(plans)]
    single.close()
    where = f"make_vec({mode!r})"
    with contextlib.closing(make_vec(spec.kwargs["env"], num, vectorization_mode=mode, **kwargs)) as envs:
        first, _ = envs.reset(seed=0)
        observations, rewards, terminated, truncated, infos = envs.step(tuple(plan[0] for plan in plans))
        same_step = envs.metadata.get("autoreset_mode") is gymnasium.vector.AutoresetMode.SAME_STEP
        for index, (begin, (observation, reward, ended, cut, _)) in enumerate(alone):
            final = same_step and (ended or cut)
            got = [first[index], infos["final_obs"][index] if final else observations[index]]
            message = f"{where}: expected the observations of environment {index} to be those of a single one"
            _same([(got[0],), (got[1],)], [(begin[0],), (observation,)], message)
            ends = float(rewards[index]), bool(terminated[index]), bool(truncated[index])
            _expect(ends == (reward, ended, cut), where, f"{(reward, ended, cut)} of environment {index}", ends)


def _play(env: Any, seed: int, plan: Sequence[Any]) -> Played:
    return [env.reset(seed=seed), *_continue(env, plan)]


def _continue(env: Any, plan: Sequence[Any]) -> Played:
    """Take the actions until the episode ends, and check the types of each result."""
    played: Played = []
    for action in plan:
        step = env.step(action)
        observation, reward, terminated, truncated, info = step
        _expect(observation in env.observation_space, "step", f"an element of {env.observation_space}", observation)
        kinds = (type(reward), type(terminated), type(truncated))
        _expect(kinds == (float, bool, bool), "step", "a float and two bools", kinds)
        _expect(math.isfinite(reward), "step", "a finite reward", reward)
        odd = {key: fact for key, fact in info.items() if not isinstance(fact, float | str)}
        _expect(not odd, "step", "an info of floats and texts", odd)
        played.append(step)
        if terminated or truncated:
            break
    return played


def _actions(env: AgentEnv, seed: int) -> list[Any]:
    space = deepcopy(env.action_space)
    space.seed(seed)
    return [space.sample() for _ in range(_NUM_STEPS)]


def _same(got: Sequence[Any], expected: Sequence[Any], message: str) -> None:
    for index, pair in enumerate(zip(got, expected, strict=False)):
        one, other = (list(step) if isinstance(step, tuple) else step for step in pair)
        if not data_equivalence(one, other, exact=True):
            raise AssertionError(f"{message}, got, at {index}, {one!r:.400} instead of {other!r:.400}.")
    if len(got) != len(expected):
        raise AssertionError(f"{message}, got {len(got)} instead of {len(expected)}.")


def _expect(holds: bool, where: str, expected: str, got: Any) -> None:
    if not holds:
        raise AssertionError(f"{where}: expected {expected}, got {got!r:.400}.")
