"""Session: chat requests in, chat responses out, and every token of them recorded. No HTTP.

A request that continues the last answer adds only its new messages (`Chat.bridge`): sampled tokens are never encoded
again. Any other request begins a segment and records the reason (`history.Mismatch`): a branch keeps the recorded ids
up to the point where it diverges; everything else is rendered again. The Trajectory is built at the end: segments in
the order of their last answers; the reward belongs to the last action.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from agentenv._util.brief import brief
from agentenv._util.off_loop import off_loop, size_of
from agentenv.chat.chat import Reply
from agentenv.chat.constraints import calls_tag, json_tag
from agentenv.chat.dialogue import Dialogue
from agentenv.chat.encoding import encoder_of
from agentenv.chat.tool_calls.messages import assistant_message
from agentenv.core.engine import sample
from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, Message, SamplingParams, StepResult, StopReason, Task
from agentenv.episode.endpoint import conversations, wire
from agentenv.episode.endpoint.conversations import Asked, Call, Line, Mismatch, Point, Work, asked, link
from agentenv.episode.endpoint.wire import ChatRequest, OutOfRoom, OutOfTurns, RequestError, UnknownSession
from agentenv.episode.failures import cause_of
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.errors import (
    ConfigError,
    ContractError,
    DataError,
    EngineError,
    InfraError,
    MissingDependency,
    PromptTooLong,
    RunStopped,
)
from agentenv.tools.calling import ParsedAction

_CHARS_OF_LOGPROB = 64
"""Characters, at least, of what is said about one token."""
_HOW_TO_SAMPLE = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of an endpoint."""

    model: str = "policy"
    """The model name in responses and `/v1/models`."""
    request_sampling: bool = True
    """True if requests may set temperature, top_p, top_k, min_p and seed; stops and `max_tokens` always may."""
    reasoning_content: bool = True
    """Return reasoning separately from the content where the template marks it; if an agent does not send it back, the
    tokens keep it. It is always separate from an answer that `response_format` demands in JSON."""
    required_as_auto: bool = False
    """True if an engine that cannot constrain takes a `tool_choice` that demands a call as "auto"; such requests are
    refused otherwise."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What is said of an answer."""

    messages: Sequence[Message]
    """What came with the request, for readers."""
    parsed: ParsedAction | None
    message: dict[str, Any]
    """OpenAI's message."""
    answer: Message
    """The same, as it is compared with what the agent sends back."""
    own: Message
    """The same for the template, with its tokens' text."""
    print: str
    logprobs: dict[str, Any] | None


