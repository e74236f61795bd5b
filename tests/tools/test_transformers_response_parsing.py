"""transformers' response parsing on the calls that the families' templates render, beside our own reader."""

from __future__ import annotations

import pytest

from agentenv.chat.chat import Chat
from tests.chat.families import load
from tests.tools.test_tools import BY_NAME, action, format_of, found_in, schema_for, stop_ids

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CALL_OF_OBJECT = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}


def json_calls(pattern, close):
    return {"open_pattern": pattern, "close": close, "content": "json", "transform": CALL, "repeats": True}


def tagged_calls(pattern, close, tag_pattern):
    content = {"content": "xml-inline", "content_args": {"tag_pattern": tag_pattern}}
    return {"open_pattern": pattern, "close": close, **content, "transform": CALL, "repeats": True}


TEMPLATES = {
    "Qwen2.5": {
        "open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": CALL_OF_OBJECT, "repeats": True
    },
    "DeepSeek-V3.1": json_calls("<｜tool▁call▁begin｜>(?P<name>.*?)<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "Kimi-K2-Thinking": json_calls(
        r"<\|tool_call_begin\|>functions\.(?P<name>.*?):\d+<\|tool_call_argument_begin\|>", "<|tool_call_end|>"
    ),
    "gpt-oss": json_calls(r" to=functions\.(?P<name>.*?)<\|channel\|>commentary json<\|message\|>", "<|call|>"),
    "Qwen3-Coder": tagged_calls(
        r"<tool_call>\s*<function=(?P<name>.*?)>", "</function>",
        r"<parameter=(?P<key>.*?)>\n(?P<value>.*?)\n</parameter>",
    ),
    "GLM-4.5": tagged_calls(
        r"<tool_call>(?P<name>\w+)", "</tool_call>",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    "MiniMax-M2": tagged_calls(
        r'<invoke name="(?P<name>.*?)">', "</invoke>", r'<parameter name="(?P<key>.*?)">(?P<value>.*?)</parameter>'
    ),
}  # fmt: skip
"""Families and response templates for the syntax of their calls."""
ARGUMENTS = [
    {"q": "sun in Rome", "n": 3},
    {"yes": True, "deep": {"of": [1, "b"]}, "x": -1.5},
    {"s": "3", "u": "é 日本 😀", "line": "a\nb"},
    {"markup": "a < b & c", "quote": '"it\'s"', "path": r"C:\n"},
]


def said_and_tools(name, some):
    """An action with calls as a family renders it, and the tools that it calls."""
    family = BY_NAME[name]
    chat = Chat(load(family), stop_token_ids=stop_ids(family))
    schemas = [{"name": tool, "parameters": schema_for(arguments)} for tool, arguments in some]
    tools = [{"type": "function", "function": schema} for schema in schemas]
    return chat.action_text(chat._encoder.follow(action(family, some)), stop_ids(family)), tools


def read_by_transformers(name, said, tools):
    parsing = pytest.importorskip("transformers.utils.chat_parsing")
    template = {"start_anchor": "<|never|>", "fields": {"content": {}, "tool_calls": TEMPLATES[name]}}
    calls = parsing.parse_response(said, template, prefix="", tools=tools)["tool_calls"]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_is_read_as_transformers_reads_it(name):
    calls = [(f"tool_{number}", arguments) for number, arguments in enumerate(ARGUMENTS)]
    syntax = format_of(BY_NAME[name])
    for some in (calls, calls[1:2]) if syntax.parallel else ([call] for call in calls):
        said, tools = said_and_tools(name, some)
        assert found_in(syntax.parse(said, tools=tools)) == read_by_transformers(name, said, tools) == some


def test_the_text_that_closes_a_call_ends_it_for_transformers_and_not_for_us():
    some = [("tool", {"text": "</tool_call>"})]
    said, tools = said_and_tools("Qwen2.5", some)
    assert found_in(format_of(BY_NAME["Qwen2.5"]).parse(said, tools=tools)) == some
    with pytest.raises(ValueError, match="could not parse region"):
        read_by_transformers("Qwen2.5", said, tools)
