"""The certificate of a chat template: what it says of every family is what is known of it, and it can say no."""

import copy

import pytest

from agentenv.chat.certify import certify
from agentenv.engines.models import load_stop_token_ids, load_tokenizer, resolve_model
from agentenv.testing.tokenizers import CharTokenizer
from tests.chat.families import FAMILIES, load
from tests.drivers import command

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALLIED = CHATML.replace("{{ m.role }}", "{{ m.role }}{{ 'x' * loop.index if m.role == 'user' }}")
"""Its user turns depend on the length of the history, but not by a number."""
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def named(name):
    return next(family for family in FAMILIES if family.name == name)


def certificate_of(family):
    tokenizer = load(family)
    stops = tokenizer.convert_tokens_to_ids(list(family.stop_tokens))
    return certify(tokenizer, model=family.name, stop_token_ids=stops)


def with_template(text, name="Qwen2.5"):
    tokenizer = copy.deepcopy(load(named(name)))
    tokenizer.chat_template = text
    return tokenizer


def different(found):
    return {(example.context, example.shape) for example in found.examples if example.difference}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_its_class_and_is_exact_on_every_shape_and_lets_no_token_be_forged(family):
    found = certificate_of(family)
    is_supported = family.expected_class != "unsupported"
    assert (found.model, found.kind, found.forged) == (family.name, family.expected_class, ())
    assert [example for example in found.examples if example.difference] == []
    assert (found.is_exact, found.exit_code, bool(found.error)) == (is_supported, not is_supported, not is_supported)
    assert len(found.reasons) == len(family.codes)
    cases = [(example.shape, example.ending) for example in found.examples if not example.context]
    expected = [("prompt", ""), *((shape, ending) for shape in family.shapes for ending in ("stop", "length"))]
    assert cases == (expected if is_supported else [])
    assert found.num_tried == (len(load(family).added_tokens_decoder) if is_supported else 0)
    has_text_markers = "t" in family.codes and family.name != "gpt2 (no roles)"
    assert any("Role markers" in text for text in found.warnings) == has_text_markers


def test_a_second_cycle_of_calls_and_a_system_message_with_tools_are_among_the_examples():
    contexts = {(example.context, example.shape) for example in certificate_of(named("Qwen3")).examples}
    assert {("second cycle", "tool"), ("system and tools", "user"), ("system and tools", "tool")} <= contexts
    assert "second cycle" not in {context for context, _ in different(certificate_of(named("DeepSeek-V3")))}


def test_the_shipped_model_is_exact():
    path = resolve_model("tiny-math")
    found = certify(load_tokenizer(path), model="tiny-math", stop_token_ids=load_stop_token_ids(path))
    num = len(found.examples)
    assert found.verdict.startswith(f"tiny-math: {found.kind}, exact on {num} of {num} examples, 0 of ")
    assert (found.is_exact, found.exit_code, found.lines()[0]) == (True, 0, found.verdict)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Gemma", "tools: not rendered; calls are read as json, after '<tool_call>'"),
        ("GLM-4.5", "tools: rendered; calls are read as markup, after '<tool_call>'"),
        ("Inkling", "tools: rendered; calls are read as json, after 'NAME<|invoke|>'"),
        ("LFM2.5", "tools: rendered; calls are read as keywords"),
    ],
)
def test_a_line_says_whether_tools_are_rendered_and_how_calls_are_read(name, expected):
    assert expected in certificate_of(named(name)).lines()


def test_any_tokenizer_with_the_few_methods_will_do():
    found = certify(CharTokenizer())
    assert (found.kind, found.is_exact, found.exit_code, found.num_tried) == ("prefix-stable", True, 0, 2)


def test_without_a_template_messages_are_plain_paragraphs():
    found = certify(with_template(None), model="plain")
    assert found.verdict == "plain: no template, plain paragraphs, 0 of 9 added tokens can be forged"
    assert (found.exit_code, found.is_exact, found.examples) == (0, False, ())
    assert "chat_template.jinja" in found.advice


def test_a_close_that_the_engine_does_not_stop_at_is_a_warning():
    family = named("Falcon-H1")
    warned = [text for text in certify(load(family)).warnings if text.startswith("In history a turn ends with")]
    assert "'<|im_end|>'" in warned[0]
    assert not any(text.startswith("In history") for text in certificate_of(family).warnings)


OPEN_TURNS = """{%- set turn = namespace(open=false) -%}
{% for m in messages -%}
{% if m.role == 'assistant' -%}
{{ '' if turn.open else '<|im_start|>assistant\n' }}{{ m.content or '' }}{% set turn.open = true -%}
{% if m.tool_calls %}<tool_call>{{ m.tool_calls | map(attribute='function') | list | tojson }}</tool_call>{% endif -%}
{% elif m.role == 'tool' -%}{{ '[' + m.content + ']' -}}
{% else -%}
{{ '<|im_end|>\n' if turn.open }}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% set turn.open = false -%}
{% endif -%}
{% endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt and not turn.open else '' }}"""


