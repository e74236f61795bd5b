"""RMChat: a conversation of one or more turns, each answer scored by a reward model, a judge or any sum of rewards."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import json
import logging
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack

from agentenv.agent import AgentInstance, ResetState, StepState
from agentenv.errors import ConfigError, ContractError, DataError, InfraError, MissingDependency, RunStopped
from agentenv.rewards.grading import failures, graded
from agentenv.rewards.judges.failures import JudgeMisaddressed
from agentenv.rewards.models.opening import parsed
from agentenv.rewards.models.reward import ModelReward
from agentenv.rewards.models.types import ready
from agentenv.rewards.registry import reward_from
from agentenv.rewards.spent import collected
from agentenv.rewards.text import final_text, with_opened_thought, without_special_tokens
from agentenv.rewards.types import Response, Reward, RewardResult, Status
from agentenv.types import Message, StepResult
from agentenv_envs.rm_chat.figures import lengths, of_grade, of_user
from agentenv_envs.rm_chat.opening import MESSAGES, PERSONA, TURNS, opening
from agentenv_envs.rm_chat.shared import Shared, closable
from agentenv_envs.rm_chat.users import PERSONA as ANYBODY
from agentenv_envs.rm_chat.users import Played, Script, User, player_from, user_from
from agentenv_envs.rows import row_of

logger = logging.getLogger(__name__)
_OF_SETTINGS = (ConfigError, MissingDependency, JudgeMisaddressed)
_T = TypeVar("_T")
_U = TypeVar("_U")

STAND_IN: Mapping[str, Any] = {
    "sum": {
        "length": {"length": {"min_length": 100, "max_length": 1500, "rate": 0.01, "floor": -1.0, "part": "final"}},
        "repetition": {"repetition": {"scope": "final"}},
    }
}
"""What judges where no settings say: penalties of short, long and repetitive answers, from -2 to 0. No measure of
quality: it is there so that a conversation can be tried without a model."""


def _made(settings: Any) -> Reward:
    if settings is STAND_IN:
        logger.error(  # which `agentenv run` shows
            "rm_chat: expected a reward, got none: length and repetition stand in for it, which says nothing of "
            'quality. Name one: --env_kwargs \'{"rm": "hf:PATH"}\'; examples/train_reward_model.py makes a small one.'
        )
    return reward_from(settings)


_REWARDS, _JUDGES = Shared(_made), Shared(player_from)


class _More(TypedDict, total=False):
    """Further arguments."""

    rm_args: Mapping[str, Any]


class RMChat(AgentInstance):
    """Talk with a user; after each answer, or at the end, a reward model says what the conversation is worth.

    The user's later messages are the row's script, or a language model plays them; the conversation ends with the last
    of them, after `max_turns` answers, or where a limit of tokens cut an answer, which is truncated and scored all the
    same. A reward sees the raw messages, those of earlier turns without their thinking, and renders them itself.

    Rewards with `when`: `each`, that of the conversation so far, so that a sum over turns grows with their number;
    `gain`, what the turn adds to it, so that the sum is that of the whole conversation; `end`, that one alone, at the
    last turn, also where a limit of the run ends the episode. Score: the reward's own, None where it has none.

    A scorer, a judge or a user that fails raises, so that the episode is tried again: it is never a bad answer. One
    that refuses its settings, as where its address is wrong, ends the run. All episodes of a process share one scorer,
    which is closed at the end of its event loop. Rows need no label, unless the reward does.

    info per turn: turns (so far), cut (1 where a limit of tokens cut the answer); rm/length_chars and rm/length_words
    of the answer without its thinking, rm/no_answer (0/1); of scored turns rm/reward and the known components of the
    reward as rm/name; where a reward model scored, rm/truncated, rm/clipped (0/1), rm/value where there is one of them,
    and rm/num_retried, attempts at it that were not the first; rm/status and rm/detail (texts); judge/requests,
    judge/retries, judge/prompt_tokens, judge/cost and the like of what judges were asked, and user/… of a played user.
    Those of a score that failed are in no episode.
    """

    datasets: ClassVar[Mapping[str, str | Path]] = {
        f"rm_chat_{name}": Path(__file__).parent / f"data/{name}.jsonl" for name in ("prompts", "pairs")
    }
    """Conversations to have, and pairs of answers to train and measure a reward model with."""
    needs_label = False

    def __init__(
        self,
        reward: str | Mapping[str, Any] | Reward | None = None,
        *,
        rm: str | None = None,
        when: str = "each",
        max_turns: int = 8,
        user: Mapping[str, Any] | None = None,
        system: str | None = None,
        part: str = "final",
        limit_s: float = 50.0,
        **more: Unpack[_More],
    ) -> None:
        """Choose what scores, and who talks.

        Args:
            reward: settings as `agentenv.rewards.registry.reward_from` takes them, as
                `{"model": {"rm": "hf:PATH", "scale": 0.5, "clip": [-5, 5]}}`; None: `rm`, or else STAND_IN.
            rm: a reward model alone, as `agentenv.rewards.models.opening` names them; short for `{"model": {"rm": rm,
                "part": part}}`, where a model that is loaded here also sees only the end of what is too long for it:
                refused, a policy could write itself out of its reward.
            more: `rm_args`, arguments of the scorer of `rm`, as `{"max_length": 4096}`; win over the above.
            when: each, gain or end.
            max_turns: most answers of the policy.
            user: None: what the row's column `user_turns` has, if it has one; `{"script": column}`: another column,
                which every row has; `{"base_url": address, "model": name, "persona": text}`: a language model, with
                what else `judges.settings.judge_from` takes; or the same as `{"judge": settings, "persona": text}`,
                where settings may be an object with `complete`. A row's column `persona` goes before that text.
            system: a system message for conversations that begin without one; the reward model sees it too.
            part: `final` keeps the thinking of earlier answers from the reward, `all` shows it.
            limit_s: longest that a score and a user's message may take; less than --step_timeout_s, so that what is
                slow is tried again.

        Raises:
            ConfigError: the settings describe no reward, or no user.
        """
        rm_args = _rm_args(rm, more)
        if reward is not None and rm is not None:
            raise ConfigError(f"RMChat.rm: expected None beside reward, got {rm!r}. Give one of them.")
        _check("when", when, when in ("each", "gain", "end"), "each, gain or end")
        _check("part", part, part in ("final", "all"), "final or all")
        _check("max_turns", max_turns, type(max_turns) is int and max_turns >= 1, "a whole number >= 1")
        _check("limit_s", limit_s, type(limit_s) in (int, float) and 0 < limit_s < float("inf"), "seconds > 0")
        _check("system", system, system is None or (isinstance(system, str) and system.strip()), "None or a text")
        self.when, self.part, self.max_turns, self.limit_s = when, part, max_turns, limit_s
        self.reward = STAND_IN if reward is None and rm is None else reward
        if rm is not None:
            self.reward = _of_rm(rm, part, rm_args)
        _REWARDS.made(self.reward)
        self.user, self.system = user_from(user), system
        if self.user is not None and "judge" in self.user:
            _JUDGES.made(self.user["judge"])
        self._messages: list[Message] = []
        self._user: User | None = None
        self._owed: Response | None = None
        self._num_turns, self._last_reward = 0, 0.0

    async def reset(self, states: ResetState) -> ResetState:
        """Keep the raw messages, and give them to the policy's own template; load the reward model if it is not yet.

        Raises:
            DataError: the row has no raw messages that an assistant can answer, or no script.
            RunStopped: there is no such reward model.
        """
        columns = row_of(states, self._own_columns).columns
        observation, self._messages = opening(states["observation"], columns.get(MESSAGES), self.system)
        self._messages = list(self._messages)
        self._user = await self._user_of(columns)
        for part in closable(await _REWARDS.held(self.reward)):
            with _ending_the_run():
                await ready(part)
        return {**states, "observation": observation}

    async def step(self, states: StepState) -> StepResult:
        """Score an answer, and let the user go on.

        Raises:
            DataError: the conversation, or the row's label, is none that the reward can use.
            InfraError: the scorer or the user failed.
            RunStopped: one of them refuses its settings.
        """
        row = row_of(states, self._own_columns)
        text = with_opened_thought(states["action_text"], states.get("observation_text", ""))
        response = Response(text, row.label, list(self._messages), row.columns)
        self._messages.append({"role": "assistant", "content": self._kept(text)})
        self._num_turns += 1
        cut = states.get("finish_reason") == "length"
        goes_on = not cut and self._num_turns < self.max_turns
        if self.when == "end":
            said, facts = await self._reply(goes_on)
            result, figures = await self._graded(response) if said is None else (None, {})
        else:
            (said, facts), (result, figures) = await _both(self._reply(goes_on), self._graded(response))
        self._owed = response if result is None else None
        if said is not None:
            self._messages.append({"role": "user", "content": said})
        return StepResult(
            "" if said is None else [{"role": "user", "content": said}],
            reward=0.0 if result is None else self._earned(result),
            terminated=said is None and not cut,
            truncated=said is None and cut,
            score=None if result is None else result.score,
            info={**self._facts(text, cut=cut), **facts, **figures},
        )

    async def on_truncate(self, states: StepState) -> StepResult | None:
        """Score the conversation where a limit ends it before it is over.

        Raises:
            DataError: as `step`, as are InfraError and RunStopped.
        """
        owed, self._owed = self._owed, None
        if owed is None:
            return None
        result, figures = await self._graded(owed)
        return StepResult(reward=self._earned(result), score=result.score, info=figures)

    @property
    def _own_columns(self) -> tuple[str, ...]:
        """The columns by which a label that is a whole row is known."""
        return MESSAGES, TURNS, PERSONA, *([self.user["script"]] if self.user and "script" in self.user else [])

    async def _user_of(self, columns: Mapping[str, Any]) -> User:
        if self.user is not None and "judge" in self.user:
            judge = await _JUDGES.held(self.user["judge"])
            persona = columns.get(PERSONA) or self.user.get("persona", ANYBODY)
            return Played(judge, str(persona), limit_s=self.limit_s)
        column = TURNS if self.user is None else self.user["script"]
        return Script(columns.get(column, [] if self.user is None else None), column)

    async def _reply(self, goes_on: bool) -> tuple[str | None, Mapping[str, float]]:
        """What the user says, and what that took."""
        if self._user is None:
            raise ContractError("RMChat.step: expected a reset before it, got none. Call reset.")
        with collected() as spent, _ending_the_run():
            said = await self._user.reply(self._messages) if goes_on else None
        return said, of_user(spent)

    async def _graded(self, response: Response) -> tuple[RewardResult, Mapping[str, float | str]]:
        """What the reward says, which has a number, and its figures."""
        with collected() as spent, failures() as failed:
            result = await graded(await _REWARDS.held(self.reward), response, limit_s=self.limit_s)
        if result.reward is None:
            with _ending_the_run():
                for error in failed:
                    if isinstance(error, _OF_SETTINGS):
                        raise error
            kind = DataError if result.status is Status.LABEL else InfraError
            raise kind(f"RMChat.step: no score ({result.status}): {result.detail or 'no detail'}")
        return result, of_grade(result, spent)

    def _earned(self, result: RewardResult) -> float:
        """What the turn is paid."""
        reward = result.reward or 0.0
        before, self._last_reward = self._last_reward, reward
        return reward - before if self.when == "gain" else reward

    def _kept(self, text: str) -> str:
        """What later turns show of an answer."""
        return (final_text(text) or "") if self.part == "final" else without_special_tokens(text).strip()

    def _facts(self, text: str, *, cut: bool) -> dict[str, float]:
        return {"turns": float(self._num_turns), "cut": float(cut), **lengths(final_text(text) or "")}


def _check(name: str, value: object, holds: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"RMChat.{name}: expected {expected}, got {value!r:.200}. Change it.")


def _rm_args(rm: str | None, more: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of the scorer.

    Raises:
        ConfigError: there are other arguments; says where they go.
    """
    args: Mapping[str, Any] = more.get("rm_args", {})
    _check("rm_args", args, isinstance(args, Mapping), 'an object of arguments, as {"max_length": 4096}')
    if "rm_args" in more and rm is None:
        raise ConfigError(f"RMChat.rm_args: expected it beside rm, got {args!r:.200} alone. Give rm.")
    known = [*[each for each in inspect.signature(RMChat).parameters if each != "more"], "rm_args"]
    for name, value in more.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            mend = f"Did you mean {close[0]!r}?" if close else _place(name, value, {"rm": rm or "hf:PATH"}, args)
            raise ConfigError(f"RMChat: expected arguments among {', '.join(known)}, got {name!r}. {mend}")
    return args


