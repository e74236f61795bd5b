"""What follows a call: results that say whose they are, on every family that renders calls."""

from __future__ import annotations

import copy

import pytest

from agentenv.chat.chat import Chat
from agentenv.chat.dialogue import Dialogue
from agentenv.chat.message_dialogue import MessageDialogue
from agentenv.chat.tool_calls.messages import assistant_message, result_message
from agentenv.errors import ConfigError, ContractError
from tests.chat.families import FAMILIES, SUPPORTED, load
from tests.episode.endpoint.scenes import TOOL, ask, session_of
from tests.tools.test_tools import BY_NAME, CALLING, action, format_of, stop_ids

QUESTION = [{"role": "user", "content": "Look it up."}]
CALLS = [("get_weather", {"city": "Rome"}), ("get_time", {"zone": "CET"})]
NAMES_CALLED = ("gpt-oss", "Gemma4 (TRL)")
"""Families that render a result under the name of the call, whether or not the result has one."""
with_tool_role = pytest.mark.parametrize(
    "family", [family for family in CALLING if "tool" in family.shapes], ids=lambda f: f.name
)


PADDED = dict.fromkeys(("tool_calls", "tool_call_id", "name", "reasoning_content"))
LOOKUP = {"q": {"type": "string"}, "n": {"type": "integer"}}
FORMS = [f for f in FAMILIES if f.name in (
    "Qwen2.5", "Qwen3.5-think", "Qwen3-VL", "Llama-3.1", "Llama-4", "DeepSeek-V3", "DeepSeek-R1-Distill", "GLM-4.5",
    "Functionary-2.2", "LFM2.5", "gpt-oss",
)]  # fmt: skip


def dialogue_of(family):
    tools = [] if family.needs_tools else None
    dialogue = Dialogue(Chat(load(family), stop_token_ids=stop_ids(family), tools=tools), 4096)
    dialogue.begin(QUESTION)
    return dialogue


@pytest.mark.parametrize("family", FORMS, ids=lambda f: f.name)
def test_calls_in_a_prompt_are_rendered_alike_however_they_are_written(family):
    def prompt(arguments, padding, **call):
        asks = {"role": "assistant", **call, "tool_calls": [{"id": "callid000", "type": "function"}]}
        asks["tool_calls"][0]["function"] = {"name": "lookup", "arguments": arguments}
        answer = {"role": "tool", "content": "r", "tool_call_id": "callid000"}
        talk = [*QUESTION, asks, answer, {"role": "user", "content": "Next."}]
        tool = {"name": "lookup", "description": "Look.", "parameters": {"type": "object", "properties": LOOKUP}}
        tools = [{"type": "function", "function": {**padding, **tool}}] if chat.template.renders_tools else None
        dialogue = Dialogue(chat, 4096)
        dialogue.begin([{**padding, **message} for message in talk], tools)
        return dialogue.text

    chat = Chat(load(family), stop_token_ids=stop_ids(family))
    plain = prompt({"q": 'a"b'}, {})
    assert "lookup" in plain
    assert "None" not in plain
    assert prompt('{"q": "a\\"b"}', PADDED, content=None) == plain
    if chat.template.renders_tools:
        assert prompt({"q": 'a"b', "n": None, "other": None}, {}, content="") == plain


@pytest.mark.parametrize("tools", [None, TOOL])
def test_a_servers_messages_have_calls_as_json_text_and_no_nulls(tools):
    dialogue = MessageDialogue(100)
    call = {"id": None, "function": {"name": "lookup", "arguments": {"query": "a", "other": None}}}
    dialogue.begin([{**PADDED, **QUESTION[0]}, {"role": "assistant", "tool_calls": [call]}, *QUESTION], tools)
    arguments = '{"query": "a"}' if tools else '{"query": "a", "other": null}'
    asked = {"type": "function", "function": {"name": "lookup", "arguments": arguments}}
    assert list(dialogue.prompt.messages) == [
        *QUESTION, {"role": "assistant", "content": None, "tool_calls": [asked]}, *QUESTION
    ]  # fmt: skip


def act(dialogue, text):
    """Append an action; return its ids and its text."""
    ids = dialogue.chat._encoder.follow(text)
    dialogue.append_action(ids)
    return ids, dialogue.chat.action_text(ids)


def results_of(dialogue, text, *, parsed=True):
    """The ids after an action of calls, by what its results tell: their names, or only their ids, or nothing."""
    ids, said = act(dialogue, text)
    calls = dialogue.chat.tool_format.parse(said).calls
    if parsed:
        calls = dialogue.parse_calls(said).calls
    named = [{"role": "tool", "tool_call_id": c.call_id, "name": c.name, "content": f"for {c.name}"} for c in calls]
    nameless = [{key: value for key, value in m.items() if key != "name"} for m in named]
    return [dialogue.reply_to(ids, said, results).ids for results in (named, nameless)]


@pytest.mark.parametrize("family", FORMS, ids=lambda f: f.name)
def test_a_result_without_a_name_has_that_of_the_call_that_it_answers(family):
    calls = CALLS if format_of(family).parallel and "tools" in family.shapes else CALLS[:1]
    for parsed in (True, False):
        named, nameless = results_of(dialogue_of(family), action(family, calls), parsed=parsed)
        assert named == nameless


