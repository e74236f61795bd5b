"""Corrections of the sampling mismatch, against numbers worked by hand and where peers go wrong."""

import math

import pytest
import torch

from agentenv.errors import ConfigError, DataError
from agentenv.training.algorithm.corrections import (
    CorrectionOptions,
    correct,
    icepop,
    mismatch,
    sequence_mask,
    tis,
)

RATIOS = [0.25, 0.5, 1.0, 4.0, 8.0]
LOG_RATIOS = torch.tensor(RATIOS).log()


@pytest.mark.parametrize(("kind", "outside"), [(tis, (0.4, 5.0)), (icepop, (0.0, 0.0))])
def test_tis_cuts_what_is_outside_the_band_and_icepop_drops_it(kind, outside):
    found = kind(LOG_RATIOS, low=0.4, high=5.0)
    assert found.weights_n.tolist() == pytest.approx([outside[0], 0.5, 1.0, 4.0, outside[1]])
    assert found.rejected_n.tolist() == [True, False, False, False, True]


def test_a_ratio_that_overflows_is_dropped_or_cut_and_is_not_nan():
    """Research, trap 33: OpenRLHF up to 0.11.0 multiplied inf by a mask."""
    huge = torch.tensor([0.0, 100.0, -200.0])
    assert icepop(huge).weights_n.tolist() == [1.0, 0.0, 0.0]
    assert tis(huge, low=0.5, high=5.0).weights_n.tolist() == [1.0, 5.0, 0.5]
    assert sequence_mask(huge, torch.tensor([0, 1, 2])).weights_n.tolist() == [1.0, 0.0, 0.0]


def test_a_sequence_is_kept_by_the_geometric_mean_of_its_ratios():
    """Geometric means: (1/4·1)^½ = ½ inside, (8·2)^½ = 4 outside."""
    logs, sequence = torch.tensor([0.25, 1.0, 8.0, 2.0]).log(), torch.tensor([0, 0, 1, 1])
    found = sequence_mask(logs, sequence, low=0.5 - 1e-6, high=3.9, truncate=False)
    assert found.weights_n.tolist() == pytest.approx([0.25, 1.0, 0.0, 0.0])
    assert found.rejected_n.tolist() == [False, False, True, True]


def test_no_token_of_a_kept_sequence_weighs_more_than_the_band_allows():
    """OpenRLHF's and NeMo RL's sequence masks let it: 1000 here, whatever the threshold."""
    logs, sequence = torch.tensor([1000.0, 0.001]).log(), torch.zeros(2).long()
    assert sequence_mask(logs, sequence).weights_n.tolist() == [5.0, 0.5]
    assert sequence_mask(logs, sequence, truncate=False).weights_n[0] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (CorrectionOptions(), [1.0, 1.0, 1.0]),
        (CorrectionOptions("token", "clip"), [2.0, 5.0, 0.5]),
        (CorrectionOptions("token", "mask"), [2.0, 0.0, 0.0]),
        (CorrectionOptions("sequence", "mask"), [2.0, 5.0, 0.5]),
        (CorrectionOptions("sequence", "mask", high=1.99), [0.0, 1.99, 0.5]),
    ],
)
def test_options_choose_the_correction(options, expected):
    """ρ = 2, 8, ¼: sequences' geometric means are 2 and √2."""
    rollout = torch.tensor([0.1, 0.01, 0.1]).log()
    logprobs = (rollout + torch.tensor([2.0, 8.0, 0.25]).log()).requires_grad_()
    found = correct(logprobs, rollout, torch.tensor([0, 1, 1]), options)
    assert found.weights_n.tolist() == pytest.approx(expected, rel=1e-5)
    assert not found.weights_n.requires_grad


def test_a_missing_log_probability_is_refused_and_never_taken_for_zero():
    with pytest.raises(DataError, match="NaN at 1 of 2"):
        correct(torch.zeros(2), torch.tensor([0.0, math.nan]), torch.zeros(2).long(), CorrectionOptions("token"))


@pytest.mark.parametrize(
    "options",
    [
        {"level": "seq"},
        {"level": "sequence", "mode": "clip"},
        {"low": 3.0, "high": 2.0},
    ],
)
def test_corrections_that_mean_nothing_are_refused(options):
    with pytest.raises(ConfigError, match="correction"):
        CorrectionOptions(**options)


def test_the_mismatch_is_the_mean_distance_of_known_tokens():
    assert mismatch(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, math.nan, -2.0])) == 0.75
    assert math.isnan(mismatch(torch.empty(0), torch.empty(0)))
