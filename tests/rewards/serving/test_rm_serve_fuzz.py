"""The reward server's reading of arbitrary JSON: the conversations of one form, or a refusal with its status."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv._util.http.access import RequestRefused
from agentenv.rewards.serving.server import read_request

MAX_ITEMS = 3
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
MESSAGES = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": st.text(max_size=9)})
JSON = st.recursive(
    SCALARS | MESSAGES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=12,
)
ITEMS = st.lists(st.text(max_size=9) | st.lists(MESSAGES, max_size=3) | JSON, max_size=5)
FORMS = ("query", "messages", "prompts", "labels")
BODIES = JSON | st.dictionaries(st.sampled_from(FORMS), JSON | ITEMS | st.lists(st.text(max_size=9)), max_size=3)


def expected_status(body):
    forms = [name for name in ("query", "messages") if isinstance(body, dict) and name in body]
    if len(forms) != 1 or not isinstance(items := body[forms[0]], list):
        return 422
    if len(items) > MAX_ITEMS:
        return 413
    if forms == ["query"]:
        return 200 if all(isinstance(item, str) for item in items) else 422
    return (
        200 if all(isinstance(item, list) and all(isinstance(each, dict) for each in item) for item in items) else 422
    )


@settings(max_examples=200, deadline=None)
@given(body=BODIES)
def test_json_of_any_kind_is_read_or_refused_as_it_should_be(body):
    expected = expected_status(body)
    if expected == 200:
        form, items = read_request(body, MAX_ITEMS)
        assert items == body[form]
        return
    with pytest.raises(RequestRefused) as refused:
        read_request(body, MAX_ITEMS)
    assert refused.value.status == expected
