"""Hypothesis strategies for tests of environments: actions of models, and peculiar tokenizers.

Needs hypothesis: `pip install hypothesis`.

Example::

    @given(actions())
    def test_no_action_breaks_it(action):
        trajectory = asyncio.run(play(Setup(MyEnv, [action])))
        assert trajectory.error is None
"""

from __future__ import annotations

from agentenv.errors import MissingDependency
from agentenv.testing.tokenizers import PECULIAR, CharTokenizer, ToollessTokenizer

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise MissingDependency(
        "agentenv.testing.strategies: expected hypothesis, got none. Run: pip install hypothesis"
    ) from error

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<|eot_id|>", "</s>", "[INST]",
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "lookup", "arguments": {', "<answer>", "</answer>",
    "```python",
)  # fmt: skip
"""Tokens and marks of chat templates, tool formats and answers, whole and left open."""
ODD = (
    "", " ", "\n", "\t", "\r\n", "\x00", "\x1b[31m", "\u200d", "\u202e", "\ufeff", "\ufffd",
    "\U0001f468\u200d\U0001f469",
    "日本語", "é", "e\u0301", "٣", "½", "∞", "nan", "-0", "1e999", "1_000", "0x10", "{}", "[]", "null", "{{ x }}", "%s",
    "${HOME}", "\\", '"', "'", "....", "----", "__import__('os')",
)  # fmt: skip
"""Pieces that break parsers."""
NUMBERS = ("0", "1", "42", "-7", "3.14", "1/2", "1,000", "$5", "\\boxed{42}", "#### 42", "The answer is 42.")


def actions(*, max_chars: int = 2000) -> st.SearchStrategy[str]:
    """Return texts that a model may sample: plain, with special tokens, odd characters and numbers, empty or long.

    They encode as UTF-8, without lone surrogates, which no tokenizer decodes to.
    """
    piece = st.one_of(
        st.sampled_from(SPECIAL), st.sampled_from(ODD), st.sampled_from(NUMBERS),
        st.text(st.characters(codec="utf-8"), max_size=20),
    )  # fmt: skip
    mixed = st.lists(piece, max_size=6).map("".join)
    long = st.builds(lambda text, times: text * times, piece, st.integers(50, 400))
    complete = st.one_of(st.just(""), st.sampled_from(NUMBERS), mixed, mixed, long)
    cut = st.builds(lambda text, share: text[: int(len(text) * share)], mixed, st.floats(0, 1))
    return st.one_of(complete, cut).map(lambda text: text[:max_chars])


def scripts(*, max_turns: int = 6, max_chars: int = 200) -> st.SearchStrategy[list[str]]:
    """Return lists of actions, one per turn: the `policy` of a `Setup`."""
    return st.lists(actions(max_chars=max_chars), min_size=1, max_size=max_turns)


def tokenizers() -> st.SearchStrategy[CharTokenizer]:
    """Return each of the public test tokenizers."""
    kinds: tuple[type[CharTokenizer], ...] = (CharTokenizer, *PECULIAR, ToollessTokenizer)
    return st.sampled_from([kind() for kind in kinds])
