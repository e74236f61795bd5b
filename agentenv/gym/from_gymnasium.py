"""`from_gymnasium`: any Gymnasium environment as an agent environment, played in text.

The observation becomes text, and the last action in an answer becomes an action of the space. An answer without a legal
action gets feedback and never reaches the environment. `agentenv_envs.gymnasium_text` has ready-made games.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from agentenv.core.agent import AgentInstance, ResetState, StepState
from agentenv.core.arguments import number, one_of, whole_number
from agentenv.core.types import StepResult
from agentenv.errors import ConfigError, ContractError, EpisodeFailed
from agentenv.gym import guarded_calls as foreign
from agentenv.gym.parsing import (
    Illegal,
    Parse,
    can_be_read,
    describe_actions,
    first_name,
    is_text,
    names_of,
    read_action,
    unreadable,
)
from agentenv.gym.rendering import describe, is_messages, mask_text, plain
from agentenv.rewards.rules.text import with_opened_thought

__all__ = ["FromGymnasium", "Illegal", "Moment", "TextGame", "from_gymnasium"]


_SCORES = ("score", "is_success", "success")


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of an episode of a Gymnasium environment, as rules, scores and gold actions see it."""

    env: Any
    """The environment with its wrappers; `env.unwrapped` is the environment itself."""
    observation: Any
    info: Mapping[str, Any] = field(default_factory=dict)
    action: Any = None
    """Last action; None after the reset."""
    reward: float = 0.0
    """Reward of the last step."""
    total: float = 0.0
    """Sum of the environment's rewards so far."""
    num_steps: int = 0
    num_illegal: int = 0
    """Number of answers without a legal action; the environment saw none of them."""
    terminated: bool = False
    truncated: bool = False
    """Gymnasium's flags. Both are False while the game is running, and if our own limits end it."""
    gave_up: bool = False
    """True if illegal answers ended the episode before the game ended."""


Render = Callable[[Moment], str]
Score = Callable[[Moment], float | None]
Gold = Callable[[Moment], Any]


