"""`rm check`: each trap that makes reward models score nonsense is found, and a sound model has none."""

import json
import shutil

import pytest

from agentenv.errors import InfraError
from agentenv.rewards.evaluation.check import (
    activation_finding,
    batch_finding,
    check,
    length_finding,
    token_findings,
)
from agentenv.rewards.models.hf import HFOptions, HFScorer
from agentenv.rewards.models.render import ConversationRenderer
from tests.models import CHATML
from tests.rewards.evaluation.scorers import Scripted
from tests.rewards.models.tiny import EOS, make_tiny_rm, tiny_rm, tokenizer_with_bos


async def found(scorer, **kwargs):
    try:
        findings = await check(scorer, **kwargs)
    finally:
        await scorer.close()
    return {finding.name: finding for finding in findings}


def states(findings):
    return {name: finding.state for name, finding in findings.items() if finding.state != "ok"}


@pytest.mark.long
async def test_a_sound_model_has_nothing_to_fix_and_every_check_says_what_it_saw():
    findings = await found(HFScorer(tiny_rm()))
    assert states(findings) == {}
    assert list(findings) == [
        "template", "last tokens", "pooled token", "BOS", "pad token", "max length", "head in vLLM", "scores",
        "activation", "batch invariance",
    ]  # fmt: skip
    assert findings["last tokens"].detail.endswith(r"'<|im_end|>' '\n'")
    assert findings["pooled token"].detail.startswith(r"'\n' (id ")
    assert findings["max length"].detail == "512 tokens of 512 positions; longer: error"


@pytest.mark.long
async def test_a_pad_token_that_ends_the_conversation_is_reported_and_costs_nothing_here(tmp_path):
    path = make_tiny_rm(tmp_path / "rm", pad=EOS)
    (path / "chat_template.jinja").write_text(
        CHATML.replace("<|im_end|>\n", "<|im_end|>", 1).replace("<|im_end|>\\n", "<|im_end|>", 1)
    )
    findings = await found(HFScorer(path))
    assert states(findings) == {"pad token": "warning"}
    assert "also the last token" in findings["pad token"].detail
    assert findings["pooled token"].detail.startswith("'<|im_end|>'")


@pytest.mark.long
async def test_a_model_without_a_pad_token_is_reported(tmp_path):
    findings = await found(HFScorer(make_tiny_rm(tmp_path / "rm", pad=None)))
    assert states(findings) == {"pad token": "warning"}


async def test_a_missing_template_is_a_problem(tmp_path):
    path = shutil.copytree(tiny_rm(), tmp_path / "rm")
    (path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    findings = await found(HFScorer(path))
    assert states(findings)["template"] == "problem"
    assert states(findings)["scores"] == "problem"


def of_tokens(tokenizer, **kwargs):
    return {each.name: each for each in token_findings(ConversationRenderer(tokenizer, max_length=512, **kwargs))}


def test_a_rendering_that_is_tokenized_again_would_have_two_bos_and_that_is_reported():
    """nemo §2.2: `apply_chat_template(tokenize=False)` and then the tokenizer."""
    findings = of_tokens(tokenizer_with_bos())
    assert findings["BOS"].state == "warning"
    assert findings["BOS"].detail == "1 at the beginning; tokenizing the rendered text again makes it 2"


def test_a_template_with_two_bos_is_a_problem():
    findings = of_tokens(tokenizer_with_bos("{{ bos_token }}{{ bos_token }}" + CHATML))
    assert findings["BOS"].state == "problem"
    assert findings["BOS"].detail.startswith("2 at the beginning")


def test_a_missing_bos_is_reported_and_add_bos_fixes_it():
    assert of_tokens(tokenizer_with_bos(CHATML))["BOS"].detail.startswith("none at the beginning")
    assert of_tokens(tokenizer_with_bos(CHATML), add_bos=True)["BOS"].detail.startswith("1 at the beginning")


def test_a_template_that_does_not_end_the_turn_pools_a_token_of_the_answer():
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}"
    )
    findings = of_tokens(tokenizer_with_bos(template))
    assert findings["pooled token"].state == "warning"
    assert "belongs to the answer" in findings["pooled token"].detail


# --- scores: of any scorer, a server's too ----------------------------------------------------------------------------


async def test_scores_that_an_activation_squashed_are_reported():
    """nemo §5: a server's default makes 7.908 and 7.635 into 0.99963 and 0.99952."""
    findings = await found(Scripted(lambda text: 1 / (1 + 0.9 ** len(text))))
    assert states(findings) == {"activation": "warning"}
    assert activation_finding([0.2, 1.0]).state == "ok"


async def test_scores_that_depend_on_their_batch_are_a_problem_in_float32_only():
    """RewardBench #137."""
    assert states(await found(Scripted(drift=0.01))) == {"batch invariance": "problem"}
    assert states(await found(Scripted(drift=0.01), exact=False)) == {"batch invariance": "warning"}
    assert batch_finding([1.0, 2000.0], [1.0001, 2000.1], exact=True).state == "ok"
    assert batch_finding([1.0, 2000.0], [1.001, 2000.0], exact=True).state == "problem"


async def test_a_model_that_says_the_same_of_everything_is_a_problem():
    findings = await found(Scripted(lambda text: 3.0))
    assert states(findings) == {"scores": "problem"}
    assert "the same score" in findings["scores"].detail


async def test_a_model_that_fails_is_a_problem_that_says_why():
    def value(text):
        raise InfraError("status 500")

    findings = await found(Scripted(value))
    assert states(findings) == {"scores": "problem"}
    assert findings["scores"].detail == "status 500"


@pytest.mark.long
async def test_options_of_the_renderer_are_those_that_are_checked():
    findings = await found(HFScorer(tiny_rm(), max_length=64, overflow="left", options=HFOptions(add_eos=True)))
    assert findings["max length"].detail == "64 tokens of 512 positions; longer: left"
    assert findings["pooled token"].detail.startswith("'<|im_end|>'")


def test_a_limit_beyond_the_positions_is_a_problem():
    renderer = ConversationRenderer(tokenizer_with_bos(), max_length=512)
    assert length_finding(renderer, 511).state == "problem"
    assert length_finding(renderer, None).state == "ok"
