"""What the endpoint's tests share: sessions over real families and an engine that is told what to say."""

from agentenv.core.types import Limits, SamplingParams
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.endpoint.session import Session, SessionOptions
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from tests import strategies
from tests.chat.families import BY_NAME

NAMES = ("Qwen3", "Llama-3.1", "GLM-4.5")
CALLS = {
    "Qwen3": '<tool_call>\n{"name": "lookup", "arguments": {"query": "6 x 7"}}\n</tool_call>',
    "Llama-3.1": '{"name": "lookup", "parameters": {"query": "6 x 7"}}',
    "GLM-4.5": "<tool_call>lookup\n<arg_key>query</arg_key>\n<arg_value>6 x 7</arg_value>\n</tool_call>",
}
TOOL = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


def chat_of(name):
    return strategies.chat_of(BY_NAME[name])


def session_of(script, name="Qwen3", *, options=None, sampling=None, limits=None, **engine):
    chat = chat_of(name)
    scripted = ScriptedEngine(script, chat.tokenizer, **engine)
    limits = limits or Limits(max_length=4096, max_turns=64)
    session = Session(
        EpisodeSetup(scripted, chat, sampling or SamplingParams(), limits),
        key=EpisodeKey("session"),
        options=options or SessionOptions(),
    )
    return session, scripted


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def sent_back(response):
    """The answer as an agent appends it to its messages."""
    message = response["choices"][0]["message"]
    return {key: value for key, value in message.items() if value is not None}


async def ask(session, messages, **fields):
    response = await session.complete({"messages": messages, **fields})
    return response, [*messages, sent_back(response)]


def assert_exact(trajectory, engine):
    """Every prompt the engine saw and every token it gave are what is recorded, call by call."""
    prompts = []
    for turn in trajectory.turns:
        segment = trajectory.segments[turn.segment]
        prompts.append(tuple(segment.token_ids[: turn.start]))
        assert all(segment.action_mask[turn.start : turn.end])
    assert sorted(prompts) == sorted(r.prompt_token_ids for r in engine.requests)
    for segment in trajectory.segments:
        assert len(segment) == len(segment.action_mask) == len(segment.logprobs)
    assert sum(sum(s.action_mask) for s in trajectory.segments) == sum(t.end - t.start for t in trajectory.turns)
