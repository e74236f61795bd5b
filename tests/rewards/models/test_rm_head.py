"""The head of a checkpoint as vLLM's server reads it: never one that it would draw."""

import pytest

from agentenv.rewards.evaluation.check import head_finding
from agentenv.rewards.models.classifier import Classifier
from tests.rewards.models.test_rm_hf import edited
from tests.rewards.models.tiny import make_tiny_rm

UNLABELED = {"id2label": None, "label2id": None}


def found(path, label=None):
    finding = head_finding(Classifier(str(path), device="cpu", dtype="auto", label=label).config)
    return finding.state, finding.detail


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ({"value_head_prefix": "score", **UNLABELED}, '{"num_labels": 1}'),
        (
            {"architectures": ["RewardModel"], **UNLABELED},
            '{"num_labels": 1, "architectures": ["Qwen3ForSequenceClassification"]}',
        ),
    ],
    ids=["OpenRLHF's, which does not say how many labels", "OpenRLHF's own class"],
)
def test_vllm_gets_the_settings_that_a_config_lacks(tmp_path, config, overrides):
    path = edited(make_tiny_rm(tmp_path / "rm"), config=config)
    assert found(path) == ("warning", f"vllm serve needs --hf-overrides '{overrides}'")


@pytest.mark.parametrize(("num", "labels"), [(1, "LABEL_0"), (3, "LABEL_0, LABEL_1, LABEL_2")])
def test_labels_have_their_names(tmp_path, num, labels):
    assert found(make_tiny_rm(tmp_path / "rm", num_labels=num), label=0) == ("ok", f"its labels are {labels}")


def test_a_checkpoint_for_which_vllm_would_draw_a_head_is_a_warning(tmp_path):
    config, rename = {"value_head_prefix": "value_head"}, {"score.weight": "value_head.weight"}
    state, detail = found(edited(make_tiny_rm(tmp_path / "rm"), config=config, rename=rename))
    assert (state, "vLLM would draw a random one" in detail) == ("warning", True)
