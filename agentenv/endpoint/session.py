"""Session: chat requests in, chat responses out, and every token of them recorded. No HTTP.

A request whose messages go on from the last answer adds only what is new (`Chat.bridge`): nothing that was sampled is
encoded again. Any other begins a segment, with the reason beside it (`history.Mismatch`): a branch has the recorded
ids up to the point where it leaves, everything else is rendered anew. The Trajectory is made at the end, one segment
after the other, the one that was spoken in last at the end; the reward goes to the last action.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from agentenv.agent import Engine
from agentenv.chat import Chat
from agentenv.deadlines import sample
from agentenv.dialogue import Dialogue, Reply
from agentenv.endpoint.history import Mismatch, chain, classify, link, message_fingerprint, num_shared
from agentenv.endpoint.lines import Asked, Call, Line, Point, Work, asked, record
from agentenv.endpoint.wire import (
    ChatRequest,
    OutOfRoom,
    RequestError,
    UnknownSession,
    answer_message,
    chat_completion,
    check_text,
    logprobs_of,
    read_message,
    read_request,
    shaped_call,
)
from agentenv.episode import EpisodeKey
from agentenv.errors import AgentEnvError, ConfigError, ContractError, EngineError, InfraError, RunStopped
from agentenv.tools import ParsedAction, assistant_message
from agentenv.trajectory import EpisodeError, Trajectory
from agentenv.types import Completion, Limits, Message, SamplingParams, StepResult, StopReason, Task

_HOW_TO_SAMPLE = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What an endpoint does where there is a choice."""

    model: str = "policy"
    """The name that responses and `/v1/models` give."""
    request_sampling: bool = True
    """Whether requests choose temperature, top_p, top_k, min_p and seed; stops and `max_tokens` they always do."""
    reasoning_content: bool = False
    """Reasoning apart from the content; where an agent does not send it back, the tokens keep it."""


