"""What the public strategies draw: texts that a model may say, which no environment of ours falls over."""

import asyncio

from hypothesis import given, settings

from agentenv import Task
from agentenv.testing import Setup, play, strategies


@given(strategies.actions(max_chars=50))
def test_actions_are_texts_that_a_tokenizer_can_decode_to(action):
    assert len(action) <= 50
    assert action.encode().decode() == action


@settings(max_examples=25, deadline=None)
@given(strategies.scripts(max_turns=3, max_chars=60), strategies.tokenizers())
def test_an_environment_of_ours_takes_all_of_it_with_every_tokenizer(script, tokenizer):
    setup = Setup("guess_number", [*script, "5"], data=Task("Guess.", "5"), tokenizer=tokenizer)
    trajectory = asyncio.run(play(setup))
    assert trajectory.error is None or trajectory.error.where == "generate"  # nothing said, and no terminator to say it
    assert trajectory.error is None or "" in script
