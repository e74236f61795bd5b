"""The head of a checkpoint as vLLM's server reads it: never one that it would draw."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentenv.errors import ConfigError
from agentenv.rewards.evaluation.check import head_finding, head_of
from tests.rewards.models.test_rm_hf import edited
from tests.rewards.models.tiny import make_tiny_rm

UNLABELED = {"id2label": None, "label2id": None}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"value_head_prefix": "score", **UNLABELED}, {"num_labels": 1}),
        (
            {"architectures": ["RewardModel"], **UNLABELED},
            {"num_labels": 1, "architectures": ["Qwen3ForSequenceClassification"]},
        ),
    ],
    ids=["plain", "OpenRLHF's, which does not say how many labels", "OpenRLHF's own class"],
)
def test_vllm_gets_the_settings_that_a_config_lacks(tmp_path, config, expected):
    head = head_of(str(edited(make_tiny_rm(tmp_path / "rm"), config=config)))
    assert (head.labels, head.overrides) == (("LABEL_0",), expected)


def test_several_labels_have_their_names(tmp_path):
    assert head_of(str(make_tiny_rm(tmp_path / "rm", num_labels=3))).labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(
    ("config", "name"), [({}, "lm_head.weight"), ({"value_head_prefix": "value_head"}, "value_head.weight")]
)
def test_a_checkpoint_for_which_vllm_would_draw_a_head_is_refused(tmp_path, config, name):
    path = edited(make_tiny_rm(tmp_path / "rm"), config=config, rename={"score.weight": name})
    with pytest.raises(ConfigError, match=r"vLLM would draw a random one\. .*HFScorer"):
        head_of(str(path))


def test_a_head_is_found_in_shards_and_in_torchs_own_files(tmp_path):
    path = edited(make_tiny_rm(tmp_path / "rm"), config=UNLABELED)
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(weights, path / "pytorch_model.bin")
    assert head_of(str(path)).overrides == {"num_labels": 1}
    (path / "pytorch_model.bin").unlink()
    save_file({"score.weight": weights["score.weight"]}, path / "model-2.safetensors")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"score.weight": "model-2.safetensors"}}')
    assert head_of(str(path)).overrides == {"num_labels": 1}
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match="expected a sequence classifier's folder"):
        head_of(str(path))
    with pytest.raises(ConfigError, match="expected a sequence classifier's folder"):
        head_of("no-such/model-anywhere")


def test_rm_check_says_what_vllms_server_needs(tmp_path):
    path = make_tiny_rm(tmp_path / "rm")
    assert head_finding(str(path)).state == "ok"
    edited(path, config=UNLABELED)
    found = head_finding(str(path))
    assert (found.state, found.detail) == ("warning", "vllm serve needs --hf-overrides '{\"num_labels\": 1}'")
    edited(path, rename={"score.weight": "lm_head.weight"})
    assert "vLLM would draw a random one" in head_finding(str(path)).detail
