"""Random conversations on every family of chat templates: what users and tools say, what an engine does, how it ends.

`plans()` draws a whole episode as data; `play` runs it through `run_episode` with a ScriptedEngine and keeps what the
engine was sent and what it gave, which is what the invariants compare the record with.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from dataclasses import dataclass, field

from hypothesis import strategies as st

from agentenv.chat.chat import Chat, ChatOptions
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Completion, Limits, SamplingParams, StepResult, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.loop import run_episode
from agentenv.episode.setup import EpisodeKey
from tests.chat.families import SUPPORTED, Family, load, stop_ids
from tests.chat.test_families import FOLLOW_UPS, TOOLS, says

GOES_ON = (
    "close", "close", "close", "close", "cut", "cut", "stop string", "foreign", "marker", "other marker",
    "terminator only",
)  # fmt: skip
"""How a generation ends after which the loop goes on."""
ENDINGS = (*GOES_ON, *GOES_ON, "abort", "abort at once", "empty", "error", "crash", "wrong logprobs", "wrong versions")

ODD = (
    " ", "\n", "\n\n", "\t", "  ", "</", "<|", "|>", "[", "\ue001", "\\ue001", "123", "\u0301", "日本", "😀", "{}",
    "}\n", "word", "a b", "é", "\r\n", "\u200d", "\x00", "qzSENTINELqz", "<think>", "\n</think>\n\n", "Human: ",
    "{{ x }}",
)  # fmt: skip
LETTERS = (*range(32, 127), *range(0xA0, 0xD000), *range(0x1F300, 0x1F700))


def chat_of(family: Family, **options) -> Chat:
    """The family's Chat, made once for each set of options."""
    return _chat(family, tuple(sorted(options.items())))


@functools.cache
def _chat(family, options):
    tools = TOOLS if family.needs_tools else None
    return Chat(load(family), stop_token_ids=stop_ids(family), tools=tools, options=ChatOptions(**dict(options)))


def with_contents(shape, texts):
    """The follow-up of a shape, saying other things; the texts repeat."""
    return [{**message, "content": texts[i % len(texts)]} for i, message in enumerate(FOLLOW_UPS[shape])]


@functools.cache
def strange_texts(family=None):
    """Text with the family's added tokens in it, whole and in part: one draw a text, which is what makes them cheap."""
    texts = [token.text for token in family.added_tokens] if family else []

    def made(seed):
        rng = random.Random(seed)
        parts = [rng.choice(ODD) for _ in range(rng.randrange(5) if seed else 0)]
        for text in rng.choices(texts, k=rng.randrange(3)) if texts and seed else ():
            broken = text[: rng.randrange(1, 9)] if rng.random() < 0.3 else text[2:] if rng.random() < 0.3 else text
            parts.insert(rng.randrange(len(parts) + 1), broken)
        if seed % 5 == 1:
            parts.append(chr(rng.choice(LETTERS)))
        return "".join(parts)

    return st.integers(0, 1 << 32).map(made)


@dataclass(frozen=True)
class Said:
    """What the engine does on one turn."""

    text: str
    ending: str = "close"
    spelled: bool = False
    """Token by token in single characters, as no tokenizer would write it."""
    logprobs: str = "right"
    swap: int = 0
    """Where in the action the weights change; 0 is nowhere."""


@dataclass(frozen=True)
class Plan:
    """An episode as data."""

    family: Family
    prompt: object
    said: list[Said]
    steps: list[StepResult]
    room: int = 400
    """Tokens after the prompt."""
    max_turns: int = 5
    max_tokens: int | None = None
    options: dict = field(default_factory=dict)


def generations(*endings):
    """What an engine does on one turn, ending in one of these ways."""
    return st.builds(
        Said,
        strange_texts(),
        st.sampled_from(endings),
        st.booleans(),
        st.sampled_from(["right"] * 4 + ["nan", "none"]),
        st.integers(0, 4),
    )


ANY, LASTING = generations(*ENDINGS), generations(*GOES_ON)
ENDED = st.sampled_from([{}] * 12 + [{"terminated": True}, {"truncated": True}])
KEPT = st.just({})
ROOMS = st.sampled_from([600, 600, 600, 600, 200, 90, 40, 12, 3, 1])


@functools.cache
def observations(family):
    """Messages of a shape that the family takes, or text."""
    texts = strange_texts(family)
    shapes = st.tuples(st.sampled_from(family.shapes), st.tuples(texts, texts))
    kinds = st.sampled_from(["messages"] * 8 + ["empty", "text"])
    said = {"messages": shapes.map(lambda drawn: with_contents(*drawn)), "empty": st.just(""), "text": texts}
    return kinds.flatmap(said.__getitem__)


@functools.cache
def steps(family):
    """Answers to an action."""
    return st.builds(
        lambda observation, reward, score, end: StepResult(observation, reward=reward, score=score, **end),
        observations(family),
        st.floats(-2, 2, width=32),
        st.sampled_from([None, 0.0, 0.25, 1.0]),
        ENDED,
    )


