"""RMChat: a conversation of one or more turns, in which a reward model, a judge or any reward scores the answers.

The user's side is the row's script, or a language model.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from agentenv._util.calls import StepTimeout, bounded
from agentenv._util.suggest import did_you_mean
from agentenv.chat.chat import PromptText
from agentenv.core.agent import AgentInstance, ResetState, StepState
from agentenv.core.types import Message, StepResult
from agentenv.errors import ConfigError, ContractError, DataError, InfraError, MissingDependency, RunStopped
from agentenv.rewards.grading import RM_RETRIED, collect_usage, grade
from agentenv.rewards.judges.asking import JudgeRetry, ask, judge_from
from agentenv.rewards.judges.protocol import Judge
from agentenv.rewards.models.factory import parsed
from agentenv.rewards.models.render import checked
from agentenv.rewards.models.reward import ModelReward
from agentenv.rewards.models.types import ready
from agentenv.rewards.registry import reward_from
from agentenv.rewards.rules.text import final_text, with_opened_thought, without_special_tokens
from agentenv.rewards.types import Response, Reward, RewardResult
from agentenv_envs.common import RENDERED, check, row_of
from agentenv_envs.rm_chat.shared import Shared, closable

END = "[END]"
"""The message of a played user who has nothing more to ask."""
DEFAULT_PERSONA = "A person who wants help with what their first message says, and has no more time than that takes."
PLAYING = """You play the user in a conversation with an assistant. The other side is the assistant; you never answer
for it, help it, or say that you play. Whom you play:

{persona}

Write the user's next message and nothing else: short, in their own words, about what is still missing, wrong or
unclear in the last answer, or the next thing that they need. Where nothing is left to ask, write {end} and no more."""
_BEGIN = "Write the user's first message."
_SILENCE = "(no answer)"
_SAMPLING = {"temperature": 1.0, "max_tokens": 256}


class Script:
    """Sends fixed texts in order, independently of the answers."""

    def __init__(self, turns: Any, column: str) -> None:
        if isinstance(turns, str) or not isinstance(turns, Sequence) or not all(map(_is_text, turns)):
            raise DataError(f"rm_chat: {column}: expected a list of texts, got {turns!r:.120}. Correct the row.")
        self._left = list(turns)

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """Return the next text."""
        return self._left.pop(0) if self._left else None


class Played:
    """A language model that plays the user; it sees the conversation with swapped roles and without thinking.

    Args:
        judge: the language model; asked again if a reply is empty.
        persona: the person to play.
        limit_s: longest time for one message, including all attempts.
    """

    def __init__(self, judge: Judge, persona: str, *, limit_s: float) -> None:
        self._judge, self._limit_s = judge, limit_s
        self._head: list[Message] = [
            {"role": "system", "content": PLAYING.format(persona=persona, end=END)},
            {"role": "user", "content": _BEGIN},
        ]

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """Return the model's message; None after `[END]`.

        Raises:
            InfraError: no message came in time.
        """
        retry = JudgeRetry(limit_s=self._limit_s)
        # As the playing model sees the conversation, the user's messages are the assistant's.
        roles = {"user": "assistant", "assistant": "user"}
        prompt = list(self._head)
        for message in messages:
            if message["role"] in roles:
                prompt.append({"role": roles[message["role"]], "content": message["content"] or _SILENCE})
        try:
            asking = partial(ask, self._judge, prompt, _message_in, retry, expected="what the user says")
            reply = await bounded(asking, limit_s=self._limit_s, flag="limit_s")
        except StepTimeout as error:
            raise InfraError(f"rm_chat: user: {error}") from error
        return None if END in reply else reply


def user_from(user: Any) -> Mapping[str, Any] | None:
    """Check the settings of a user: None, `{"script": column}`, or `{"judge": settings}` with or without `persona`.

    Raises:
        ConfigError: the settings have none of these forms.
    """
    if user is None:
        return None
    if isinstance(user, Mapping) and "base_url" in user and not {"script", "judge"} & user.keys():
        judge = {name: value for name, value in user.items() if name != "persona"}
        user = {"judge": judge, **({"persona": user["persona"]} if "persona" in user else {})}
    known = isinstance(user, Mapping) and any(
        name in user and user.keys() <= {name, *others} for name, others in (("script", ()), ("judge", ("persona",)))
    )
    if (
        not known
        or not _is_text(user.get("persona", DEFAULT_PERSONA))
        or ("script" in user and not _is_text(user["script"]))
    ):
        raise ConfigError(
            "RMChat.user: expected None, {'script': column} or {'base_url': …, 'model': …}, the same as {'judge': "
            f"settings}}, with or without 'persona': text, got {user!r:.200}."
        )
    return dict(user)


def player_from(settings: Any) -> Any:
    """Return the language model that plays: an object with `complete`, or one from settings for `judge_from`.

    Raises:
        ConfigError: the settings do not describe one.
    """
    if callable(getattr(settings, "complete", None)) and not isinstance(settings, type):
        return settings
    if not isinstance(settings, Mapping):
        raise ConfigError(f"RMChat.user.judge: expected settings, got {settings!r:.200}. Set base_url and model.")
    sampling = settings.get("sampling") or {}
    return judge_from(
        {**settings, "sampling": {**_SAMPLING, **sampling} if isinstance(sampling, Mapping) else sampling}
    )


def _message_in(reply: str) -> str | None:
    """Return the message; None if it is empty or has half a surrogate pair, which no tokenizer accepts."""
    text = final_text(reply) or ""
    return None if not text or any("\ud800" <= char <= "\udfff" for char in text) else text


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


# --- the environment --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)
PREFIX = "rm/"
MESSAGES, TURNS, PERSONA = "messages", "user_turns", "persona"
"""Columns: raw messages, if the prompt is a rendering; the user's later messages; the persona of a played user."""
_ADVICE = f"Use raw messages: the reward model has its own template. Or put them into the column {MESSAGES!r}."