@pytest.mark.parametrize("name", NAMES_CALLED)
def test_a_result_that_answers_no_known_call_is_refused_if_the_template_says_its_name(name):
    dialogue = dialogue_of(BY_NAME[name])
    ids, said = act(dialogue, "Let me see.")
    with pytest.raises(ConfigError, match="expected tool results with a name"):
        dialogue.reply_to(ids, said, [{"role": "tool", "tool_call_id": "1", "content": "42"}])


def test_a_result_that_answers_no_known_call_is_rendered_if_the_template_says_no_name():
    dialogue = dialogue_of(BY_NAME["Qwen3"])
    ids, said = act(dialogue, "Let me see.")
    reply = dialogue.reply_to(ids, said, [{"role": "tool", "tool_call_id": "1", "content": "42"}])
    assert "42" in dialogue.chat.decode(reply.ids)


def cycle(dialogue, messages, text, *more):
    """Act with calls and reply with their results; return the reply's ids and the conversation with them."""
    ids, said = act(dialogue, text)
    parsed = dialogue.parse_calls(said)
    answer = assistant_message(parsed, as_json=dialogue.chat.tool_format.arguments_as_json)
    new = [*(result_message(call, f"for {call.name}") for call in parsed.items), *more]
    reply = dialogue.reply_to(ids, said, new)
    dialogue.append_reply(reply)
    return reply.ids, [*messages, answer, *new]


ONE_OUTPUT = ("DeepSeek-V3", "DeepSeek-R1")
"""Families whose template opens the results of the first cycle only, and closes those of all (code R)."""


@with_tool_role
@pytest.mark.parametrize("between", [[], [{"role": "user", "content": "And then?"}]], ids=["", "asked"])
def test_a_second_cycle_of_calls_ends_like_the_whole_conversation(family, between):
    alternates = "Mistral v2v3" in family.name or family.name == "Mistral-Nemo"
    if family.name in ONE_OUTPUT or (between and alternates):
        pytest.skip("the template cannot render it")
    dialogue = dialogue_of(family)
    _, messages = cycle(dialogue, QUESTION, action(family, CALLS[:1]), *between)
    second = action(family, CALLS[1:]).replace('"tool_call_id": "0"', '"tool_call_id": "1"')
    told, messages = cycle(dialogue, messages, second)
    assert "for get_time" in dialogue.chat.decode(told)
    assert dialogue.chat.encode(dialogue.chat.render(messages))[-len(told) :] == told


async def test_results_that_the_template_numbers_are_numbered_on_at_the_endpoint():
    call = '{{"tool_call_id": "{}", "tool_name": "lookup", "parameters": {{"query": "x"}}}}'
    call = f"<|START_ACTION|>[\n    {call}\n]<|END_ACTION|>"
    texts = [call.format(0), call.format(0), call.format(1), "Four.", call.format(2), "Six."]
    session, engine = session_of(texts, "Command-A-tools")
    messages = [{"role": "user", "content": "2 + 2?"}]
    await ask(session, messages, tools=TOOL)  # a lost answer: the client asks again, and continues the second one
    for number in range(2):
        _, messages = await ask(session, messages, tools=TOOL)
        result = {"role": "tool", "tool_call_id": str(number), "content": f"R{number}"}
        messages.append(result)
    for content in ("R1", "R2"):  # the second time from an earlier point
        _, branch = await ask(session, [*messages[:-1], {**result, "content": content}], tools=TOOL)
        seen = session.chat.decode(engine.requests[-1].prompt_token_ids)
        assert f'"tool_call_id": "1",\n        "results": {{\n            "0": "{content}"' in seen
        assert '"tool_call_id": "0",\n        "results": {\n            "0": "R0"' in seen
    await ask(session, [*branch, {"role": "tool", "tool_call_id": "2", "content": "R3"}], tools=TOOL)
    seen = session.chat.decode(engine.requests[-1].prompt_token_ids)
    assert '"tool_call_id": "2",\n        "results": {\n            "0": "R3"' in seen


def test_results_that_the_template_numbers_are_refused_if_the_conversation_is_unknown():
    family = BY_NAME["Command-A-tools"]
    dialogue = Dialogue(Chat(load(family), stop_token_ids=stop_ids(family)), 4096)
    dialogue.begin("raw text")
    ids, said = act(dialogue, action(family, CALLS[:1]))
    with pytest.raises(ConfigError, match="numbers turns over the conversation"):
        dialogue.reply_to(ids, said, [{"role": "tool", "tool_call_id": "0", "name": "f", "content": "42"}])


def test_only_templates_that_number_turns_over_the_conversation_are_rendered_with_it():
    numbered = {family.name: dialogue_of(family).chat.template.numbered_roles for family in SUPPORTED}
    assert {name: roles for name, roles in numbered.items() if roles} == {
        "ChatGLM": ("user",),
        "Command-A-tools": ("tool",),
    }


def test_tools_are_refused_if_the_template_renders_later_turns_differently_with_them():
    tokenizer = copy.deepcopy(load(BY_NAME["Qwen3"]))
    tokenizer.chat_template = (
        "{{ '<|im_start|>system\n' ~ tools | tojson ~ '<|im_end|>\n' if tools }}{% for m in messages %}"
        "{{ '<|im_start|>' ~ m.role ~ '\n' ~ ('Q: ' if tools and m.role == 'user') ~ m.content ~ '<|im_end|>\n' }}"
        "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    )
    with pytest.raises(ContractError, match="renders later turns differently"):
        Dialogue(Chat(tokenizer), 4096).begin(QUESTION, TOOL)