def _place(name: str, value: object, rm: Mapping[str, Any], args: Mapping[str, Any]) -> str:
    """Where an argument goes that is none of the environment: to the reward, or to the scorer."""
    if name in inspect.signature(ModelReward).parameters:
        kwargs = {"reward": {"model": {**rm, **({"rm_args": args} if args else {}), name: value}}}
        return f"It is one of the reward: {json.dumps(kwargs, default=repr)}."
    return f"Is it one of the model? Then: {json.dumps({**rm, 'rm_args': {**args, name: value}}, default=repr)}."


def _of_rm(rm: Any, part: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(rm, str) and parsed(rm)[0] in ("hf", "vllm", "ray"):
        args = {"overflow": "left", **args}
    return {"model": {"rm": rm, "part": part, **({"rm_args": args} if args else {})}}


@contextmanager
def _ending_the_run() -> Iterator[None]:
    """What is wrong with the settings is so for all other episodes too."""
    try:
        yield
    except _OF_SETTINGS as error:
        stopped = RunStopped(str(error))
        stopped.exit_code = error.exit_code
        raise stopped from error


async def _both(first: Awaitable[_T], second: Awaitable[_U]) -> tuple[_T, _U]:
    """What both give; neither is left alone where the other one fails."""
    one, other = await asyncio.gather(first, second, return_exceptions=True)
    if isinstance(one, BaseException):
        raise one
    if isinstance(other, BaseException):
        raise other
    return one, other
