"""The traceback of an error: the frames of the user's code, bounded."""

import asyncio
import gc
import json
import sys
import threading

import pytest

from agentenv._util.calls import call
from agentenv._util.paths import MAX_ERROR_CHARS, current_frames, traceback_of
from agentenv.core.step_dict import parse_step


def raised(function, *args):
    """Return what is kept of an error, without the frame of this file that called agentenv."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        asyncio.run(call(function, *args))
    return traceback_of(caught.value.with_traceback(caught.value.__traceback__.tb_next))


def test_a_traceback_begins_in_the_code_that_agentenv_called_and_keeps_the_libraries_that_this_code_called():
    text = raised(lambda: json.loads("{"))
    first, *others = [line for line in text.splitlines() if line.startswith("  File ")]
    assert f'File "{__file__}"' in first
    assert others
    assert all("json" in line for line in others)
    assert text.endswith("JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)")


def test_the_cause_is_part_of_a_traceback():
    def fails():
        try:
            {}["price"]
        except KeyError as error:
            raise ValueError("no price") from error

    text = raised(fails)
    assert text.index("KeyError: 'price'") < text.index("direct cause") < text.index("ValueError: no price")
    assert "agentenv/_util" not in text


def test_an_error_that_agentenv_itself_raised_has_no_traceback():
    assert raised(parse_step, object(), "step") == ""


def test_a_traceback_is_bounded_and_keeps_its_beginning_and_its_end():
    def fails():
        raise ValueError("x" * 10_000 + "end")

    text = raised(fails)
    assert len(text) < MAX_ERROR_CHARS + 10
    assert text.startswith("Traceback")
    assert text.endswith("end")


def test_no_collection_of_garbage_runs_while_the_frames_of_threads_are_read(monkeypatch):
    assert current_frames()[threading.get_ident()].f_code.co_name == "current_frames"
    monkeypatch.setattr(sys, "_current_frames", lambda: {1: gc.isenabled()})
    assert current_frames() == {1: False}
    assert gc.isenabled()