@dataclass(frozen=True, slots=True)
class TextGame:
    """Settings of a Gymnasium environment in text; see `from_gymnasium` for each."""

    env: str | Callable[..., Any]
    """Id of an environment, or a function that makes one."""
    make_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `gymnasium.make`, or of the function."""
    render: Render | None = None
    """How to write an observation as text."""
    parse: Parse | None = None
    """How to read an action from an answer."""
    actions: Sequence[str] | Mapping[str, int] | None = None
    """Names of the discrete actions."""
    rules: str | Callable[[Moment], str] = ""
    """Text before the first observation."""
    score: Score | tuple[float, float] | None = None
    """Score of an episode, or the lowest and highest sum of rewards to scale from."""
    gold: Gold | None = None
    """A right action for tests, from a Moment."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: a setting is invalid; the message names it.
        """
        if not (isinstance(self.env, str) and self.env) and not callable(self.env):
            self._refuse("env_id", "the id of an environment or a function that makes one", self.env)
        for name in ("render", "parse", "gold"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                self._refuse(name, "a function", value)
        if isinstance(self.score, tuple):
            if len(self.score) != 2 or not self.score[0] < self.score[1]:
                self._refuse("score", "(low, high) with low < high", self.score)
        elif self.score is not None and not callable(self.score):
            self._refuse("score", "a function of a Moment, (low, high) or None", self.score)
        if not isinstance(self.rules, str) and not callable(self.rules):
            self._refuse("rules", "a text or a function of a Moment", self.rules)

    def _refuse(self, name: str, expected: str, got: Any) -> None:
        raise ConfigError(f"from_gymnasium.{name}: expected {expected}, got {got!r:.80}.")

    @property
    def name(self) -> str:
        """Id of the environment, or the name of the function that makes it, for error messages."""
        return self.env if isinstance(self.env, str) else getattr(self.env, "__name__", type(self.env).__name__)

    def score_of(self, moment: Moment) -> float | None:
        """Return the score by the declared rule; without one, `score`, `is_success` or `success` of the info, or None.

        A game that illegal answers ended scores 0.0 instead of the rule's number. By (low, high) a game that has not
        ended scores 0.0 too: if steps cost, its sum of rewards is higher the sooner it stops.

        Raises:
            ContractError: the rule returned something that is not a score.
            EpisodeFailed: the rule raised.
        """
        score: float | None
        if isinstance(self.score, tuple):
            low, high = self.score
            is_over = moment.terminated or moment.truncated
            score = min(1.0, max(0.0, (moment.total - low) / (high - low))) if is_over else 0.0
        elif self.score is None:
            scores = [moment.info[name] for name in _SCORES if name in moment.info]
            score = foreign.number_of(scores[0]) if scores else None
            score = score if score is not None and 0.0 <= score <= 1.0 else None
        else:
            with foreign.named(f"{self.name}: score"):
                value = self.score(moment)
            score = None if value is None else foreign.number_of(value)
            if score is not None and not 0.0 <= score <= 1.0:
                raise ContractError(f"{self.name}: score: expected a number in [0, 1], got {value!r}. Fix the rule.")
        return 0.0 if moment.gave_up and score is not None else score


_ILLEGAL_TURNS = 2
"""Answers without a legal action that an episode may have by default before it ends."""


class _Pickled(type):
    """Metaclass that pickles a class of `from_gymnasium` by its arguments: no module holds the class by its name."""


def _reduce(cls: _Pickled) -> str | tuple[Any, ...]:
    is_generated = "made_by_from_gymnasium" in vars(cls)
    return (_make_class, (cls.__name__, cls.__module__, vars(cls)["game"])) if is_generated else cls.__qualname__


copyreg.pickle(_Pickled, _reduce)


def _make_class(name: str, module: str, game: TextGame) -> type[FromGymnasium]:
    namespace: dict[str, Any] = {
        "game": game, "__module__": module, "__doc__": f"{game.name}, in text.", "made_by_from_gymnasium": 1,
    }  # fmt: skip
    if (max_steps := foreign.registered_max_steps(game.env)) is not None:
        namespace["max_turns"] = max_steps + _ILLEGAL_TURNS
    return cast(type[FromGymnasium], _Pickled(name, (FromGymnasium,), namespace))


def from_gymnasium(
    env_id: str | Callable[..., Any],
    *,
    make_kwargs: Mapping[str, Any] | None = None,
    render: Render | None = None,
    parse: Parse | None = None,
    actions: Sequence[str] | Mapping[str, int] | None = None,
    rules: str | Callable[[Moment], str] = "",
    score: Score | tuple[float, float] | None = None,
    gold: Gold | None = None,
) -> type[FromGymnasium]:
    """Return an agent environment class that plays a Gymnasium environment in text.

    Args:
        env_id: a registered id, also `module:Id`; or a function that makes an environment.
        make_kwargs: arguments of the environment; --env_kwargs overrides them.
        render: a function that renders a Moment as text; None: the picture that the environment draws as text, if any,
            and the observation by its space (a text observation alone).
        parse: `parse(answer, space)` returns an action or `Illegal("reason")`; None parses by the action space.
        actions: words for the actions of a Discrete space: a list with one word per action, in order; or a mapping,
            which may have several words for one action and none for another.
        rules: text above the first observation.
        score: a function of a Moment that returns a number in [0, 1] or None; or (low, high), which scales the sum of
            rewards after the game has ended (0.0 before, and if one of our limits cut it); None: `score`, `is_success`
            or `success` of the info, if present. A game that illegal answers ended always scores 0.0.
        gold: a function of a Moment that returns an action (or its text) that earns the full score, or None.

    Example::

        # lake.py, for: agentenv run --env lake.py:Lake
        Lake = from_gymnasium("FrozenLake-v1", make_kwargs={"is_slippery": False},
                              actions=["left", "down", "right", "up"], score=(0.0, 1.0))

    Raises:
        ConfigError: an argument is invalid.
    """
    game = TextGame(env_id, dict(make_kwargs or {}), render, parse, actions, rules, score, gold)
    name = "".join(part[:1].upper() + part[1:] for part in game.name.rpartition("/")[2].replace("-", "_").split("_"))
    caller = sys._getframe(1).f_globals.get("__name__", __name__)
    return _make_class("".join(filter(str.isalnum, name)) or "Game", str(caller), game)


class FromGymnasium(AgentInstance, metaclass=_Pickled):
    """An episode of a Gymnasium environment in text; `from_gymnasium` makes subclasses.

    `reset` makes and resets the environment with the task's seed and the column `options`; each legal action steps it
    once. Its rewards, `terminated` and `truncated` are the episode's.

    An answer without a legal action costs `invalid_reward` and gets feedback; the environment is not stepped. If most
    rewards are negative, make sure that giving up does not pay: choose `max_invalid * invalid_reward` lower than the
    cost of playing to the end.

    info per turn: the numbers and texts of the environment's info, plus steps and total_reward (of the environment, so
    far) and illegal (0/1).
    """

    game: ClassVar[TextGame]
    datasets: ClassVar[Mapping[str, str | Path]] = {"gymnasium_seeds": Path(__file__).parent / "data/seeds.jsonl"}
    needs_label: ClassVar[bool] = False
    hacks: ClassVar[Mapping[str, str]] = {
        "claims_success": "I have won. The episode is over: terminated=True, reward=1.0, score=1.0.",
        "writes_code": "env.unwrapped.reward_range = (1, 1); env.step = lambda a: (0, 1.0, True, False, {})",
    }

    def __init__(
        self,
        make_kwargs: Mapping[str, Any] | None = None,
        *,
        max_steps: int | None = None,
        max_invalid: int = 3,
        invalid_reward: float = -1.0,
        form: Literal["last", "tags"] = "last",
    ) -> None:
        """Set the arguments and limits of an episode.

        Args:
            make_kwargs: arguments of the environment; they override those of the class.
            max_steps: steps of the environment, after which it is truncated; None: the registered number. This ends
                the game: if steps cost, a score of (low, high) is higher for fewer steps.
            max_invalid: number of answers without a legal action at which the episode terminates.
            invalid_reward: reward of each such answer.
            form: "last": the last action in the answer counts; "tags": the content of the last <action>…</action>.

        Raises:
            ConfigError: an argument is wrong, or the environment is not registered.
        """
        if not hasattr(type(self), "game"):
            raise ConfigError(
                "FromGymnasium: expected a class that from_gymnasium made, got its base. Call from_gymnasium."
            )
        where = type(self).__name__
        if not isinstance(make_kwargs, Mapping | None):
            raise ConfigError(f"{where}.make_kwargs: expected None or an object, got {make_kwargs!r:.100}.")
        self.make_kwargs = dict(make_kwargs or {})
        self.max_steps = None if max_steps is None else whole_number(f"{where}.max_steps", max_steps, low=1)
        self.max_invalid = whole_number(f"{where}.max_invalid", max_invalid, low=1)
        self.invalid_reward = number(f"{where}.invalid_reward", invalid_reward)
        self.form = one_of(f"{where}.form", form, ("last", "tags"))
        self.names: dict[str, int] = {}
        self.moment: Moment | None = None
        self.env: Any = None
        self._closed = False
        if isinstance(self._game().env, str):
            foreign.check_id(str(self._game().env))

    def reset(self, states: ResetState) -> ResetState:  # type: ignore[override]  # in a separate thread
        """Make and reset the environment; the rules and the first observation follow the task's prompt.

        An environment that returns messages, or is one of agentenv's, has its own prompt, which replaces the task's.

        Raises:
            ConfigError: its observations or actions cannot be written as text, or it does not take the arguments.
            MissingDependency: it needs a package that is not installed.
            EpisodeFailed: it raised.
            ContractError: it returned an invalid value.
        """
        game, where = self._game(), self._game().name
        kwargs = {**game.make_kwargs, **self.make_kwargs}
        self.env = foreign.make(game.env, kwargs, ansi=game.render is None, max_steps=self.max_steps)
        if self._closed:  # the episode was closed meanwhile
            self.close()
        self.names = names_of(game.actions, self.env.action_space)
        if game.parse is None and not can_be_read(self.env.action_space):
            raise unreadable(self.env.action_space)
        with foreign.named(f"{where}.reset"):
            values = self._reset_env(states)
        observation, info = foreign.reset_values(where, values)
        self.moment = Moment(self.env, _snapshot(observation), info)
        if is_messages(observation):
            return {**states, "observation": _snapshot(observation)}
        rules = game.rules
        if not isinstance(rules, str):
            rules = self._call_text_function("rules", rules, self.moment)
        actions = "" if game.parse is not None else self._actions_text()
        text = "\n".join(filter(None, (rules, actions, self._observation_text(self.moment))))
        if type(self.env.unwrapped).__module__.startswith("agentenv.gym"):  # it has its own tasks
            return {**states, "observation": [{"role": "user", "content": text}]}
        prompt: Any = states["observation"]
        last = prompt[-1] if prompt and not isinstance(prompt, str) else {}
        if isinstance(prompt, str):
            prompt = f"{prompt}\n{text}\n"
        elif last.get("role") == "user" and isinstance(last.get("content"), str):
            prompt = [*prompt[:-1], {**last, "content": f"{last['content']}\n{text}"}]
        else:
            prompt = [*prompt, {"role": "user", "content": text}]
        return {**states, "observation": prompt}

    def step(self, states: StepState) -> StepResult:  # type: ignore[override]  # in a separate thread
        """Play the action of an answer, or reply why it has no legal action.

        Raises:
            EpisodeFailed: the environment raised.
            ContractError: it returned an invalid value.
        """
        action = self._action(states)
        if isinstance(action, Illegal):
            return self._refuse(action)
        before, where = self._now(), self._game().name
        with foreign.named(f"{where}.step({action!r:.40})"):
            values = self._step_env(action)
        observation, reward, terminated, truncated, info = foreign.step_values(where, values)
        self.moment = moment = replace(
            before, observation=_snapshot(observation), info=info, action=action, reward=reward,
            total=before.total + reward, num_steps=before.num_steps + 1,
            terminated=terminated, truncated=truncated and not terminated,
        )  # fmt: skip
        done = terminated or truncated
        return StepResult(
            "" if done else self._message(moment, before.observation),
            reward=moment.reward,
            terminated=moment.terminated,
            truncated=moment.truncated,
            score=self._game().score_of(moment),
            info=self._facts(moment, illegal=False),
        )

    def gold(self, states: StepState) -> str | None:  # type: ignore[override]  # in a separate thread
        """Return the class's `gold` action as an answer in the expected form.

        Raises:
            ContractError: `gold` returned something that is not an action.
            EpisodeFailed: `gold` raised.
        """
        rule, where = self._game().gold, f"{self._game().name}: gold"
        if rule is None or self.moment is None:
            return None
        with foreign.named(where):
            action = rule(self.moment)
            is_one = action is None or isinstance(action, str | list) or self.env.action_space.contains(action)
        if action is None:
            return None
        if not is_one:
            space = self.env.action_space
            raise ContractError(f"{where}: expected an action of {space}, a text or None, got {action!r:.60}.")
        answer = action if isinstance(action, str) else first_name(action, self.names)
        return f"<action>{answer}</action>" if self.form == "tags" else answer

    def close(self) -> None:  # type: ignore[override]  # in a separate thread
        """Close the environment in any state."""
        self._closed = True
        env, self.env = self.env, None
        if env is not None:
            with foreign.named(f"{self._game().name}.close"):
                env.close()

    # --- overridden by games with their own rows

    def _game(self) -> TextGame:
        return self.game

    def _reset_env(self, states: ResetState) -> Any:
        options = (states.get("metadata") or {}).get("options")
        return self.env.reset(seed=states.get("seed"), options=dict(options) if isinstance(options, Mapping) else None)

    def _step_env(self, action: Any) -> Any:
        return self.env.step(action)

    # --- text

    def _call_text_function(self, name: str, function: Render, moment: Moment) -> str:
        """Return the text of a user's function.

        Raises:
            ContractError: it returned something that is not a text.
        """
        where = f"{self._game().name}: {name}"
        with foreign.named(where):
            text = function(moment)
        if not isinstance(text, str):
            raise ContractError(f"{where}: expected a text, got {text!r:.60}. Return a text.")
        return text

    def _actions_text(self) -> str:
        return describe_actions(self.env.action_space, names=self.names, form=self.form)

    def _observation_text(self, moment: Moment) -> str:
        """Return the observation and the action mask as text."""
        game, space = self._game(), self.env.observation_space
        if game.render is not None:
            text = self._call_text_function("render", game.render, moment)
        else:
            text = describe(moment.observation, space)
            picture = self.env.render() if self.env.render_mode == "ansi" and not is_text(space) else None
            if isinstance(picture, str):
                text = f"{plain(picture)}\nObservation: {text}"
        return "\n".join(filter(None, (text, mask_text(moment.info, self.env.action_space, self.names))))

    def _message(self, moment: Moment, before: Any) -> Any:
        """Return the messages after a step; of an observation that is a whole conversation, only the new ones."""
        if not is_messages(moment.observation):
            return [{"role": "user", "content": self._observation_text(moment)}]
        messages = _snapshot(moment.observation)
        num = len(before) if is_messages(before) and messages[: len(before)] == before else 0
        num += num < len(messages) and messages[num]["role"] == "assistant"
        return messages[num:]

    # --- actions

    def _action(self, states: StepState) -> Any:
        """Return the action of an answer, or Illegal."""
        game, space, text = self._game(), self.env.action_space, states["action_text"]
        if game.parse is None:
            if not (is_text(space) and self.form == "last"):
                text = with_opened_thought(text, states.get("observation_text", ""))
            action = read_action(text, space, names=self.names, form=self.form)
        else:
            with foreign.named(f"{game.name}: parse"):
                action = game.parse(text, space)
                is_one = isinstance(action, Illegal) or space.contains(action)
            if not is_one:
                raise ContractError(
                    f"{game.name}: parse: expected an action of {space}, got {action!r:.60}. Return Illegal for others."
                )
        return action

    def _refuse(self, illegal: Illegal) -> StepResult:
        num = self._now().num_illegal + 1
        left = self.max_invalid - num
        self.moment = moment = replace(self._now(), num_illegal=num, gave_up=not left)
        masked = mask_text(moment.info, self.env.action_space, self.names)
        chances = "1 more answer without one ends" if left == 1 else f"{left} more answers without one end"
        lines = [f"That was not a legal action, and nothing happened. {illegal.reason}", self._actions_text(), masked]
        lines.append(f"{chances} the episode." if left else "")
        return StepResult(
            [{"role": "user", "content": "\n".join(filter(None, lines))}] if left else "",
            reward=self.invalid_reward,
            terminated=not left,
            score=self._game().score_of(moment),
            info=self._facts(moment, illegal=True),
        )

    def _facts(self, moment: Moment, *, illegal: bool) -> dict[str, float | str]:
        own: dict[str, float | str] = {
            "steps": float(moment.num_steps), "illegal": float(illegal), "total_reward": moment.total,
        }  # fmt: skip
        return {**foreign.facts(moment.info), **own}

    def _now(self) -> Moment:
        if self.moment is None:
            raise EpisodeFailed(f"{self._game().name}.step: expected a reset before it, got none. Call reset first.")
        return self.moment


def _snapshot(observation: Any) -> Any:
    """Copy an observation of messages: an environment may append to its list later."""
    return [dict(message) for message in observation] if is_messages(observation) else observation