STAND_IN: Mapping[str, Any] = {
    "sum": {
        "length": {"length": {"min_length": 100, "max_length": 1500, "rate": 0.01, "floor": -1.0, "part": "final"}},
        "repetition": {"repetition": {"scope": "final"}},
    }
}
"""The reward without settings: penalties for short, long and repetitive answers, from -2 to 0. It does not measure
quality: it lets users try a conversation without a model."""


def _make_reward(settings: Any) -> Reward:
    if settings is STAND_IN:
        logger.error(  # `agentenv run` shows errors
            "rm_chat: expected a reward, got none: using length and repetition, which do not measure quality. "
            'Name one: --env_kwargs \'{"rm": "hf:PATH"}\'; examples/train_reward_model.py makes a small one.'
        )
    return reward_from(settings)


_REWARDS, _JUDGES = Shared(_make_reward), Shared(player_from)


class RMChat(AgentInstance):
    """The environment's side of a conversation: plays the user, and scores each answer, or the whole at the end.

    The user's later messages come from the row's script, or from a language model. The conversation ends with the last
    of them, after `max_turns` answers, or with an answer that the token limit cut; that one is truncated, but still
    scored. A reward sees the raw messages, earlier turns without their thinking, and renders them itself.

    Rewards by `when`: `each`, the reward of the conversation so far, so that the sum over turns grows with their
    number; `gain`, the turn's increase of it, so that the sum is that of the whole conversation; `end`, only the whole
    conversation's, at the last turn or when a limit of the run ends the episode. Score: the reward's own, None if it
    has none.

    If a scorer, a judge or a user fails, the step raises, so that the episode is tried again: that is never a bad
    answer. If one refuses its settings, such as a wrong address, the run ends. All episodes of a process share one
    scorer, which is closed at the end of its event loop. Rows need no label, unless the reward does.

    info per turn: turns (so far), cut (1 if the token limit cut the answer); rm/length_chars and rm/length_words of the
    answer without its thinking, rm/no_answer (0/1); of scored turns rm/reward and the reward's known components as
    rm/name; if a reward model scored, rm/truncated, rm/clipped (0/1), rm/value if there is exactly one, and
    rm/num_retried, its repeated attempts; rm/status and rm/detail (texts); judge/requests, judge/retries,
    judge/prompt_tokens, judge/cost and others for the judges' requests, and user/… for a played user. The counts of a
    failed score are in no episode.
    """

    datasets: ClassVar[Mapping[str, str | Path]] = {
        f"rm_chat_{name}": Path(__file__).parent / f"data/{name}.jsonl" for name in ("prompts", "pairs")
    }
    """Conversations to have, and pairs of answers to train and measure a reward model with."""
    needs_label = False

    def __init__(  # noqa: PLR0913 - a reward, or the two settings of a reward model
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
        rm_args: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Choose the reward and the user.

        Args:
            reward: settings for `agentenv.rewards.registry.reward_from`, such as `{"model": {"rm": "hf:PATH", "scale":
                0.5, "clip": [-5, 5]}}`; None: `rm`, else STAND_IN.
            rm: only a reward model, named as for `agentenv.rewards.models.factory`; short for `{"model": {"rm": rm,
                "part": part}}`. A model that is loaded here sees only the end of a conversation that is too long for
                it: if it refused one, a policy could avoid its reward by writing long answers.
            when: each, gain or end.
            max_turns: most answers of the policy.
            user: None: the row's column `user_turns`, if it exists; `{"script": column}`: another column, which every
                row needs; `{"base_url": address, "model": name, "persona": text}`: a language model, with any other
                settings of `judges.asking.judge_from`; or the same as `{"judge": settings, "persona": text}`, where
                settings may be an object with `complete`. A row's column `persona` takes precedence over that text.
            system: a system message for conversations that start without one; the reward model sees it too.
            part: `final` hides the thinking of earlier answers from the reward, `all` shows it.
            limit_s: longest time for a score and a user's message; less than --step_timeout_s, so that slow ones are
                retried.
            rm_args: arguments of the scorer of `rm`, such as `{"max_length": 4096}`; they take precedence.
            more: refused; the message says where they belong.

        Raises:
            ConfigError: the settings do not describe a reward or a user.
        """
        rm_args = _rm_args(rm, rm_args, more)
        if reward is not None and rm is not None:
            raise ConfigError(f"RMChat.rm: expected None besides reward, got {rm!r}. Pass one of them.")
        check("RMChat.when", when, when in ("each", "gain", "end"), "each, gain or end")
        check("RMChat.part", part, part in ("final", "all"), "final or all")
        check("RMChat.max_turns", max_turns, type(max_turns) is int and max_turns >= 1, "a whole number >= 1")
        check("RMChat.limit_s", limit_s, type(limit_s) in (int, float) and 0 < limit_s < float("inf"), "seconds > 0")
        check("RMChat.system", system, system is None or (isinstance(system, str) and system.strip()), "None or a text")
        self.when = when
        self.part = part
        self._max_turns = max_turns
        self.limit_s = limit_s
        self.reward = STAND_IN if reward is None and rm is None else reward
        if rm is not None:
            if isinstance(rm, str) and parsed(rm)[0] in ("hf", "ray"):
                rm_args = {"overflow": "left", **rm_args}
            self.reward = {"model": {"rm": rm, "part": part, **({"rm_args": rm_args} if rm_args else {})}}
        _REWARDS.get(self.reward)
        self.user = user_from(user)
        self.system = system
        if self.user is not None and "judge" in self.user:
            _JUDGES.get(self.user["judge"])
        self._messages: list[Message] = []
        self._user: Script | Played | None = None
        self._owed: Response | None = None
        self._num_turns = 0
        self._last_reward = 0.0

    async def reset(self, states: ResetState) -> ResetState:
        """Store the raw messages and return them for the policy's template; load the reward model if necessary.

        Raises:
            DataError: the row has no raw messages that an assistant can answer, or no script.
            RunStopped: the reward model does not exist.
        """
        _, columns = row_of(states, self._own_columns)
        observation, messages = first_messages(states["observation"], columns.get(MESSAGES), self.system)
        self._messages = list(messages)
        if self.user is not None and "judge" in self.user:
            judge = await _JUDGES.open(self.user["judge"])
            persona = columns.get(PERSONA) or self.user.get("persona", DEFAULT_PERSONA)
            self._user = Played(judge, str(persona), limit_s=self.limit_s)
        else:
            column = TURNS if self.user is None else self.user["script"]
            self._user = Script(columns.get(column, [] if self.user is None else None), column)
        for part in closable(await _REWARDS.open(self.reward)):
            with _settings_errors_end_run():
                await ready(part)
        return {**states, "observation": observation}

    async def step(self, states: StepState) -> StepResult:
        """Score an answer and return the user's next message.

        Raises:
            DataError: the reward cannot use the conversation or the row's label.
            InfraError: the scorer or the user failed.
            RunStopped: one of them refuses its settings.
        """
        label, columns = row_of(states, self._own_columns)
        text = with_opened_thought(states["action_text"], states.get("observation_text", ""))
        response = Response(text, label, list(self._messages), columns)
        final = final_text(text) or ""
        shown_later = final if self.part == "final" else without_special_tokens(text).strip()
        self._messages.append({"role": "assistant", "content": shown_later})
        self._num_turns += 1
        cut = states.get("finish_reason") == "length"
        continues = not cut and self._num_turns < self._max_turns
        if self.when == "end":
            reply, facts = await self._reply(continues)
            result, figures = await self._graded(response) if reply is None else (None, {})
        else:
            # Both end, even if one fails.
            ended: Any = await asyncio.gather(self._reply(continues), self._graded(response), return_exceptions=True)
            for each in ended:
                if isinstance(each, BaseException):
                    raise each
            (reply, facts), (result, figures) = ended
        self._owed = response if result is None else None
        if reply is not None:
            self._messages.append({"role": "user", "content": reply})
        return StepResult(
            "" if reply is None else [{"role": "user", "content": reply}],
            reward=0.0 if result is None else self._earned(result),
            terminated=reply is None and not cut,
            truncated=reply is None and cut,
            score=None if result is None else result.score,
            info={
                "turns": float(self._num_turns),
                "cut": float(cut),
                f"{PREFIX}length_chars": float(len(final)),  # rewards are biased towards long answers
                f"{PREFIX}length_words": float(len(final.split())),
                f"{PREFIX}no_answer": float(not final),
                **facts,
                **figures,
            },
        )

    async def on_truncate(self, states: StepState) -> StepResult | None:
        """Score the conversation when a limit ends it early.

        Raises:
            DataError, InfraError, RunStopped: see `step`.
        """
        owed, self._owed = self._owed, None
        if owed is None:
            return None
        result, figures = await self._graded(owed)
        return StepResult(reward=self._earned(result), score=result.score, info=figures)

    @property
    def _own_columns(self) -> tuple[str, ...]:
        """The columns that mark a label as a whole row."""
        return MESSAGES, TURNS, PERSONA, *([self.user["script"]] if self.user and "script" in self.user else [])

    async def _reply(self, continues: bool) -> tuple[str | None, Mapping[str, float]]:
        """Return the user's message and its cost: `user/requests`, `user/cost` and others; nothing for a script."""
        if self._user is None:
            raise ContractError("RMChat.step: expected a reset before it, got none. Call reset.")
        with collect_usage() as spent, _settings_errors_end_run():
            reply = await self._user.reply(self._messages) if continues else None
        return reply, {f"user/{name.rpartition('/')[2]}": count for name, count in spent.items()}

    async def _graded(self, response: Response) -> tuple[RewardResult, Mapping[str, float | str]]:
        """Return the reward's result, which has a number, and its log values."""
        with collect_usage() as spent:
            result = await grade(await _REWARDS.open(self.reward), response, limit_s=self.limit_s)
        if result.reward is None:
            raise result.error("RMChat.step: no score")
        return result, of_grade(result, spent)

    def _earned(self, result: RewardResult) -> float:
        reward = result.reward or 0.0
        before, self._last_reward = self._last_reward, reward
        return reward - before if self.when == "gain" else reward


def _rm_args(rm: str | None, rm_args: Any, more: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the scorer's arguments.

    Raises:
        ConfigError: there are other arguments; the message says where they belong.
    """
    args: Mapping[str, Any] = {} if rm_args is None else rm_args
    check("RMChat.rm_args", args, isinstance(args, Mapping), 'an object of arguments, as {"max_length": 4096}')
    if rm_args is not None and rm is None:
        raise ConfigError(f"RMChat.rm_args: expected it together with rm, got {args!r:.200} alone. Pass rm.")
    known = [each for each in inspect.signature(RMChat).parameters if each != "more"]
    for name, value in more.items():
        model = {"rm": rm or "hf:PATH"}
        if name in inspect.signature(ModelReward).parameters:
            kwargs = {"reward": {"model": {**model, **({"rm_args": args} if args else {}), name: value}}}
            place = f"It belongs to the reward: {json.dumps(kwargs, default=repr)}."
        else:
            rm_kwargs = {**model, "rm_args": {**args, name: value}}
            place = f"If it belongs to the model: {json.dumps(rm_kwargs, default=repr)}."
        advice = did_you_mean(name, known, place, cutoff=0.6)
        raise ConfigError(f"RMChat: expected arguments among {', '.join(known)}, got {name!r}.{advice}")
    return args


@contextmanager
def _settings_errors_end_run() -> Iterator[None]:
    """Turn errors in the settings into RunStopped: they would fail all other episodes too."""
    try:
        yield
    except (ConfigError, MissingDependency) as error:
        stopped = RunStopped(str(error))
        stopped.exit_code = error.exit_code
        raise stopped from error


def first_messages(prompt: str | Sequence[Message], column: Any, system: str | None) -> tuple[Any, list[Message]]:
    """Return the first observation for the policy, and the raw messages behind it.

    A reward model renders messages with its own template. If they contain the policy's rendering, it sees one template
    inside another and its scores are meaningless, which nothing else would show: such rows are refused.

    Args:
        prompt: messages; or text, either a user's message or a rendering of the messages in `column`.
        column: the row's column with the raw messages, or None.
        system: inserted before messages without a system message; a rendering stays unchanged.

    Raises:
        DataError: raw messages are missing, or their roles are out of order, or it is not the assistant's turn.
    """
    if isinstance(prompt, PromptText):
        prompt = prompt.messages
    if not isinstance(prompt, str):
        messages = _raw(prompt, system)
        return messages, messages
    if not RENDERED.match(prompt):
        messages = _raw([{"role": "user", "content": prompt}] if column is None else column, system)
        return messages, messages
    if column is None:
        raise DataError(f"rm_chat: expected a raw prompt, got a chat template's text: {prompt!r:.120}. {_ADVICE}")
    return prompt, _raw(column, None)


def _raw(messages: Any, system: str | None) -> list[Message]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise DataError(f"rm_chat: {MESSAGES}: expected messages, got {messages!r:.120}. Correct the row.")
    raw: list[Message] = [*checked([*messages, {"role": "assistant", "content": ""}])[:-1]]
    for index, message in enumerate(raw):
        if RENDERED.match(message["content"]):
            got = f"a chat template's text: {message['content']!r:.120}"
            raise DataError(f"rm_chat: message {index}: expected raw text, got {got}. {_ADVICE}")
    if system is None or raw[0]["role"] in ("system", "developer"):
        return raw
    return [{"role": "system", "content": system}, *raw]


def of_grade(result: RewardResult, spent: Mapping[str, float]) -> dict[str, float | str]:
    """Return a grade's components, its cost, and its reward and status.

    `rm/value` is the reward model's raw number if there is exactly one in the reward; `rm/truncated` and `rm/clipped`
    are 1.0 if any was truncated or clipped. They and `rm/num_retried` exist if there is a reward model;
    `judge/requests`, `judge/retries`, `judge/cost` and others exist if a judge was asked.
    """
    known = {name: float(value) for name, value in result.components.items() if value is not None}

    def named(name: str) -> list[float]:
        return [value for key, value in known.items() if key.rpartition("/")[2] == name]  # the reward's, or a term's

    values = named("value")
    facts = {
        "reward": float(result.reward or 0.0),
        **{name: max(flags) for name in ("truncated", "clipped") if (flags := named(name))},
        **({"value": values[0]} if len(values) == 1 else {}),
    }
    texts = {"status": result.status.value, **({"detail": result.detail} if result.detail else {})}
    found: dict[str, float | str] = {**known, **facts, **texts}
    retried = {RM_RETRIED: 0.0} if "truncated" in facts else {}
    return {**retried, **spent, **{f"{PREFIX}{name}": fact for name, fact in found.items()}}
