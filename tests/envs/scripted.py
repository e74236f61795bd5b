"""Episodes with a model that says given texts, for the tests of the environments."""

from __future__ import annotations

from agentenv.chat.chat import Chat
from agentenv.core.types import Limits, SamplingParams
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.testing.tokenizers import CharTokenizer


def scripted(actions, tokenizer=None, **limits):
    """What an episode runs with, whose model says these in turn."""
    tokenizer = tokenizer or CharTokenizer()
    return EpisodeSetup(
        engine=ScriptedEngine(actions, tokenizer),
        chat=Chat(tokenizer),
        sampling=SamplingParams(),
        limits=Limits(**{"max_length": 50_000} | limits),
    )


async def play(source, task, actions, *, tokenizer=None, seed=None, **limits):
    """The episode of the source's in which the model says these in turn."""
    key = EpisodeKey(f"{task.task_id}/0", task.task_id, seed=seed)
    return await source.run(task, scripted(actions, tokenizer, **limits), key)
