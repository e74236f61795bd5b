"""Corrections of the sampling mismatch, against numbers worked by hand and where peers go wrong."""

import math

import pytest
import torch

from agentenv.errors import DataError
from agentenv.training.algorithm.corrections import CorrectionOptions, correct, mismatch


def corrected(ratios, *options, sequence=None, **more):
    """Weights, and which tokens are rejected, for ratios of the trained model's probabilities to the engine's."""
    sequence = list(range(len(ratios))) if sequence is None else sequence
    logprobs = torch.tensor(ratios).log().requires_grad_()
    found = correct(logprobs, torch.zeros(len(ratios)), torch.tensor(sequence), CorrectionOptions(*options, **more))
    assert not found[0].requires_grad
    return found[0].tolist(), found[1].tolist()


@pytest.mark.parametrize(("mode", "outside"), [("clip", (0.4, 5.0)), ("mask", (0.0, 0.0))])
def test_tis_cuts_what_is_outside_the_band_and_icepop_drops_it(mode, outside):
    weights, rejected = corrected([0.25, 0.5, 1.0, 4.0, 8.0], "token", mode, low=0.4, high=5.0)
    assert weights == pytest.approx([outside[0], 0.5, 1.0, 4.0, outside[1]])
    assert rejected == [True, False, False, False, True]


def test_a_ratio_that_overflows_is_dropped_or_cut_and_is_not_nan():
    """Research, trap 33: OpenRLHF up to 0.11.0 multiplied inf by a mask."""
    huge = [1.0, math.inf, 0.0]
    assert corrected(huge, "token", "mask")[0] == [1.0, 0.0, 0.0]
    assert corrected(huge, "token", "clip")[0] == [1.0, 5.0, 0.5]
    assert corrected(huge, "sequence", "mask")[0] == [1.0, 0.0, 0.0]


def test_a_sequence_is_kept_by_the_geometric_mean_of_its_ratios():
    """Geometric means: (1/4·1)^½ = ½ inside, (8·2)^½ = 4 outside."""
    options = {"low": 0.5 - 1e-6, "high": 3.9, "truncate": False}
    weights, rejected = corrected([0.25, 1.0, 8.0, 2.0], "sequence", "mask", sequence=[0, 0, 1, 1], **options)
    assert weights == pytest.approx([0.25, 1.0, 0.0, 0.0])
    assert rejected == [False, False, True, True]


def test_no_token_of_a_kept_sequence_weighs_more_than_the_band_allows():
    """OpenRLHF's and NeMo RL's sequence masks let it: 1000 here, whatever the threshold."""
    assert corrected([1000.0, 0.001], "sequence", "mask", sequence=[0, 0])[0] == [5.0, 0.5]
    weights, _ = corrected([1000.0, 0.001], "sequence", "mask", sequence=[0, 0], truncate=False)
    assert weights[0] == pytest.approx(1000)


def test_a_missing_log_probability_is_refused_and_never_taken_for_zero():
    with pytest.raises(DataError, match="NaN at 1 of 2"):
        correct(torch.zeros(2), torch.tensor([0.0, math.nan]), torch.zeros(2).long(), CorrectionOptions("token"))


def test_the_mismatch_is_the_mean_distance_of_known_tokens():
    assert mismatch(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, math.nan, -2.0])) == 0.75
    assert math.isnan(mismatch(torch.empty(0), torch.empty(0)))