class Session:
    """The conversations of one agent with one engine, and their record."""

    def __init__(
        self,
        setup: EpisodeSetup,
        *,
        task: Task | None = None,
        key: EpisodeKey | None = None,
        options: SessionOptions | None = None,
    ) -> None:
        chat = setup.chat
        if chat.options.history != "keep":
            raise ConfigError(
                f"endpoint: expected the chat option history='keep', got {chat.options.history!r}. Leave it out: what "
                "an agent rewrites is a new segment anyway."
            )
        self.chat = chat
        self.engine = setup.engine
        self.sampling = setup.sampling
        self.limits = setup.limits
        self.progress = setup.progress
        self.task, self.key = task or Task(""), key or EpisodeKey("session")
        self.options = options or SessionOptions()
        self.is_closed = False
        self.limit: StopReason | None = None
        """The budget because of which a request was refused."""
        self.refusals = Counter[str]()
        """Requests that got no answer, by the code of the error."""
        self.refusal_reasons: dict[str, str] = {}
        """The last reason for each code, the latest at the end."""
        self.fatal: ConfigError | MissingDependency | RunStopped | None = None
        """The error of a wrongly configured engine, which the episode's source raises again."""
        self._started_s, self._began_s = time.perf_counter(), time.time()
        self._lines: list[Line] = []
        self._points: dict[str, list[Point]] = {}
        self._answers: dict[str, tuple[Message, Message]] = {}  # as the agent got it, and for the template
        self._failures: dict[str, EpisodeError] = {}
        self.num_requests = 0
        self._running: set[asyncio.Task[Any]] = set()
        self._beginning = asyncio.Lock()  # one request at a time looks for its place
        self._num_busy = 0

    @property
    def mismatches(self) -> list[Mismatch]:
        """Why each segment but the first was started, in the order of their first requests."""
        return [line.mismatch for line in self._lines if line.mismatch is not None]

    @property
    def num_calls(self) -> int:
        """Number of answered requests."""
        return sum(len(line.calls) for line in self._lines)

    async def complete(self, request: ChatRequest | Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request, given as OpenAI's body or as a ChatRequest, with OpenAI's response.

        Cancelling it cancels the generation and leaves the conversation unchanged.

        Raises:
            RequestError: the request cannot be answered; its `status` and `code` are those of the response.
            EngineError: the engine failed; unless the same request succeeds later, the episode fails too.
            ConfigError: the engine is configured wrongly.
        """
        self._check_open()
        read = request if isinstance(request, ChatRequest) else self.read(request)
        running = cast(asyncio.Task[Any], asyncio.current_task())
        self._running.add(running)
        try:
            async with self._beginning:
                if self.num_calls + self._num_busy >= self.limits.max_turns:
                    self.limit = StopReason.MAX_TURNS
                    raise OutOfTurns(
                        f"session: expected at most max_turns={self.limits.max_turns} requests, got more. End here."
                    )
                work = await off_loop(size_of((read.messages, read.tools)), lambda: self._begin(asked(read)))
                self._check_open()
                line, key = work.line, work.asked.key
                if work.opens:
                    self._lines.append(line)
                    self._points.setdefault(key, []).append(Point(line, len(line.messages), len(work.prompt), None))
                line.is_busy = True
                self._num_busy += 1
            return await self._generated(work)
        finally:
            self._running.discard(running)

    async def _generated(self, work: Work) -> dict[str, Any]:
        """Answer a request that has its place; free the place if that fails."""
        try:
            asked = work.asked.request
            size = size_of((asked.json_schema or {}, asked.tools, asked.sampling))
            return await self._answer(work, await off_loop(size, self._sampling, work))
        except (ConfigError, MissingDependency, RunStopped) as error:
            self.fatal = error
            raise
        except PromptTooLong as error:
            raise self._no_room(error) from error
        except (InfraError, ContractError) as error:
            self._failures[work.asked.key] = EpisodeError(
                error.kind, type(error).__name__, str(error), "generate", cause=cause_of(error)
            )
            raise
        finally:
            work.line.is_busy = False
            self._num_busy -= 1
            if not work.line.calls:  # the request failed; conversations without an answer are not recorded
                self._lines.remove(work.line)
                for points in self._points.values():
                    points[:] = [point for point in points if point.line is not work.line]

    def read(self, body: Any) -> ChatRequest:
        """Return the request in OpenAI's body; refuse what is too long for the model before it is rendered.

        A message and a tool have at least one token, and no token has more characters than the longest one.

        Raises:
            RequestError: the request cannot be answered.
        """
        lists = [body.get(name) for name in ("messages", "tools")] if isinstance(body, Mapping) else []
        if sum(len(items) for items in lists if isinstance(items, list)) > self.limits.max_length:
            raise self._no_room()
        variables = dict(self.chat.options.chat_template_kwargs)
        wanted = body.get("chat_template_kwargs") if isinstance(body, Mapping) else None
        if isinstance(wanted, Mapping):
            if any(name not in variables or variables[name] != value for name, value in wanted.items()):
                raise RequestError(
                    f"chat_template_kwargs: expected the run's {variables}, got {brief(wanted)}. "
                    "Leave it out, and set --chat_template_kwargs of the run."
                )
            body = {**body, "chat_template_kwargs": None}
        request = wire.read_request(body)
        longest = encoder_of(self.chat.tokenizer).longest_token
        num_chars = len(json.dumps(request.tools, ensure_ascii=False)) + sum(
            len(str(message["content"])) for message in request.messages
        )
        if longest and num_chars > self.limits.max_length * longest:
            raise self._no_room()
        return request

    @property
    def last_refusal(self) -> str:
        """The reason of the last request without an answer; empty if all got one."""
        return next(reversed(self.refusal_reasons.values()), "")

    def count_refusal(self, code: str, reason: str) -> None:
        """Count a request that got no answer."""
        self.refusals[code] += 1
        self.refusal_reasons.pop(code, None)
        self.refusal_reasons[code] = reason

    def close(self) -> None:
        """Refuse further requests, and cancel running generations."""
        self.is_closed = True
        for running in self._running:
            running.cancel()

    def _check_open(self) -> None:
        if self.is_closed:
            raise UnknownSession("session: expected an open one, got one that has ended. Open another.")

    async def _answer(self, work: Work, sampling: SamplingParams) -> dict[str, Any]:
        started = time.perf_counter()
        request_id, limit_s = f"{self.key.episode_id}/{work.number}", self.limits.generate_timeout_s
        try:
            completion = await sample(self.engine, work.prompt, sampling, request_id=request_id, limit_s=limit_s)
        except DataError as error:  # the request's schema has no grammar
            raise RequestError(str(error)) from error
        if completion.finish_reason == "abort" or not completion.token_ids:
            raise EngineError(
                f"generate: expected a completion, got finish reason {completion.finish_reason!r} and "
                f"{len(completion.token_ids)} tokens. Look at the engine's log."
            )
        generate_s, is_first = time.perf_counter() - started, work.opens
        args = (completion.token_ids, sampling.stop_token_ids)
        action = await off_loop(len(completion.token_ids), self.chat.action_text, *args)
        size = max(len(action), _CHARS_OF_LOGPROB * len(completion.token_ids) * work.asked.request.logprobs)
        size = max(size, size_of(work.asked.request.messages) if is_first else 0)
        told = await off_loop(size, self._told, work, completion, action)
        self._check_open()
        mismatch = work.line.mismatch if is_first else None
        call = Call(work.number, work.reply, told.messages, completion, action, started, generate_s, mismatch)
        self._take(work, call, told)
        num = len(work.prompt) + len(completion.token_ids)
        if completion.finish_reason == "length" and num >= self.limits.max_length:
            self.limit = StopReason.MAX_LENGTH
        self._failures.pop(work.asked.key, None)
        name, model = f"{self.key.episode_id}-{work.number}", work.asked.request.model or self.options.model
        return wire.chat_completion(
            completion, told.message, request_id=name, model=model, num_prompt_tokens=len(work.prompt),
            logprobs=told.logprobs,
        )  # fmt: skip

    def _told(self, work: Work, completion: Completion, action: str) -> _Told:
        """Return what is said of an answer, without a change to the conversation."""
        request, parsed = work.asked.request, None
        if request.tools and request.wants_calls:
            tools = work.line.dialogue.tools or None
            parsed = self.chat.tool_format.parse(action, turn_index=work.number, tools=tools)
        message = self._worded(completion, action, parsed, is_json=request.json_schema is not None)
        answer = wire.read_message(message, "answer")
        own: Message = {"role": "assistant", "content": action}
        if parsed is not None and parsed.items:
            own = assistant_message(parsed, as_json=self.chat.tool_format.arguments_as_json)
        logprobs = wire.logprobs_of(completion, self.chat.decode) if request.logprobs else None
        messages = self._shown(work.asked) if work.opens else work.asked.new
        own = {**own, "trusted": True}
        return _Told(messages, parsed, message, answer, own, conversations.message_fingerprint(answer), logprobs)

    # --- where a request continues

    def _begin(self, asked: Asked) -> Work:
        """Find where a request continues.

        At the end of a conversation, its segment grows. At an earlier point, a segment begins with the recorded ids up
        to there; otherwise with the messages, rendered from the beginning.
        """
        encoder, most = encoder_of(self.chat.tokenizer), self.limits.max_length
        if any(encoder.exceeds(str(message["content"]), most) for message in asked.new):
            raise self._no_room()
        point = self._point(asked, asked.links)
        if point is None:
            dialogue = Dialogue(self.chat, self.limits.max_length)
            try:
                dialogue.begin(self._shown(asked), list(asked.request.tools) or None, after_answer=True)
            except (ConfigError, ContractError) as error:
                raise RequestError(f"messages: {error}") from error
            return self._opened(asked, Line(dialogue, self._mismatch(asked)))
        line, asked = point.line, conversations.continued(asked, point)
        if not point.is_end_for(asked):
            dialogue = Dialogue(self.chat, self.limits.max_length)
            history = self._shown(asked)[: point.num_messages - (point.action is not None)]
            dialogue.begin_at(line.dialogue.ids[: point.num_ids], history, list(asked.request.tools) or None)
            if point.action is not None:
                dialogue.append_reply(self._reply(dialogue, asked, point))
            return self._opened(asked, Line(dialogue, "branch"))
        reply = line.pending[1] if line.pending else self._reply(line.dialogue, asked, point)
        line.pending = (asked.key, reply)
        return self._work(asked, line, reply, [*line.dialogue.ids, *reply.ids], opens=False)

    def _point(self, asked: Asked, links: Sequence[str]) -> Point | None:
        """Return the point from which messages with these links continue: the end of a conversation if there is one."""
        points = next((points for link in reversed(links) if (points := self._points.get(link))), None)
        if points is None:
            return None
        following = asked.request.messages[points[0].num_messages :]
        # Nothing may follow a prompt; something other than an answer must follow an answer.
        if (points[0].action is None) == bool(following) or any(m["role"] == "assistant" for m in following):
            return None
        return max(points, key=lambda point: (point.is_end_for(asked), point.has_ids_of(asked)))

    def _mismatch(self, asked: Asked) -> Mismatch | None:
        """Return how a request differs from the most similar conversation, None if it is the first."""
        if not self._lines:
            return None
        old = max(reversed(self._lines), key=lambda line: conversations.num_shared(line.prints, asked.prints))
        if self._point(asked, conversations.chain(old.dialogue.tools or (), asked.prints)) is not None:
            return "tools"  # with the old tools it would continue
        return conversations.classify(old.messages, asked.request.messages, old_prints=old.prints, prints=asked.prints)

    def _work(self, asked: Asked, line: Line, reply: Reply, prompt: list[int], *, opens: bool) -> Work:
        if len(prompt) >= self.limits.max_length:
            raise self._no_room()
        self.num_requests += 1
        self.progress.turn_index = self.num_requests
        return Work(asked, line, reply, opens, self.num_requests - 1, prompt)

    def _no_room(self, error: PromptTooLong | None = None) -> OutOfRoom:
        """Return the refusal of a prompt that is too long for the episode, or for the engine."""
        self.limit = StopReason.MAX_LENGTH
        if error is not None:
            return OutOfRoom(f"{error} This model's maximum context length is exceeded.")
        num = self.limits.max_length
        return OutOfRoom(
            f"messages: expected fewer than max_length={num} tokens, got more. Shorten them. "
            f"This model's maximum context length is {num} tokens."
        )

    def _reply(self, dialogue: Dialogue, asked: Asked, point: Point) -> Reply:
        ids, text = point.action or ([], "")
        messages = asked.request.messages[point.num_messages :]
        try:
            reply = dialogue.reply_to(ids, text, messages, reserve=asked.request.max_tokens or self.sampling.max_tokens)
        except (ConfigError, ContractError) as error:
            raise RequestError(f"messages: {error}") from error
        if reply is None:
            raise self._no_room()
        return reply

    def _opened(self, asked: Asked, line: Line) -> Work:
        ids = list(line.dialogue.ids)
        work = self._work(asked, line, Reply(ids, "rerendered"), ids, opens=True)
        line.messages, line.prints, line.num_first = list(asked.request.messages), asked.prints, len(asked.prints)
        return work

    def _shown(self, asked: Asked) -> list[Message]:
        """Return the messages of a request, with answers as they were sampled."""
        shown: list[Message] = []
        for message, one in zip(asked.request.messages, asked.prints, strict=True):
            if one in self._answers:  # sampled here: unchanged, except for the ids of its calls
                answer, own = self._answers[one]
                ids = dict(zip(conversations.call_ids(answer), conversations.call_ids(message), strict=True))
                calls = [{**call, "id": ids.get(call["id"], call["id"])} for call in own.get("tool_calls", ())]
                shown.append({**own, **({"tool_calls": calls} if calls else {})})
                continue
            bare = {key: value for key, value in message.items() if key != "reasoning_content"}
            wire.check_text(bare.get("tool_calls", ""), "tool_calls")
            shown.append(bare)
        return shown

    # --- sampling

    def _sampling(self, work: Work) -> SamplingParams:
        own, request = self.sampling, work.asked.request
        ignored = () if self.options.request_sampling else _HOW_TO_SAMPLE
        wanted = {name: value for name, value in request.sampling.items() if name not in ignored}
        limits = [most for most in (request.max_tokens, own.max_tokens) if most is not None]
        stop = (*own.stop, *(text for text in wanted.get("stop", ()) if text not in own.stop))
        least = max(0, int(wanted.get("min_tokens", own.min_tokens)))
        tag = self._structural_tag(request)
        try:
            wanted |= {"stop": stop, "max_tokens": min(limits, default=None), "min_tokens": least}
            asked = replace(own, structural_tag=tag or own.structural_tag, **wanted)
            # A request that sets a seed gets that seed.
            return asked.for_turn(0 if "seed" in wanted else work.number, self.limits.max_length - len(work.prompt))
        except ValueError as error:
            raise RequestError(f"request: {error}") from error

    def _structural_tag(self, request: ChatRequest) -> str | None:
        """Return the structural tag of what a request demands of the answer; None if it demands nothing."""
        problem = self.engine.constraint_problem
        if problem and request.json_schema is not None:
            raise RequestError(
                f"response_format: expected text, because {problem}, got {brief(request.json_schema)}. Leave it out."
            )
        if problem and request.must_call and not self.options.required_as_auto:
            raise RequestError(
                f"tool_choice: expected 'auto' or 'none', because {problem}, got a call of one of "
                f"{brief(request.must_call)}. Leave it out, or take it as 'auto' with the endpoint's option "
                "required_as_auto."
            )
        try:
            if request.must_call and not problem:
                tools = [tool for tool in request.tools if tool["function"]["name"] in request.must_call]
                return calls_tag(self.chat, tools, several=not request.one_call)
            if request.json_schema is not None:
                return json_tag(self.chat, request.json_schema, request.tools if request.wants_calls else ())
        except DataError as error:
            raise RequestError(str(error)) from error
        return None

    def _take(self, work: Work, call: Call, told: _Told) -> None:
        """Record an answer."""
        line, ids = work.line, list(call.completion.token_ids)
        if not work.opens:
            line.dialogue.append_reply(work.reply)
        line.dialogue.parsed_action = told.parsed
        line.pending = None
        if self.limit is StopReason.MAX_LENGTH:
            self.limit = None  # the agent continued within the budget, so the refusal did not end the episode
        line.dialogue.append_action(ids)
        self._answers[told.print] = told.answer, told.own
        line.messages = [*work.asked.request.messages, told.answer]
        line.prints = [*work.asked.prints, told.print]
        line.calls.append(call)
        point = Point(line, len(line.messages), len(line.dialogue.ids), (ids, call.action))
        self._points.setdefault(link(work.asked.key, told.print), []).append(point)

    def _worded(
        self, completion: Completion, action: str, parsed: ParsedAction | None, *, is_json: bool
    ) -> dict[str, Any]:
        """Return the answer for the agent: without the stop string, and with separate reasoning if requested."""
        text, stop = action, completion.matched_stop
        if isinstance(stop, str) and stop in text and not (parsed and parsed.items):
            text = text[: text.rfind(stop)]
        separate = self.options.reasoning_content or is_json
        ways = self.chat.template.reasoning if separate and self.chat.has_template else None
        if ways is None:
            return wire.answer_message(text, parsed)
        opens, closes, _ = ways
        prompt = self.chat.template.generation_prompt
        if is_json and not text.startswith(opens) and prompt.rfind(opens) <= prompt.rfind(closes):
            return wire.answer_message(text, parsed)  # marks of reasoning in it are part of the JSON
        content = parsed.content if parsed is not None and parsed.calls else text
        before, closed, after = content.partition(closes) if is_json else content.rpartition(closes)
        if not closed and (opens in content or prompt.rfind(opens) > prompt.rfind(closes)):
            before, after = content, ""
        reasoning = before.partition(opens)[2] if opens in before else before
        if parsed is not None and parsed.calls:
            return wire.answer_message(text, replace(parsed, content=after.strip()), reasoning.strip() or None)
        return wire.answer_message(after.strip("\n") if before else text, parsed, reasoning.strip() or None)

    # --- the record

    def finish(
        self,
        reward: float | None = None,
        score: float | None = None,
        info: Mapping[str, float | str] | None = None,
        *,
        stop_reason: StopReason | None = None,
        error: EpisodeError | None = None,
    ) -> Trajectory:
        """Close the session and return its record; without a reward, the last turn has no result.

        If a request was refused because of a budget, that is the stop reason; an engine failure without a later
        successful request is the error, even if the agent reports or raises something else.

        Raises:
            ContractError: the reward, the score or the info is not what a StepResult takes.
        """
        self.is_closed = True
        error = next(iter(self._failures.values()), error)
        reason = stop_reason or (StopReason.ERROR if error else self.limit or StopReason.TERMINATED)
        key = self.key
        trajectory = Trajectory(
            self.task, self.limits.max_length, key.episode_id, key.group_id, attempt=key.attempt, seed=key.seed,
            refusals=dict(self.refusals), refusal_reasons=dict(self.refusal_reasons), began_s=self._began_s,
            retried=[*key.retried],
        )  # fmt: skip
        calls = conversations.record(self._lines, trajectory, self._started_s)
        if calls and reward is not None:
            ended, cut = reason is StopReason.TERMINATED, reason is StopReason.TRUNCATED_BY_ENV
            result = StepResult(reward=reward, score=score, info=dict(info or {}), terminated=ended, truncated=cut)
            trajectory.set_result(result)
        trajectory.finish(reason, error)
        return trajectory
