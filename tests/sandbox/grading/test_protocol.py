"""What a process says counts by the protocol only: one answer per call, in their order, and nothing else."""

import json

import pytest

from agentenv.sandbox.grading.functions import read_answers

BEGIN, READY, END = {"begin": True}, {"ready": True}, {"end": True, "signals": []}


def answers_of(*messages, tail=b"", complete=True, num_calls=2):
    """The answers of a process that said this."""
    return read_answers(
        b"".join(json.dumps(one).encode() + b"\n" for one in (BEGIN, *messages)) + tail, num_calls, complete=complete
    )


def test_one_line_per_call_in_order_is_the_protocol():
    answers = answers_of(
        READY, {"id": 0, "value": 1}, {"id": 1, "error": {"text": "x"}}, {"end": True, "signals": ["trace"]}
    )
    assert (answers.loaded, answers.broken, list(answers.by_id)) == (True, "", [0, 1])
    assert answers.signals == ("trace",)


def test_answers_before_a_death_count():
    answers = answers_of(READY, {"id": 0, "value": 1}, tail=b'{"id":1,"va', complete=False)
    assert (answers.broken, list(answers.by_id)) == ("", [0])


@pytest.mark.parametrize(
    "messages",
    [
        [READY, BEGIN],
        [{"id": 0, "value": 1}],
        [READY, {"id": 0, "value": 1}, {"id": 0, "value": 1}],
        [READY, {"id": 1, "value": 1}],
        [READY, {"id": 0, "value": 1}, {"id": 1, "value": 1}, {"id": 2, "value": 1}],
        [READY, {"id": False, "value": 1}],
        [READY, {"id": 0.0, "value": 1}],
        [READY, {"id": 0}],
        [READY, {"id": 0, "value": 1, "error": {"text": ""}}],
        [READY, {"id": 0, "error": "x"}],
        [READY, {"id": 0, "error": {"text": 1}}],
        [READY, END, {"id": 0, "value": 1}],
        [{"ready": 1}],
        [{"load_error": {"text": "x"}}, READY],
        [READY, {"load_error": {"text": "x"}}],
        [READY, {"end": True}],
        [READY, {"end": True, "signals": [1]}],
        [{}],
    ],
    ids=repr,
)
def test_any_other_line_breaks_the_protocol(messages):
    assert answers_of(*messages).broken


def test_a_last_line_without_its_end_breaks_the_protocol_of_a_process_that_ended_well():
    assert answers_of(READY, tail=b"{").broken
    assert answers_of(READY, END, tail=b"{", complete=False).broken


@pytest.mark.parametrize("line", [b"\n", b"[]\n", b"\xff\n"])
def test_a_line_that_is_not_an_object_breaks_the_protocol(line):
    assert answers_of(READY, tail=line).broken