@st.composite
def plans(draw, *, said=ANY, families=SUPPORTED, options=KEPT, rooms=ROOMS):
    """Any episode."""
    family = draw(st.sampled_from(families))
    text = draw(strange_texts(family))
    return Plan(
        family,
        [says("user", text)] if draw(st.sampled_from([True] * 6 + [False])) else f"raw {text}",
        draw(st.lists(said, min_size=1, max_size=4)),
        draw(st.lists(steps(family), min_size=1, max_size=4)),
        draw(rooms),
        draw(st.sampled_from([5, 4, 3, 2, 1])),
        draw(st.sampled_from([None, None, 1, 5, 12])),
        draw(options),
    )


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "text_feedback": st.sampled_from(["raw", "user"]),
        "open_reasoning": st.just("close"),
        "tool_role": st.just("user"),
        "long_observation": st.just("cut"),
        "max_observation_tokens": st.integers(1, 60),
    },
)
"""Options under which tokens are only ever appended."""


class Talking(AgentInstance):
    """Answers from a list; the last answer repeats."""

    def __init__(self, steps):
        self.steps, self.seen = list(steps), []

    async def step(self, states):
        self.seen.append(states)
        return self.steps[min(len(self.seen), len(self.steps)) - 1]


@dataclass
class Played:
    """An episode with both sides of the engine's wire."""

    trajectory: object
    engine: ScriptedEngine
    sent: list[Completion]
    """What the engine gave."""
    chat: Chat
    sampling: SamplingParams
    task: Task


def play(plan: Plan, **options) -> Played:
    """Run an episode to its end."""
    return asyncio.run(playing(plan, **options))


async def playing(plan: Plan, *, engine_of=ScriptedEngine, key=None) -> Played:
    """As `play`, on a running loop."""
    chat = chat_of(plan.family, **plan.options)
    sent, agent = [], Talking(plan.steps)
    engine = engine_of(speaker(plan, chat, sent), chat.tokenizer)
    limits = Limits(max_length=len(chat.prompt(plan.prompt)) + plan.room, max_turns=plan.max_turns)
    sampling, task = SamplingParams(max_tokens=plan.max_tokens), Task(plan.prompt, label="l")

    async def make():
        return agent

    trajectory = await run_episode(
        make, task, engine=engine, chat=chat, sampling=sampling, limits=limits, key=key or EpisodeKey()
    )
    return Played(trajectory, engine, sent, chat, sampling, task)


def speaker(plan, chat, sent):
    """A script that says the plan within the room it is given, and keeps what it said in `sent`."""

    def script(request):
        said = plan.said[min(request.turn_index, len(plan.said) - 1)]
        if said.ending == "crash":
            return RuntimeError("the engine fell over")
        completion = spoken(said, chat, request.sampling.max_tokens)
        sent.append(completion)
        return completion

    return script


def spoken(said: Said, chat: Chat, max_tokens: int) -> Completion:
    """The completion of one turn."""
    parts = list(said.text) if said.spelled else [said.text]
    token_ids = [i for part in parts for i in chat._encoder.follow(part)]
    reason, matched_stop = "stop", None
    if said.ending in ("abort at once", "empty"):
        token_ids = []
    elif said.ending == "terminator only":
        token_ids = ending_ids("close", chat)
    elif said.ending == "stop string":
        token_ids, matched_stop = [*token_ids, *chat._encoder.follow("</answer>")], "</answer>"
    elif said.ending == "cut":
        token_ids, reason = token_ids or chat._encoder.follow("x"), "length"
    else:
        token_ids = [*token_ids, *ending_ids(said.ending, chat)] or chat._encoder.follow("x")
    reason = {"abort": "abort", "abort at once": "abort", "error": "error"}.get(said.ending, reason)
    if len(token_ids) > max_tokens:
        token_ids, reason = token_ids[:max_tokens], "length" if reason == "stop" else reason
    num = len(token_ids)
    right = tuple(-0.25 - position for position in range(num))
    logprobs = {"right": right, "nan": (math.nan, *right[1:])[:num], "none": None}[said.logprobs]
    versions = tuple(3 if position < said.swap else 5 for position in range(num)) if said.swap else ()
    if said.ending == "wrong logprobs":
        logprobs = (*right, -9.0)
    if said.ending == "wrong versions":
        versions = (3,) * (num + 1)
    return Completion(
        tuple(token_ids), reason, matched_stop, logprobs=logprobs, policy_versions=versions, policy_version=2
    )


def ending_ids(ending, chat):
    """The ids that end a generation in this way; none where the template has no such."""
    template = chat.template
    eos = [] if chat.tokenizer.eos_token_id is None else [chat.tokenizer.eos_token_id]
    if ending in ("close", "error", "wrong logprobs", "wrong versions"):
        return list(template.close_ids) or sorted(template.markers)[:1] or eos
    if ending == "foreign":
        return sorted(template.terminators - set(template.close_ids) - template.markers)[:1]
    if ending in ("marker", "other marker"):
        return sorted(template.markers)[:1] if ending == "marker" else sorted(template.markers)[-1:]
    return []
