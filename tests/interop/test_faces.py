"""Every public path into `agentenv.interop`, as pages, configurations of other frameworks and plugins spell it."""

import re
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentenv.errors import ConfigError
from agentenv.interop.verifiers_renderer import ChatRendering
from agentenv.testing.tokenizers import CharTokenizer

ROOT = Path(__file__).parents[2]
FACES = [
    "agentenv.interop", *(f"agentenv.interop.{name}" for name in ("openrlhf", "molt", "verl", "verl.rewards", "roll")),
    "agentenv.interop.nemo_rl", "agentenv.interop.nemo_gym",
]  # fmt: skip
NEEDS_ITS_FRAMEWORK = {"AgentEnvRewardManager", "ChatRenderer"}


@pytest.mark.parametrize("face", FACES)
def test_a_face_has_the_names_that_it_offers(face):
    module = import_module(face)
    for name in set(module.__all__) - NEEDS_ITS_FRAMEWORK:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="Missing"):
        module.Missing  # noqa: B018


def test_the_renderer_of_prime_rl_refuses_a_conversation_that_ends_with_an_answer(tmp_path):
    tokenizer = CharTokenizer()
    tokenizer.name_or_path = str(tmp_path)
    messages = [{"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": "42"}]
    with pytest.raises(ConfigError, match="expected the last one to be from another role than assistant"):
        ChatRendering(tokenizer).render(messages, add_generation_prompt=True)


def test_documentation_and_entry_points_name_what_exists():
    text = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    names = {*re.findall(r"agentenv\.interop(?:\.\w+)+", text), *points["verl.plugins"].values()}
    assert "agentenv.interop.verl.plugin" in names
    for name in names:
        module, _, attribute = name.rpartition(".")
        if attribute not in NEEDS_ITS_FRAMEWORK:
            assert hasattr(import_module(module), attribute) or find_spec(name), name
