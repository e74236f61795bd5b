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
from tests.rewards.models.tiny import BOS_CHATML, EOS, make_tiny_rm, tiny_rm, tokenizer_with_bos


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


UNENDED = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "add_bos", "name", "state", "detail"),
    [
        (BOS_CHATML, False, "BOS", "warning", "1 at the beginning; tokenizing the rendered text again makes it 2"),
        ("{{ bos_token }}" + BOS_CHATML, False, "BOS", "problem", "2 at the beginning"),
        (CHATML, False, "BOS", "warning", "none at the beginning"),
        (CHATML, True, "BOS", "warning", "1 at the beginning"),
        (UNENDED, False, "pooled token", "warning", "belongs to the answer"),
    ],
)
def test_traps_of_templates_are_named(template, add_bos, name, state, detail):
    """nemo §2.2: `apply_chat_template(tokenize=False)` and then the tokenizer has two BOS."""
    renderer = ConversationRenderer(tokenizer_with_bos(template), max_length=512, add_bos=add_bos)
    found = {each.name: each for each in token_findings(renderer)}[name]
    assert (found.state, detail in found.detail) == (state, True)


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


async def test_a_model_that_says_the_same_of_everything_or_fails_is_a_problem_that_says_why():
    findings = await found(Scripted(lambda text: 3.0))
    assert states(findings) == {"scores": "problem"}
    assert "the same score" in findings["scores"].detail

    def value(text):
        raise InfraError("status 500")

    findings = await found(Scripted(value))
    assert (states(findings), findings["scores"].detail) == ({"scores": "problem"}, "status 500")


@pytest.mark.long
async def test_options_of_the_renderer_are_those_that_are_checked():
    findings = await found(HFScorer(tiny_rm(), max_length=64, overflow="left", options=HFOptions(add_eos=True)))
    assert findings["max length"].detail == "64 tokens of 512 positions; longer: left"
    assert findings["pooled token"].detail.startswith("'<|im_end|>'")


def test_a_limit_beyond_the_positions_is_a_problem():
    renderer = ConversationRenderer(tokenizer_with_bos(), max_length=512)
    assert length_finding(renderer, 511).state == "problem"
    assert length_finding(renderer, None).state == "ok"