def test_a_turn_that_goes_on_after_its_tools_is_exact():
    tokenizer = with_template(OPEN_TURNS)
    found = certify(tokenizer, stop_token_ids=[tokenizer.eos_token_id])
    assert different(found) == set()
    assert {"tool", "tools", "tool+user"} <= {example.shape for example in found.examples}


# --- it can say no ----------------------------------------------------------------------------------------------------


def test_the_templates_message_is_the_error():
    found = certify(with_template("{{ raise_exception('only on Sundays') }}"), model="m")
    assert (found.verdict, found.exit_code) == ("m: unsupported, only on Sundays", 1)
    assert "chat_template.jinja" in found.advice


def test_the_templates_that_are_tampered_with_below_are_exact():
    for text in (CHATML, CALLS):
        assert certify(with_template(text)).is_exact


NUMBERED = "{{ m.content }}{{ messages[0].content|length if m.role == 'user' }}"
LOST = "{{ '' if messages[0].role == 'system' and m.role == 'tool' else '<|im_end|>\n' }}"
AGAIN = "{{ 'again ' if messages | selectattr('role', 'equalto', 'tool') | list | length > 1 }}{{ m.content"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (TALLIED, {("", "user"), ("", "2xuser")}),
        (CHATML.replace("{{ m.content }}", NUMBERED), {("", "user")}),
        ("{{ strftime_now('%f') }}" + CHATML, {("", "prompt")}),
        ("{% if messages|length > 4 %}{{ raise_exception('too long') }}{% endif %}" + CHATML, {("", "2xuser")}),
        (
            CALLS.replace("{{ '<|im_end|>\n' }}", LOST),
            {("system and tools", "tool"), ("system and tools", "tool+user")},
        ),
        (CALLS.replace("{{ m.content", AGAIN), {("second cycle", "tool")}),
    ],
    ids=["length of history", "first message", "clock", "late refusal", "lost close", "second cycle"],
)
def test_what_a_template_makes_different_is_found_where_it_does(text, wrong):
    found = certify(with_template(text))
    assert different(found) >= wrong
    assert (found.is_exact, found.exit_code) == (False, 1)
    assert "Do not train" in found.advice
    assert any(line.startswith("differs: ") for line in found.lines())


def test_a_call_that_is_not_read_as_it_was_rendered_is_not_exact():
    found = certify(with_template(CALLS.replace('{"name": "', '{"name": "my ')))
    assert found.exit_code == 1
    differences = {example.difference for example in found.examples if example.difference}
    assert "its calls are read as [({'q': 'that is eighty four'}, 'my get_parity')]" in differences


def test_tokens_that_can_be_forged_are_named():
    """The template takes out of a message what keeps its text from being a token."""
    tokenizer = with_template(CHATML.replace("{{ m.content }}", "{{ m.content|replace('\ue001', '') }}"))
    found = certify(tokenizer, stop_token_ids=[tokenizer.eos_token_id])
    assert set(found.forged) == {token.text for token in named("Qwen2.5").added_tokens}
    assert (found.is_exact, found.exit_code) == (True, 1)
    assert "9 of 9 added tokens can be forged" in found.verdict
    assert "untrusted" in found.advice


@pytest.mark.long
def test_a_token_that_can_be_forged_is_found_among_thousands():
    tokenizer = with_template(CHATML.replace("{{ m.content }}", "{{ m.content|replace('<\ue001r7>', '<r7>') }}"))
    tokenizer.add_tokens([f"<r{i}>" for i in range(1100)])
    found = certify(tokenizer, stop_token_ids=[tokenizer.eos_token_id])
    assert (found.num_tried, found.forged) == (1109, ("<r7>",))


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_shows_the_verdict_and_its_exit_code(tmp_path, capsys):
    assert command(["tokens", "certify", "tiny-math"]) == 0
    assert capsys.readouterr().out.startswith("tiny-math: ")
    tokenizer = with_template("{{ raise_exception('\x1b[2Jonly on Sundays') }}")
    tokenizer.save_pretrained(tmp_path)
    assert command(["tokens", "certify", "tiny-math", "--tokenizer", tmp_path]) == 1
    said = capsys.readouterr().out
    assert "unsupported" in said
    assert "\x1b" not in said


def test_a_certificate_leaves_the_tokenizer_as_it_was():
    tokenizer = with_template(CHATML)
    before = (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, len(tokenizer))
    certify(tokenizer)
    assert (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, len(tokenizer)) == before
