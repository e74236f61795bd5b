"""vLLM's tool parsers on the calls that the families' templates render, beside our own reader."""

from __future__ import annotations

import json

import pytest

from agentenv.chat.chat import Chat
from tests.chat.families import load
from tests.tools.test_tools import BY_NAME, action, format_of, found_in, schema_for, stop_ids

PARSERS = {
    "Qwen2.5": "hermes",
    "Llama-3.1": "llama3_json",
    "DeepSeek-V3": "deepseek_v3",
    "DeepSeek-V3.1": "deepseek_v31",
    "DeepSeek-V3.2": "deepseek_v32",
    "Kimi-K2-Thinking": "kimi_k2",
    "GLM-4.5": "glm45",
    "Qwen3-Coder": "qwen3_coder",
    "MiniMax-M2": "minimax_m2",
}
"""Families and the parsers that vLLM has for them.

Of vLLM 0.32, the other parsers read less than ours: Mistral's list as one call named `[`, Mistral Small 3.2's id as a
part of the name, Gemma 4's numbers in a list as text, an object of Seed-OSS as text, and no call of LFM2.5's with an
object.
"""
ARGUMENTS = [
    {"q": "sun in Rome", "n": 3},
    {"yes": True, "deep": {"of": [1, "b"]}, "x": -1.5},
    {"s": "3", "u": "é 日本 😀", "line": "a\nb"},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.filterwarnings("ignore")
def test_a_call_is_read_as_vllm_reads_it(name):
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    family = BY_NAME[name]
    chat = Chat(load(family), stop_token_ids=stop_ids(family))
    calls = [(f"tool_{number}", arguments) for number, arguments in enumerate(ARGUMENTS)]
    for some in (calls, calls[1:2]) if format_of(family).parallel else ([call] for call in calls):
        schemas = [{"name": tool, "parameters": schema_for(arguments)} for tool, arguments in some]
        tools = [{"type": "function", "function": schema} for schema in schemas]
        said = chat.action_text(chat._encoder.follow(action(family, some)), stop_ids(family))
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=tools)
        parser = ToolParserManager.get_tool_parser(PARSERS[name])(load(family), request.tools)
        theirs = parser.extract_tool_calls(said, request=request).tool_calls
        assert [(c.function.name, json.loads(c.function.arguments)) for c in theirs] == some
        assert found_in(format_of(family).parse(said, tools=tools)) == some
