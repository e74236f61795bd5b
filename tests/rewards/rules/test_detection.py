"""Detection: reading boxes, pairing them as well as can be, golden values, and what ROLL's worker gets wrong."""

import copy
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import ConfigError, DataError
from agentenv.rewards.rules.detection.reward import (
    MAX_CHARS,
    Box,
    BoxMatcher,
    DetectionReward,
    answer_block,
    best_pairs,
    iou,
    read_boxes,
)
from agentenv.rewards.types import Response, Status


def box(label, *corners):
    return {"bbox_2d": list(corners), "label": label}


CAT, DOG, FAR = box("cat", 0, 0, 10, 10), box("dog", 20, 0, 30, 10), box("cat", 500, 500, 510, 510)
CATS = [box("cat", 100 * n, 0, 100 * n + 10, 10) for n in range(3)]
DOG_FOR_CAT = {**CAT, "label": "dog"}


def said(boxes):
    text = boxes if isinstance(boxes, str) else json.dumps(boxes)
    return f"<think>Where?</think>\n<answer>\n{text}\n</answer><|im_end|>"


async def grade(predicted, truth, metadata=None, **options):
    return await DetectionReward(**options).grade(Response(said(predicted), truth, metadata=metadata or {}))


# --- golden values, by hand -----------------------------------------------------------------------------------------

