"""What the public strategies draw: texts that a model may say, which no environment of ours falls over."""

import asyncio

import pytest
from hypothesis import Phase, given, settings

from agentenv import Task
from agentenv.testing import Setup, play, strategies

QUICK = settings(max_examples=400, database=None, deadline=None, phases=[Phase.generate], derandomize=True)


@pytest.fixture(scope="module")
def drawn():
    """The same texts every time."""
    texts = []

    @QUICK
    @given(strategies.actions())
    def draw(text):
        texts.append(text)

    draw()
    return texts


@given(strategies.actions(max_chars=50))
def test_actions_are_texts_that_a_tokenizer_can_decode_to(action):
    assert len(action) <= 50
    assert action.encode().decode() == action


@pytest.mark.long
@pytest.mark.parametrize(
    "holds",
    [
        lambda text: text == "",
        lambda text: "<|im_end|>" in text,
        lambda text: len(text) > 500,
        lambda text: any(ord(character) > 0xFFFF for character in text),
        lambda text: text.endswith(("<", "<|", "<|i", "<|im", "<|im_", "</", "</t", "</th")),
        lambda text: "#### 42" in text,
    ],
)
def test_every_kind_of_text_is_drawn(holds, drawn):
    assert any(map(holds, drawn))


@settings(max_examples=25, deadline=None)
@given(strategies.scripts(max_turns=3, max_chars=60), strategies.tokenizers())
def test_an_environment_of_ours_takes_all_of_it_with_every_tokenizer(script, tokenizer):
    setup = Setup("guess_number", [*script, "5"], data=Task("Guess.", "5"), tokenizer=tokenizer)
    trajectory = asyncio.run(play(setup))
    assert trajectory.error is None or trajectory.error.where == "generate"  # nothing said, and no terminator to say it
    assert trajectory.error is None or "" in script
