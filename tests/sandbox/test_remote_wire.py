"""Messages with a far side: they arrive as they were sent, in whatever pieces, and what is none is refused."""

import ast
import base64
import itertools
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.sandbox import ExecLimits, ExecResult, ExecStatus, Isolation
from agentenv.sandbox.local.session import TurnResult
from agentenv.sandbox.remote.pipe import source_line
from agentenv.sandbox.remote.wire import Splitter, encode

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=100)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
results = st.builds(
    ExecResult,
    status=st.sampled_from(ExecStatus),
    exit_code=st.none() | st.integers(0, 255),
    stdout=st.text(),
    channel=st.binary(),
    files=st.dictionaries(st.text(), st.binary()),
    wall_s=st.floats(0, 100) | st.integers(0, 100),
    isolation=st.sampled_from(Isolation),
    layers=st.lists(st.text(), max_size=3).map(tuple),
    detail=st.none() | st.text(),
)


def split(data, cuts):
    splitter = Splitter()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    return [message for piece in pieces for message in splitter.feed(piece)]


sent_values = values | results | st.builds(ExecLimits) | st.builds(TurnResult, st.sampled_from(ExecStatus))


@pytest.mark.long
@given(st.lists(sent_values, max_size=3), st.lists(st.integers(0)))
def test_values_arrive_unchanged_in_pieces_of_any_size(sent, cuts):
    messages = [{"answer": number, "value": value} for number, value in enumerate(sent)]
    data = b"".join(encode(message) for message in messages)
    assert split(data, cuts) == messages


@given(st.binary(max_size=300))
def test_input_that_is_not_a_message_raises_nothing_else_than_what_is_caught(data):
    splitter = Splitter()
    try:
        list(splitter.feed(data))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return


@pytest.mark.parametrize(
    ("field", "value"),
    [("stdout", 1), ("status", "fine"), ("wall_s", "1"), ("files", {"map": {"a": "no bytes"}}), ("exit_code", [1])],
)
def test_a_result_with_a_field_of_another_type_is_refused(field, value):
    header = {"value": {"kind": "ExecResult", "fields": {"status": "ok", field: value}}, "sizes": []}
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match=r"ExecResult|is not a valid"):
        list(Splitter().feed(len(text).to_bytes(4, "little") + text))


@pytest.mark.parametrize("value", [{"kind": "Popen", "fields": {}}, {"bytes": 0}, {"kind": "ExecResult"}])
def test_what_names_something_else_is_refused(value):
    text = json.dumps({"value": value, "sizes": []}).encode()
    with pytest.raises((KeyError, IndexError)):
        list(Splitter().feed(len(text).to_bytes(4, "little") + text))


@pytest.mark.parametrize("sizes", [[-1], [1 << 40], [1 << 27, 1 << 28]])
def test_a_message_that_would_not_fit_is_refused_before_it_is_there(sizes):
    text = json.dumps({"value": None, "sizes": sizes}).encode()
    with pytest.raises(ValueError, match="a message of"):
        list(Splitter().feed(len(text).to_bytes(4, "little") + text))


@pytest.mark.long
def test_the_source_for_a_far_side_is_one_line_of_moderate_size():
    assert source_line().count(b"\n") == 1
    assert len(source_line()) < 200_000


def test_the_source_for_a_far_side_imports_nothing_of_ours_that_is_not_in_it():
    """There is no other agentenv there: it would be missed only where a container is started."""
    files = json.loads(zlib.decompress(base64.b64decode(source_line())))
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    imported = {
        node.module
        for source in files.values()
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentenv")
    }
    assert imported <= modules
