"""`from_gymnasium`: any Gymnasium environment as an agent environment, played in words.

The observation becomes text, the last action in an answer becomes an action of the space, and an answer without one is
told what was expected; the environment never sees it. `agentenv_envs.gymnasium_text` has games that are ready.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from agentenv.agent import AgentInstance, ResetState, StepState
from agentenv.errors import ConfigError, ContractError, EpisodeFailed
from agentenv.gym import foreign
from agentenv.gym.game import Gold, Moment, Render, Score, TextGame
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
from agentenv.gym.rendering import allows, describe, is_messages, mask_text, plain
from agentenv.rewards.text import with_opened_thought
from agentenv.rewards.types import is_finite
from agentenv.types import StepResult

__all__ = ["FromGymnasium", "Illegal", "Moment", "TextGame", "from_gymnasium"]


class _Pickled(type):
    """Classes that `from_gymnasium` made are pickled by what they are made of: no module has them under their name."""


def _reduced(cls: _Pickled) -> str | tuple[Any, ...]:
    made = vars(cls).get("made_by_from_gymnasium")
    return cls.__qualname__ if made is None else (_made, (cls.__name__, cls.__module__, vars(cls)["game"]))


copyreg.pickle(_Pickled, _reduced)


def _made(name: str, module: str, game: TextGame) -> type[FromGymnasium]:
    namespace = {"game": game, "__module__": module, "__doc__": f"{game.name}, in words.", "made_by_from_gymnasium": 1}
    return cast(type[FromGymnasium], _Pickled(name, (FromGymnasium,), namespace))


def from_gymnasium(
    env_id: str | Callable[..., Any],
    *,
    make_kwargs: Mapping[str, Any] | None = None,
    render: Render | Literal["auto", "ansi", "observation"] = "auto",
    parse: Parse | None = None,
    actions: Sequence[str] | Mapping[str, int] | None = None,
    rules: str | Callable[[Moment], str] = "",
    score: Score | tuple[float, float] | None = None,
    gold: Gold | None = None,
) -> type[FromGymnasium]:
    """An agent environment class that plays a Gymnasium environment in words.

    Args:
        env_id: a registered id, also `module:Id`; or a function that makes an environment.
        make_kwargs: arguments of the environment; those in --env_kwargs come on top.
        render: puts a Moment in words; "ansi": the picture that the environment draws as text; "observation": the
            observation by its space; "auto": the picture, where there is one, and the observation; a text alone.
        parse: `parse(answer, space)` gives an action or `Illegal("what is wrong")`; None: by the action space.
        actions: words for the actions of a Discrete space: a list with one for each, in order; or a mapping, which may
            have several for one and none for others.
        rules: what stands above the first observation.
        score: a function of a Moment that gives a number in [0, 1] or None; or (low, high), between which the sum of
            rewards is measured once the game has ended, 0.0 until then and where a limit of ours cut it; None: `score`,
            `is_success` or `success` of the info, where there is one. A game that illegal answers ended has 0.0 by any.
        gold: a function of a Moment that gives an action, or its text, that earns the full score from there, or None.

    Example::

        # lake.py, for: agentenv run --env lake.py:Lake
        Lake = from_gymnasium("FrozenLake-v1", make_kwargs={"is_slippery": False},
                              actions=["left", "down", "right", "up"], score=(0.0, 1.0))

    Raises:
        ConfigError: an argument cannot be used.
    """
    game = TextGame(env_id, dict(make_kwargs or {}), render, parse, actions, rules, score, gold)
    name = "".join(part[:1].upper() + part[1:] for part in game.name.rpartition("/")[2].replace("-", "_").split("_"))
    caller = sys._getframe(1).f_globals.get("__name__", __name__)
    return _made("".join(filter(str.isalnum, name)) or "Game", str(caller), game)


class FromGymnasium(AgentInstance, metaclass=_Pickled):
    """An episode of a Gymnasium environment, in words; `from_gymnasium` makes subclasses.

    The environment is made and reset in `reset`, with the task's seed and the column `options`, and stepped once per
    legal action. Its rewards, `terminated` and `truncated` are the episode's.

    An answer that is no legal action costs `invalid_reward`, and its feedback says what was wrong; the environment is
    not stepped. Where an episode's rewards are mostly below zero, see that giving up does not pay: make
    `max_invalid * invalid_reward` less than what playing on costs.

    info per turn: the numbers and texts of the environment's info; steps and total_reward (of the environment, so far)
    and illegal (0/1).
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
        mask: Literal["tell", "enforce"] = "tell",
    ) -> None:
        """Set what an episode may cost.

        Args:
            make_kwargs: arguments of the environment, on top of those that the class has.
            max_steps: steps of the environment, after which it is truncated; None: as it is registered. That is an end
                of the game: where steps cost, fewer are worth more by a score of (low, high).
            max_invalid: answers that are no legal action, with the last of which the episode is terminated.
            invalid_reward: of each of them.
            form: "last": the last action that is said counts; "tags": what the last <action>…</action> holds.
            mask: "tell": actions that `info["action_mask"]` lacks are named only; "enforce": they are illegal.

        Raises:
            ConfigError: an argument is wrong, or nobody registered such an environment.
        """
        if not hasattr(type(self), "game"):
            raise ConfigError(
                "FromGymnasium: expected a class that from_gymnasium made, got its base. Call from_gymnasium."
            )
        _check(max_steps, max_invalid, invalid_reward)
        for name, value, choices in (("form", form, ("last", "tags")), ("mask", mask, ("tell", "enforce"))):
            if value not in choices:
                raise ConfigError(f"{type(self).__name__}.{name}: expected one of {choices}, got {value!r}. Change it.")
        if make_kwargs is not None and not isinstance(make_kwargs, Mapping):
            raise ConfigError(f"{type(self).__name__}.make_kwargs: expected an object, got {make_kwargs!r}. Change it.")
        self.make_kwargs = dict(make_kwargs or {})
        self.max_steps, self.max_invalid, self.invalid_reward = max_steps, max_invalid, invalid_reward
        self.form, self.mask = form, mask
        self.names: dict[str, int] = {}
        self.moment: Moment | None = None
        self.env: Any = None
        self._closed = False
        if isinstance(self._game().env, str):
            foreign.check_id(str(self._game().env))

    def reset(self, states: ResetState) -> ResetState:  # type: ignore[override]  # in a thread of its own
        """Make the environment and reset it; the rules and the first observation stand under the task's prompt.

        One that speaks in messages, or is agentenv's own, has a prompt of its own, which takes the task's place.

        Raises:
            ConfigError: its observations or actions cannot be put in words, or it does not take the arguments.
            MissingDependency: it needs a package that is not installed.
            EpisodeFailed: it raised.
            ContractError: it gave what `reset` may not.
        """
        game, where = self._game(), self._game().name
        kwargs = {**game.make_kwargs, **self.make_kwargs}
        ansi = game.render in ("auto", "ansi")
        self.env = foreign.make(game.env, kwargs, ansi=ansi, max_steps=self.max_steps)
        if self._closed:  # the episode was given up meanwhile
            self.close()
        self.names = names_of(game.actions, self.env.action_space)
        if game.parse is None and not can_be_read(self.env.action_space):
            raise unreadable(self.env.action_space)
        with foreign.named(f"{where}.reset"):
            values = self._reset_env(states)
        observation, info = foreign.reset_values(where, values)
        self.moment = Moment(self.env, _kept(observation), info)
        if is_messages(observation):
            return {**states, "observation": _kept(observation)}
        told = "\n".join(filter(None, (self._rules(self.moment), self._told(self.moment))))
        if type(self.env.unwrapped).__module__.startswith("agentenv.gym"):  # it has tasks of its own
            return {**states, "observation": [{"role": "user", "content": told}]}
        return {**states, "observation": _under(states["observation"], told)}

    def step(self, states: StepState) -> StepResult:  # type: ignore[override]  # in a thread of its own
        """Play the action of an answer, or say why it has none.

        Raises:
            EpisodeFailed: the environment raised.
            ContractError: it gave what `step` may not.
        """
        action = self._action(states)
        if isinstance(action, Illegal):
            return self._refuse(action)
        before, where = self._now(), self._game().name
        with foreign.named(f"{where}.step({action!r:.40})"):
            values = self._step_env(action)
        observation, reward, terminated, truncated, info = foreign.step_values(where, values)
        self.moment = moment = replace(
            before, observation=_kept(observation), info=info, action=action, reward=reward,
            total=before.total + reward, num_steps=before.num_steps + 1,
            terminated=terminated, truncated=truncated and not terminated,
        )  # fmt: skip
        done = terminated or truncated
        return StepResult(
            "" if done else self._message(moment, before.observation),
            reward=self._reward(moment),
            terminated=moment.terminated,
            truncated=moment.truncated,
            score=self._game().scored(moment),
            info=self._facts(moment, illegal=False),
        )

    def gold(self, states: StepState) -> str | None:  # type: ignore[override]  # in a thread of its own
        """What the class's `gold` knows, as an answer in the form that is asked for.

        Raises:
            ContractError: it is no action.
            EpisodeFailed: it raised.
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
            raise ContractError(f"{where}: expected an action of {space}, a text or None, got {action!r:.60}. Mend it.")
        said = action if isinstance(action, str) else first_name(action, self.names)
        return f"<action>{said}</action>" if self.form == "tags" else said

    def close(self) -> None:  # type: ignore[override]  # in a thread of its own
        """Close the environment, whatever state it is in."""
        self._closed = True
        env, self.env = self.env, None
        if env is not None:
            with foreign.named(f"{self._game().name}.close"):
                env.close()

    # --- what a game with rows of its own replaces

    def _game(self) -> TextGame:
        return self.game

    def _reset_env(self, states: ResetState) -> Any:
        options = (states.get("metadata") or {}).get("options")
        return self.env.reset(seed=states.get("seed"), options=dict(options) if isinstance(options, Mapping) else None)

    def _step_env(self, action: Any) -> Any:
        return self.env.step(action)

    def _reward(self, moment: Moment) -> float:
        return moment.reward

    # --- words

    def _rules(self, moment: Moment) -> str:
        game = self._game()
        said = game.rules if isinstance(game.rules, str) else self._text_of("rules", game.rules, moment)
        may = "" if game.parse is not None else self._may()
        return "\n".join(filter(None, (said, may)))

    def _text_of(self, name: str, rule: Render, moment: Moment) -> str:
        """What a rule puts in words.

        Raises:
            ContractError: it is no text.
        """
        where = f"{self._game().name}: {name}"
        with foreign.named(where):
            said = rule(moment)
        if not isinstance(said, str):
            raise ContractError(f"{where}: expected a text, got {said!r:.60}. Give a text.")
        return said

    def _may(self) -> str:
        return describe_actions(self.env.action_space, names=self.names, form=self.form)

    def _told(self, moment: Moment) -> str:
        """The observation, and what the mask says, in words."""
        game, space = self._game(), self.env.observation_space
        said = self._text_of("render", game.render, moment) if callable(game.render) else self._drawn(moment, space)
        return "\n".join(filter(None, (said, mask_text(moment.info, self.env.action_space, self.names))))

    def _drawn(self, moment: Moment, space: Any) -> str:
        mode = self._game().render
        mode = "observation" if mode == "auto" and is_text(space) else mode
        picture = self.env.render() if mode != "observation" and self.env.render_mode == "ansi" else None
        if mode == "ansi" and not isinstance(picture, str):
            raise ConfigError(f"{self._game().name}: render: expected a picture in text, got none. Use another render.")
        picture = plain(picture) if isinstance(picture, str) else ""
        if mode == "ansi":
            return picture
        said = describe(moment.observation, space)
        return f"{picture}\nObservation: {said}" if picture else said

    def _message(self, moment: Moment, before: Any) -> Any:
        """What is said after a step; of a conversation that came whole, what is new in it."""
        if not is_messages(moment.observation):
            return [{"role": "user", "content": self._told(moment)}]
        messages = _kept(moment.observation)
        num = len(before) if is_messages(before) and messages[: len(before)] == before else 0
        num += num < len(messages) and messages[num]["role"] == "assistant"
        return messages[num:]

    # --- actions

    def _action(self, states: StepState) -> Any:
        """The action of an answer, or Illegal."""
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
        if isinstance(action, Illegal) or self.mask == "tell" or allows(self._now().info, space, action):
            return action
        return Illegal(f"{first_name(action, self.names)} is not possible now.")

    def _refuse(self, illegal: Illegal) -> StepResult:
        num = self._now().num_illegal + 1
        left = self.max_invalid - num
        self.moment = moment = replace(self._now(), num_illegal=num, gave_up=not left)
        masked = mask_text(moment.info, self.env.action_space, self.names)
        chances = "1 more answer without one ends" if left == 1 else f"{left} more answers without one end"
        told = [f"That was no legal action, and nothing happened. {illegal.reason}", self._may(), masked]
        told.append(f"{chances} the episode." if left else "")
        return StepResult(
            [{"role": "user", "content": "\n".join(filter(None, told))}] if left else "",
            reward=self.invalid_reward,
            terminated=not left,
            score=self._game().scored(moment),
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


def _kept(observation: Any) -> Any:
    """An observation as it is now: an environment may go on writing into its one list of messages."""
    return [dict(message) for message in observation] if is_messages(observation) else observation


def _under(prompt: Any, told: str) -> Any:
    """A text under a prompt: in the last message where that is the user's, else in one of its own."""
    if isinstance(prompt, str):
        return f"{prompt}\n{told}\n"
    last = prompt[-1] if prompt else {}
    if last.get("role") != "user" or not isinstance(last.get("content"), str):
        return [*prompt, {"role": "user", "content": told}]
    return [*prompt[:-1], {**last, "content": f"{last['content']}\n{told}"}]


def _check(max_steps: Any, max_invalid: Any, invalid_reward: Any) -> None:
    for name, value, may_be_none in (("max_steps", max_steps, True), ("max_invalid", max_invalid, False)):
        if value is None and may_be_none:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"from_gymnasium: {name}: expected an integer >= 1, got {value!r}. Change it.")
    if isinstance(invalid_reward, bool) or not is_finite(invalid_reward):
        raise ConfigError(f"from_gymnasium: invalid_reward: expected a number, got {invalid_reward!r:.100}. Change it.")