# Predicted, true, and with c = 0.3: label first, mean IoU, completeness, map, map50, map75, penalty. An IoU of .8
# passes 7 of the 11 thresholds .50:.95 and .99, and 7 of COCO's 10; .7 passes 5. Accuracy: label first · penalty.
GOLDEN = {
    "perfect": ([CAT, DOG], [CAT, DOG], 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "nearly": ([box("cat", 0, 0, 10, 8)], [CAT], (0.7 * 5.6 + 0.3 * 7) / 11, 5.6 / 11, 7 / 11, 0.7, 1.0, 1.0, 1.0),
    "one missing": ([CAT], [CAT, DOG], 0.7 * 0.5 + 0.3 * 0.75, 0.5, 0.75, 0.5, 0.5, 0.5, 0.6),
    "one too many": ([CAT, FAR], [CAT], 0.7 + 0.3 * 0.75, 1.0, 0.75, 0.5, 0.5, 0.5, 0.6),
    "another label": ([DOG_FOR_CAT], [CAT], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.6),
    "elsewhere": ([FAR], [CAT], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.6),
    "two of three": ([CATS[0], CATS[1], FAR], CATS, 2 / 3, 2 / 3, 2 / 3, *[2 / 3 * 67 / 101] * 3, 0.6),
    "none": ([], [CAT, DOG], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.36),
    "none, rightly": ([], [], 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "one where there is none": ([CAT], [], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.6),
}


@pytest.mark.parametrize("name", GOLDEN)
async def test_golden_values(name):
    predicted, truth, *values = GOLDEN[name]
    result = await grade(predicted, truth)
    names = ("iou_max_label_first", "mean_iou", "completeness", "map", "map50", "map75", "count_penalty")
    assert [result.components[each] for each in names] == pytest.approx(values)
    accuracy = values[0] * values[-1]
    assert result.score == result.components["accuracy"] == pytest.approx(accuracy)
    assert (result.components["format"], result.status) == (1.0, Status.OK)
    assert result.reward == pytest.approx((accuracy + 0.1) / 1.1)


async def test_the_metrics_are_weighted_and_summed():
    ratios = {"iou_max_label_first": 0.5, "map": 0.25, "map50": 1.0, "map75": 0.25}
    result = await grade([box("cat", 0, 0, 10, 8)], [CAT], ratios=ratios, format_ratio=0.0)
    assert result.reward == pytest.approx((0.5 * 5.6 / 11 + 0.25 * 0.7 + 1.0 + 0.25) / 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ratios": {}}, "a ratio above 0"),
        ({"format_ratio": 0, "accuracy_ratio": 0}, "not both 0"),
        ({"in_pixels": "yes"}, "true or false for pixels"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ConfigError, match=f"DetectionReward: expected .*{said}"):
        DetectionReward(**options)


async def test_pairing_is_better_than_the_nearest_first():
    """The first prediction lies best on the first true box, but the second one lies on nothing else."""
    truth = [box("a", 0, 0, 10, 1), box("a", 2.2, 0, 12.2, 1)]
    predicted = [box("a", 1, 0, 11, 1), box("a", -1.5, 0, 8.5, 1)]
    result = await grade(predicted, truth, threshold=0.5, ratios={"iou_max_label_first": 1.0})
    assert result.components["mean_iou"] == pytest.approx((8.8 / 11.2 + 8.5 / 11.5) / 2)
    assert result.components["map50"] == 1.0


async def test_position_first_pairs_by_position_and_pays_pairs_of_one_label_only():
    crossed = [box("dog", 0, 0, 10, 10), box("cat", 0, 0, 10, 8)]
    result = await grade(crossed, [CAT], ratios={"iou_max_iou_first": 1.0})
    assert (result.components["iou_max_iou_first"], result.components["mean_iou"]) == (0.0, pytest.approx(5.6 / 11))


async def test_boxes_in_one_place_are_paired_by_their_labels():
    both = [CAT, DOG_FOR_CAT]
    for order in (both, both[::-1]):
        assert (await grade(order, both, ratios={"iou_max_iou_first": 1.0})).reward == pytest.approx(1.0)
    shifted = [{**CAT, "label": label} for label in ("ant", "cat")]
    found = (await grade(shifted, both, ratios={"iou_max_iou_first": 1.0})).components
    assert (found["mean_iou"], found["iou_max_iou_first"]) == (0.5, 0.5)


async def test_images_are_kept_apart_and_counted_together():
    assert (await grade([[CAT], [DOG]], [[CAT], [DOG]])).reward == pytest.approx(1.0)
    swapped = await grade([[DOG], [CAT]], [[CAT], [DOG]])
    assert (swapped.score, swapped.components["count_penalty"]) == (0.0, pytest.approx(0.36))
    fewer = await grade([[CAT]], [[CAT], [DOG]])
    assert (fewer.components["mean_iou"], fewer.components["count_penalty"]) == (0.5, 0.6)
    assert (await grade([[CAT, DOG]], [CAT, DOG])).reward == pytest.approx(1.0), "one image may be a list of one list"


# --- what ROLL's worker gets wrong ----------------------------------------------------------------------------------

ALL = {"iou_max_label_first": 1.0, "iou_max_iou_first": 1.0, "iou_completeness": 0.3, "map": 1.0, "map50": 1.0,
       "map75": 1.0}  # fmt: skip


async def test_no_dict_of_the_caller_or_of_another_row_is_changed():
    parm = {"det_reward_ratio": {"map": 1.0}, "det_verifier_normalized": False}
    metadata = {"reward_model": {"ground_truth": [CAT], "verifier_parm": parm, "format_ratio": 0.5}, "global_step": 3}
    before = copy.deepcopy(metadata)
    reward = DetectionReward()
    first = await reward.grade(Response(said([box("cat", 0, 0, 10, 8)]), None, metadata=metadata))
    assert metadata == before
    assert first.reward == pytest.approx((0.7 + 0.5) / 1.5)
    other = {"reward_model": {"ground_truth": [CAT], "verifier_parm": {"det_reward_ratio": {}}}}
    result = await reward.grade(Response(said([box("cat", 0, 0, 10, 8)]), None, metadata=other))
    assert result.score == pytest.approx((0.7 * 5.6 + 0.3 * 7) / 11), "the default ratios, not the row's before"
    assert other["reward_model"]["verifier_parm"]["det_reward_ratio"] == {}


async def test_wrong_boxes_do_not_make_up_for_missing_ones():
    honest, padded = await grade([CAT], [CAT, DOG]), await grade([CAT, FAR], [CAT, DOG])
    assert padded.reward < honest.reward
    roll = [await grade(boxes, [CAT, DOG], by_count=True) for boxes in ([CAT], [CAT, FAR])]
    assert [each.components["count_penalty"] for each in roll] == [0.6, 1.0]
    assert roll[1].reward > roll[0].reward, "which is why it is not the default"


# --- thresholds, rows and coordinates -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "metadata", "found"),
    [
        ({"threshold": 0.9}, {}, 1.0), ({"threshold": 0.95}, {}, 0.0), ({"threshold": "average"}, {}, 9 / 11),
        ({"threshold": "dynamic"}, {"global_step": 10, "max_steps": 100}, 1.0),
        ({"threshold": "dynamic"}, {"global_step": 11, "max_steps": 100}, 0.0),
        ({"threshold": "dynamic"}, {"global_step": 26, "max_steps": 100}, 0.0),
    ],
)  # fmt: skip
async def test_the_threshold_is_fixed_averaged_or_rises(options, metadata, found):
    result = await grade([box("cat", 0, 0, 10, 9)], [CAT], metadata, ratios={"iou_max_label_first": 1.0}, **options)
    assert result.components["completeness"] == pytest.approx(found)


@pytest.mark.parametrize(
    "label",
    [[CAT, DOG], json.dumps([CAT, DOG]), f"<answer>\n{[CAT, DOG]}\n</answer>", {"ground_truth": [CAT, DOG]},
     json.dumps({"ground_truth": str([CAT, DOG])})],
)  # fmt: skip
async def test_true_boxes_come_in_several_forms_from_the_label_or_reward_model(label):
    assert (await grade([CAT, DOG], label)).reward == pytest.approx(1.0)
    column = label if isinstance(label, dict) else {"ground_truth": label} if "ground" not in str(label) else label
    assert (await grade([CAT, DOG], None, {"reward_model": column})).reward == pytest.approx(1.0)


async def test_pixels_become_thousandths_of_each_image():
    rules = {"verifier_parm": {"det_verifier_normalized": True}}
    truth = {"ground_truth": [[box("a", 500, 250, 1000, 500)], [box("b", 0, 0, 10, 10)]], **rules}
    predicted = [[box("a", 320, 120, 640, 240)], [box("b", 0, 0, 20, 1)]]
    sizes = {"image_size": [[640, 480], [2000, 100]]}
    assert (await grade(predicted, truth, sizes)).reward == pytest.approx(1.0)
    assert (await grade(predicted[0], truth["ground_truth"][0], {"image_size": (640, 480)}, in_pixels=True)).score == 1
    down = await grade([CAT], [CAT], {"image_size": [999, 999]}, in_pixels=True, threshold=1.0)
    assert down.score == 1.0, "10 of 999 pixels are 10.01 thousandths, which true boxes have as 10"
    with pytest.raises(DataError, match="image_size"):
        await grade(predicted, truth)


# --- reading --------------------------------------------------------------------------------------------------------

C, D = Box("cat", 0, 0, 10, 10), Box("dog", 20, 0, 30, 10)
ONE = "{'bbox_2d': [0, 0, 10, 10], 'label': 'cat'}"
TWO = '{"bbox_2d": [20, 0, 30, 10], "label": "dog"}'
READ = {
    "JSON": (json.dumps([CAT, DOG]), [C, D], 0, True),
    "Python": (str([CAT, DOG]), [C, D], 0, True),
    "a tuple, a comma at the end": ("[{'bbox_2d': (0, 0, 10, 10), 'label': 'cat',},]", [C], 0, True),
    "fenced": (f"```json\n[{ONE}]\n```", [C], 0, True),
    "with more": ("[{'bbox_2d': [0, 0, 1e1, 10.0], 'label': 'Cat ', 'confidence': 0.9, 'ok': True}]", [C], 0, True),
    "cut in a box": (f"[{ONE}, {TWO[:20]}", [C], 0, False),
    "cut in a label": (f"[{ONE}, {TWO[:-3]}", [C], 0, False),
    "cut in an image": (f"[[{ONE}], [{TWO}, {ONE[:9]}", [C, D], 0, False),
    "prose around": (f"They are [{ONE}].", [C], 0, False),
    "code instead of a box": (f"[{ONE}, __import__('os').system('x')]", [C], 0, False),
    "nothing": ("[]", [], 0, True),
    "twice": (f"[{ONE}, {ONE}]", [C], 0, True),
    "three numbers": (f"[{ONE}, {{'bbox_2d': [1, 2, 3], 'label': 'x'}}]", [C], 1, True),
    "corners swapped": ("[{'bbox_2d': [9, 0, 1, 1], 'label': 'x'}]", [], 1, True),
    "no label": ("[{'bbox_2d': [0, 0, 1, 1]}, {'bbox_2d': [0, 0, 1, 1], 'label': 3}]", [], 2, True),
    "too large": ("[{'bbox_2d': [0, 0, 1e99, 1], 'label': 'x'}]", [], 1, True),
    "truth values": ("[{'bbox_2d': [false, true, 1, 1], 'label': 'x'}]", [], 1, True),
    "numbers only": ("[0, 0, 10, 10]", [], 4, True),
}


@pytest.mark.parametrize("name", READ)
def test_boxes_are_read_as_far_as_they_go(name):
    text, boxes, num_invalid, whole = READ[name]
    found = read_boxes(text)
    assert (sorted(itertools.chain(*found.images)), found.num_invalid, found.complete) == (boxes, num_invalid, whole)


@pytest.mark.parametrize("text", ["", "none", "{}", f"{'x' * MAX_CHARS}[]"])
def test_a_text_without_a_list_has_no_boxes(text):
    assert read_boxes(text) is None


@pytest.mark.parametrize(
    ("text", "block", "well_formed"),
    [
        ("<answer>\n[]\n</answer>", "\n[]\n", True), ("Look:\n<answer> \n[]\n</answer> Done.", "\n[]\n", True),
        ("<answer>[]</answer>", "[]", False), ("Look: <answer>\n[]\n</answer>", "\n[]\n", False),
        ("<answer>\n1\n</answer>\n<answer>\n2\n</answer>", "\n2\n", False), ("<answer>\n[", "\n[", False),
        ("</answer>[]", None, False),
    ],
)  # fmt: skip
def test_the_last_block_is_the_answer_and_one_on_its_lines_is_well_formed(text, block, well_formed):
    found, formed = answer_block(text)
    assert (found if found is None else found.replace(" ", ""), formed) == (block, well_formed)


@pytest.mark.parametrize(
    ("text", "status", "form"),
    [
        ("I see a cat.", Status.NO_ANSWER, 0.0), (f"<think>\n<answer>\n[{ONE}]\n</answer>", Status.NO_ANSWER, 0.0),
        ("<answer>\na cat\n</answer>", Status.PARSE_ERROR, 0.0), ("<answer>\n[{'bbox", Status.PARSE_ERROR, 0.0),
        ("<answer>\n[{'label': 'cat'}]\n</answer>", Status.PARSE_ERROR, 0.0),
        ("<answer>\n[]\n</answer>", Status.OK, 1.0),
        (f"<answer>\n[{ONE}, 3]\n</answer>", Status.OK, 0.0), (f"<answer>\n[{ONE},\n</answer>", Status.OK, 0.0),
    ],
)  # fmt: skip
async def test_how_grading_ends(text, status, form):
    result = await DetectionReward().grade(Response(text, [CAT]))
    assert (result.status, result.components["format"]) == (status, form)
    assert result.components.keys() == (await grade([CAT], [CAT])).components.keys()
    assert result.reward == 0.0 or status is Status.OK


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        (None, {}), ("", {}), (3, {}), ("a cat", {}), ("{", {}), ([3], {}), ([box("cat", 3, 0, 1, 1)], {}),
        (f"[{ONE}, ", {}), ([box("cat", n, 0, n + 1, 1) for n in range(201)], {}), (None, {"reward_model": "cat"}),
        (None, {"reward_model": 3}), ([box("cat", 0, 0, math.nan, 1)], {}),
        ({"ground_truth": [CAT], "format_ratio": -1}, {}), ({"ground_truth": [CAT], "accuracy_ratio": "1"}, {}),
        ({"ground_truth": [CAT], "format_ratio": 0, "accuracy_ratio": 0}, {}),
        ({"ground_truth": [CAT], "verifier_parm": 3}, {}), (np.array([CAT, CAT]), {}), (np.array([]), {}),
        ({"ground_truth": np.array([CAT, CAT])}, {}), (None, {"reward_model": np.array([CAT, CAT])}),
        ({"ground_truth": [CAT], "verifier_parm": {"det_reward_ratio": {"map": 2}}}, {}),
        ({"ground_truth": [CAT], "verifier_parm": {"det_reward_ratio": {"mAP": 1}}}, {}),
        ({"ground_truth": [CAT], "verifier_parm": {"det_reward_ratio": {"map": 0}}}, {}),
        ({"ground_truth": [CAT], "verifier_parm": {"det_verifier_normalized": "no"}}, {}),
        ({"ground_truth": [CAT], "verifier_parm": {"det_verifier_normalized": True}}, {"image_size": [0, 9]}),
        ([CAT], {"global_step": "3", "max_steps": 9}), ([CAT], {"global_step": math.nan, "max_steps": 9}),
    ],
)  # fmt: skip
async def test_a_row_that_cannot_be_used_is_the_datas_error(label, metadata):
    with pytest.raises(DataError, match=r"DetectionReward: .* expected"):
        await grade([CAT], label, metadata, threshold="dynamic")