class Session:
    """The conversations of one agent with one engine, and their record."""

    def __init__(
        self,
        chat: Chat,
        engine: Engine,
        *,
        sampling: SamplingParams | None = None,
        limits: Limits | None = None,
        task: Task | None = None,
        key: EpisodeKey | None = None,
        options: SessionOptions | None = None,
    ) -> None:
        if chat.options.history != "keep":
            raise ConfigError(
                f"endpoint: expected the chat option history='keep', got {chat.options.history!r}. Leave it out: what "
                "an agent rewrites is a new segment anyway."
            )
        self.chat, self.engine = chat, engine
        self.sampling, self.limits = sampling or SamplingParams(), limits or Limits()
        self.task, self.key = task or Task(""), key or EpisodeKey("session")
        self.options = options or SessionOptions()
        self.is_closed = False
        self.limit: StopReason | None = None
        """The budget that a request was refused for."""
        self.fatal: ConfigError | RunStopped | None = None
        """The engine is set up wrongly; whoever runs the session raises it again."""
        self._lines: list[Line] = []
        self._points: dict[str, Point] = {}
        self._said: dict[str, Message] = {}
        self._failures: dict[str, EpisodeError] = {}
        self.num_requests = 0
        self._running: set[asyncio.Task[Any]] = set()
        self._num_busy = 0

    @property
    def mismatches(self) -> list[Mismatch]:
        """Why each segment but the first was begun, in the order of their first requests."""
        return [line.mismatch for line in self._lines if line.mismatch is not None]

    @property
    def num_calls(self) -> int:
        """Requests that were answered."""
        return sum(len(line.calls) for line in self._lines)

    async def complete(self, request: ChatRequest | Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request, given as OpenAI's body or already read, with OpenAI's response.

        Cancelling it cancels the generation and leaves the conversation as it was.

        Raises:
            RequestError: the request cannot be answered; its `status` and `code` are those to send.
            EngineError: the engine failed; unless the same request succeeds later, so has the episode.
            ConfigError: the engine is set up wrongly.
        """
        self._check_open()
        read = request if isinstance(request, ChatRequest) else read_request(request)
        if self.num_calls + self._num_busy >= self.limits.max_turns:
            self.limit = StopReason.MAX_TURNS
            raise OutOfRoom(
                f"session: expected at most max_turns={self.limits.max_turns} requests, got more. End here."
            )
        work = self._begin(asked(read))
        work.line.is_busy = True
        self._num_busy += 1
        running = cast(asyncio.Task[Any], asyncio.current_task())
        self._running.add(running)
        try:
            return await self._answer(work, self._sampling(work))
        except (ConfigError, RunStopped) as error:
            self.fatal = error
            raise
        except InfraError as error:
            self._failures[work.asked.key] = EpisodeError("infra", type(error).__name__, str(error), "generate")
            raise
        finally:
            self._running.discard(running)
            work.line.is_busy = False
            self._num_busy -= 1
            if not work.line.calls:  # it was in vain: a line that nobody answered in is none
                self._lines.remove(work.line)
                self._points = {key: point for key, point in self._points.items() if point.line is not work.line}

    def close(self) -> None:
        """Answer nothing more; generations that still run, for whoever they are, are cancelled."""
        self.is_closed = True
        for running in self._running:
            running.cancel()

    def _check_open(self) -> None:
        if self.is_closed:
            raise UnknownSession("session: expected an open one, got one that has ended. Open another.")

    async def _answer(self, work: Work, sampling: SamplingParams) -> dict[str, Any]:
        started = time.perf_counter()
        completion = await self._generate(work.prompt, sampling, work.number)
        self._check_open()
        request, is_first = work.asked.request, work.opens
        call = Call(
            number=work.number,
            reply=work.reply,
            opens=is_first,
            messages=self._shown(work.asked) if is_first else work.asked.new,
            completion=completion,
            action=self.chat.action_text(completion.token_ids, sampling.stop_token_ids),
            started=started,
            generate_s=time.perf_counter() - started,
            mismatch=work.line.mismatch if is_first else None,
        )
        message = self._take(work, call)
        self._failures.pop(work.asked.key, None)
        return chat_completion(
            completion,
            message,
            request_id=f"{self.key.episode_id}-{work.number}",
            model=request.model or self.options.model,
            num_prompt_tokens=len(work.prompt),
            logprobs=logprobs_of(completion, self.chat.decode) if request.logprobs else None,
        )

    # --- where a request goes on

    def _begin(self, asked: Asked) -> Work:
        """Find the place of a request: at the end of a conversation, at an earlier point of one, or nowhere."""
        messages = asked.request.messages
        point = next((self._points[link] for link in reversed(asked.links) if link in self._points), None)
        following = messages[point.num_messages :] if point else ()
        if point is not None and (point.action is None) == bool(following):
            point = None  # behind a prompt nothing may come, behind an answer something must
        if point is None or any(message["role"] == "assistant" for message in following):
            return self._rendered(asked)
        line = point.line
        at_end = point.num_messages == len(line.messages) and point.action is not None and not line.is_busy
        if not at_end or (line.pending is not None and line.pending[0] != asked.key):
            return self._forked(asked, point)
        reply = line.pending[1] if line.pending else self._reply(line.dialogue, asked, point)
        line.pending = (asked.key, reply)
        return self._work(asked, line, reply, [*line.dialogue.ids, *reply.ids], opens=False)

    def _work(self, asked: Asked, line: Line, reply: Reply, prompt: list[int], *, opens: bool) -> Work:
        if len(prompt) >= self.limits.max_length:
            raise self._no_room()
        self.num_requests += 1
        return Work(asked, line, reply, opens, self.num_requests - 1, prompt)

    def _no_room(self) -> OutOfRoom:
        self.limit = StopReason.MAX_LENGTH
        return OutOfRoom(
            f"messages: expected fewer than max_length={self.limits.max_length} tokens, got more. Shorten them."
        )

    def _reply(self, dialogue: Dialogue, asked: Asked, point: Point) -> Reply:
        ids, text = point.action or ([], "")
        messages = asked.request.messages[point.num_messages :]
        try:
            reply = dialogue.reply(ids, text, messages, reserve=asked.request.max_tokens or self.sampling.max_tokens)
        except (ConfigError, ContractError) as error:
            raise RequestError(f"messages: {error}") from error
        if reply is None:
            raise self._no_room()
        return reply

    def _forked(self, asked: Asked, point: Point) -> Work:
        """The recorded ids up to a point, and what follows there, as a segment of its own."""
        dialogue = Dialogue(self.chat, self.limits.max_length)
        dialogue.ids, dialogue.tools = list(point.line.dialogue.ids[: point.num_ids]), list(asked.request.tools) or None
        if point.action is not None:
            dialogue.take(self._reply(dialogue, asked, point))
        return self._opened(asked, Line(dialogue, "branch"))

    def _rendered(self, asked: Asked) -> Work:
        """The messages rendered from the beginning, in a segment of their own."""
        dialogue = Dialogue(self.chat, self.limits.max_length)
        try:
            dialogue.begin(self._shown(asked), list(asked.request.tools) or None)
        except (ConfigError, ContractError) as error:
            raise RequestError(f"messages: {error}") from error
        return self._opened(asked, Line(dialogue, self._mismatch(asked)))

    def _opened(self, asked: Asked, line: Line) -> Work:
        ids = list(line.dialogue.ids)
        work = self._work(asked, line, Reply(ids, "rerendered"), ids, opens=True)
        line.messages, line.prints, line.num_first = list(asked.request.messages), asked.prints, len(asked.prints)
        self._lines.append(line)
        self._points.setdefault(asked.key, Point(line, len(line.messages), len(ids), None))
        return work

    def _shown(self, asked: Asked) -> list[Message]:
        """The messages of a request as the template takes them."""
        return [
            self._as_rendered(message, one) for message, one in zip(asked.request.messages, asked.prints, strict=True)
        ]

    def _as_rendered(self, message: Message, one: str) -> Message:
        """A message of the agent's as the template takes it: our own answers as they were said."""
        if one in self._said:
            return self._said[one]
        bare = {key: value for key, value in message.items() if key != "reasoning_content"}
        if "tool_calls" not in bare:
            return bare
        check_text(bare["tool_calls"], "tool_calls")  # here only: what the model said goes back as it was said
        as_json = self.chat.has_template and self.chat.tool_format.arguments_as_json
        return {**bare, "tool_calls": [shaped_call(call, as_json=as_json) for call in bare["tool_calls"]]}

    def _mismatch(self, asked: Asked) -> Mismatch | None:
        """How a request departs from the conversation that it shares most with; None for the first of all."""
        if not self._lines:
            return None
        old = max(reversed(self._lines), key=lambda line: num_shared(line.prints, asked.prints))
        same_tools = chain(old.dialogue.tools or (), ())[0] == asked.links[0]
        return classify(
            old.messages, asked.request.messages,
            same_tools=same_tools, old_prints=old.prints, prints=asked.prints,
        )  # fmt: skip

    # --- what is sampled

    def _sampling(self, work: Work) -> SamplingParams:
        own, request = self.sampling, work.asked.request
        wanted = {
            name: value
            for name, value in request.sampling.items()
            if self.options.request_sampling or name not in _HOW_TO_SAMPLE
        }
        room = self.limits.max_length - len(work.prompt)
        max_tokens = min(most for most in (room, request.max_tokens, own.max_tokens) if most is not None)
        if "seed" not in wanted and own.seed is not None:
            wanted["seed"] = own.seed + work.number
        stop = (*own.stop, *(text for text in wanted.get("stop", ()) if text not in own.stop))
        least = max(0, min(int(wanted.get("min_tokens", own.min_tokens)), max_tokens))
        try:
            return replace(own, **{**wanted, "stop": stop, "max_tokens": max_tokens, "min_tokens": least})
        except ValueError as error:
            raise RequestError(f"request: {error}") from error

    async def _generate(self, prompt: list[int], sampling: SamplingParams, number: int) -> Completion:
        try:
            completion = await sample(
                self.engine, prompt, sampling,
                request_id=f"{self.key.episode_id}/{number}", limit_s=self.limits.generate_timeout_s,
            )  # fmt: skip
        except AgentEnvError:
            raise
        except Exception as error:  # an engine's, as in the loop
            raise EngineError(
                f"generate: expected a completion, got {type(error).__name__}: {error}. Look at the engine."
            ) from error
        if completion.finish_reason == "abort" or not completion.token_ids:
            raise EngineError(
                f"generate: expected a completion, got finish reason {completion.finish_reason!r} and "
                f"{len(completion.token_ids)} tokens. Look at the engine's log."
            )
        return completion

    def _take(self, work: Work, call: Call) -> dict[str, Any]:
        """Write an answer down; gives it as OpenAI's message."""
        line, request, ids = work.line, work.asked.request, list(call.completion.token_ids)
        if not work.opens:
            line.dialogue.take(work.reply)
        line.pending = None
        if self.limit is StopReason.MAX_LENGTH:
            self.limit = None  # the agent went on with less: what it was refused ended nothing
        parsed = None
        if request.tools and request.wants_calls:
            parsed = line.dialogue.parse(call.action, call.number)
        line.dialogue.act(ids)
        message = self._worded(call, parsed)
        answer = read_message(message, "answer")
        one = message_fingerprint(answer)
        self._said[one] = self._own(call.action, parsed)
        line.messages, line.prints = [*request.messages, answer], [*work.asked.prints, one]
        line.calls.append(call)
        self._points[link(work.asked.key, one)] = Point(
            line, len(line.messages), len(line.dialogue.ids), (ids, call.action)
        )
        return message

    def _own(self, action: str, parsed: ParsedAction | None) -> Message:
        if parsed is not None and parsed.items:
            return {**assistant_message(parsed, as_json=self.chat.tool_format.arguments_as_json), "trusted": True}
        return {"role": "assistant", "content": action, "trusted": True}

    def _worded(self, call: Call, parsed: ParsedAction | None) -> dict[str, Any]:
        """The answer as the agent gets it: without the stop string, reasoning apart where that is wanted."""
        text, stop = call.action, call.completion.stop_reason
        if isinstance(stop, str) and stop in text and not (parsed and parsed.items):
            text = text[: text.rfind(stop)]
        ways = self.chat.template.reasoning if self.options.reasoning_content and self.chat.has_template else None
        if ways is None:
            return answer_message(text, parsed)
        opens, closes, _ = ways
        said = parsed.content if parsed is not None and parsed.calls else text
        before, closed, after = said.rpartition(closes)
        begun = self.chat.template.generation_prompt
        if not closed and (opens in said or begun.rfind(opens) > begun.rfind(closes)):
            before, after = said, ""
        reasoning = before.partition(opens)[2] if opens in before else before
        if parsed is not None and parsed.calls:
            return answer_message(text, replace(parsed, content=after.strip()), reasoning.strip() or None)
        return answer_message(after.strip("\n") if before else text, parsed, reasoning.strip() or None)

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
        """Close the session and give its record; without a reward, the last turn has no result.

        A budget that a request was refused for is the stop reason, and an engine's failure that no later request made
        good is the error, whatever the agent says or raises.

        Raises:
            ContractError: the reward, the score or the info is not what a StepResult takes.
        """
        self.is_closed = True
        error = next(iter(self._failures.values()), error)
        reason = stop_reason or (StopReason.ERROR if error else self.limit or StopReason.TERMINATED)
        key = self.key
        trajectory = Trajectory(
            self.task, self.limits.max_length, key.episode_id, key.group_id, attempt=key.attempt, seed=key.seed
        )
        calls = record(self._lines, trajectory)
        if calls and reward is not None:
            result = StepResult(
                reward=reward,
                score=score,
                info=dict(info or {}),
                terminated=reason is StopReason.TERMINATED,
                truncated=reason is StopReason.TRUNCATED_BY_ENV,
            )
            trajectory.set_result(result)
        trajectory.finish(reason, error)
        return trajectory