@pytest.mark.long
async def test_boxes_without_end_are_worth_nothing_and_take_no_time():
    many = [box("cat", n / 100, 0, 10 + n / 100, 10) for n in range(3000)]
    result = await grade([CAT, *many], [CAT])
    assert (result.status, result.components["accuracy"]) == (Status.OK, 0.0)
    hundred = await grade([CAT, *many[:100]], [CAT])
    assert 0.0 < hundred.components["accuracy"] < 1e-20
    assert (await grade([CAT, *many[:102]], [CAT])).components["accuracy"] == 0.0


@pytest.mark.parametrize(
    "piece", ["[", "[[", "{'a':", "[{'", "'", '"', "\\", "[' ", '["\\', "[1,", "[1e", "[[],", "`", " "]
)
def test_reading_takes_time_in_proportion_to_the_text(piece):
    for start in ("", "[", "[{'label': '"):
        read_boxes(start + piece * (150_000 // len(piece)))  # pytest's own time limit ends a reader that does not


# --- laws -----------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 6)
BOXES = st.lists(
    st.tuples(st.sampled_from("ab"), NUMBERS, NUMBERS, st.integers(1, 6), st.integers(1, 6)).map(
        lambda b: box(b[0], b[1], b[2], b[1] + b[3], b[2] + b[4])
    ),
    max_size=6,
)
REWARD = DetectionReward(ratios=ALL)


async def reward_of(predicted, truth, reward=REWARD):
    return await reward.grade(Response(said(predicted), truth))


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(BOXES, BOXES, st.tuples(st.sampled_from("abc"), NUMBERS, NUMBERS, st.integers(0, 6), st.integers(0, 6)))
async def test_a_wrong_box_more_never_raises_the_reward(predicted, truth, wrong):
    label, x, y, width, height = wrong
    more = Box(label, x, y, x + width, y + height)
    if any(iou(more, Box("", *true["bbox_2d"])) >= 0.5 for true in truth):
        more = Box(label, x + 100, y, x + 101 + width, y + 1 + height)
    result = await reward_of([*predicted, box(more.label, *more[1:])], truth)
    assert result.reward <= (await reward_of(predicted, truth)).reward + 1e-12


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2)), st.integers(1, 9), max_size=9)
)
def test_as_many_pairs_as_can_be_and_the_heaviest_of_these(weights):
    weights = {pair: weight / 9 for pair, weight in weights.items()}
    sets = [
        subset
        for size in range(len(weights) + 1)
        for subset in itertools.combinations(weights, size)
        if len({pair[:2] for pair in subset}) == len({(pair[0], pair[2]) for pair in subset}) == size
    ]
    best = max((len(subset), sum(weights[pair] for pair in subset)) for subset in sets)
    chosen = best_pairs(weights)
    assert chosen in [sorted(subset) for subset in sets]
    assert (len(chosen), sum(weights[pair] for pair in chosen)) == pytest.approx(best)


def test_boxes_without_an_area_are_themselves_only():
    line, other = Box("a", 0, 0, 0, 5), Box("a", 0, 0, 1e-300, 1e-300)
    assert (iou(line, line), iou(line, other), iou(other, Box("a", 0, 0, 2e-300, 1e-300))) == (1.0, 0.0, 0.0)
    assert BoxMatcher([[line]], [[line]]).quality(0.5, labels_first=True).mean_iou == 1.0
