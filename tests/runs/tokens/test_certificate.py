"""The certificate: what it says of every family is what is known of it, and it can say no."""

import copy
import json
from dataclasses import replace

import pytest
from rich.console import Console
from tokenizers import AddedToken, normalizers

from agentenv.chat.certify.certificate import Certificate, certificate_report, certify, write_certificate
from agentenv.chat.chat import Chat
from agentenv.chat.template import FOLLOW_UPS
from agentenv.engines.models import load_stop_token_ids, load_tokenizer, resolve_model
from agentenv.errors import ConfigError
from agentenv.testing.tokenizers import CharTokenizer
from tests.chat.families import FAMILIES, ONE_OF_EACH, SUPPORTED, load
from tests.chat.templates.family import Family

UNSUPPORTED = [family for family in FAMILIES if family.expected_class == "unsupported"]
every_kind = pytest.mark.parametrize("family", [*ONE_OF_EACH, *UNSUPPORTED], ids=lambda f: f.name)
every_supported = pytest.mark.parametrize("family", ONE_OF_EACH, ids=lambda f: f.name)

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
_MADE: dict[str, Certificate] = {}


def named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def stop_ids(family):
    return load(family).convert_tokens_to_ids(list(family.stop_tokens))


def certificate_of(family):
    """Made once: no certificate changes."""
    if family.name not in _MADE:
        _MADE[family.name] = certify(load(family), model=family.name, stop_token_ids=stop_ids(family))
    return _MADE[family.name]


def with_template(text, name="Qwen2.5"):
    tokenizer = copy.deepcopy(load(named(name)))
    tokenizer.chat_template = text
    return tokenizer


def shown(certificate, *, color=False, width=150, examples=True):
    console = Console(width=width, force_terminal=color, color_system="truecolor" if color else None, record=True)
    with console.capture() as capture:
        console.print(certificate_report(certificate, examples=examples))
    return capture.get()


# --- what it says of the families ----------------------------------------------------------------------------------


@every_kind
def test_a_certificate_says_what_is_known_of_a_family(family):
    found = certificate_of(family)
    assert (found.model, found.kind) == (family.name, family.expected_class)
    assert tuple(shape for shape, refusal in found.shapes.items() if not refusal) == family.shapes
    assert found.shapes.keys() == FOLLOW_UPS.keys()
    close = family.close if family in SUPPORTED else ""
    assert (found.close, found.needs_tools, found.parts) == (close, family.needs_tools, family.parts)
    assert len(found.reasons) == len(family.codes)
    assert found.exit_code == (family.expected_class == "unsupported")
    assert found.cold_ms > 0 < found.warm_ms


@every_supported
def test_every_shape_is_exact_after_a_stop_and_after_a_cut(family):
    found = certificate_of(family)
    assert [example.difference for example in found.examples if example.difference] == []
    assert found.is_exact
    assert all(example.ours == example.template for example in found.examples)
    cases = [("prompt", ""), *((shape, ending) for shape in family.shapes for ending in ("stop", "length"))]
    assert [(example.shape, example.ending) for example in found.examples if not example.context] == cases


@every_supported
def test_second_cycles_and_conversations_with_a_system_message_and_tools_are_tried_unless_the_codes_say_why(family):
    found = {(example.context, example.shape) for example in certificate_of(family).examples if example.context}
    calls = bool(certificate_of(family).calls) and "tool" in family.shapes
    assert (("second cycle", "tool") in found) == (calls and family.name not in ("DeepSeek-V3", "DeepSeek-R1"))
    system = not certificate_of(family).opening_system and "M" not in family.codes
    shapes = [shape for shape in ("user", "tool", "tool+user") if shape in family.shapes and system]
    assert {shape for context, shape in found if context == "system and tools"} == set(shapes)


def test_results_of_tools_of_any_name_are_tried():
    texts = [example.ours for example in certificate_of(named("gpt-oss")).examples if example.shape == "tool"]
    assert all("<|start|>functions.get_parity to=assistant" in text for text in texts)


def test_a_close_that_is_lost_after_a_system_message_is_not_exact():
    lost = "'' if messages[0].role == 'system' and m.role == 'tool' else '<|im_end|>\n'"
    assert CALLS.count("'<|im_end|>\n'") == 1
    found = certify(with_template(CALLS.replace("'<|im_end|>\n'", lost)))
    wrong = {(example.context, example.shape) for example in found.examples if not example.equal}
    assert wrong == {("system and tools", "tool"), ("system and tools", "tool+user")}
    assert found.exit_code == 1
    assert "tool stop (system and tools)" in shown(found)


def test_a_result_that_reads_otherwise_in_a_second_cycle_is_not_exact():
    once = "{{ 'again ' if messages | selectattr('role', 'equalto', 'tool') | list | length > 1 }}{{ m.content"
    found = certify(with_template(CALLS.replace("{{ m.content", once)))
    wrong = {(example.context, example.shape) for example in found.examples if not example.equal}
    assert ("second cycle", "tool") in wrong
    assert ("", "tool") not in wrong


def test_a_call_that_is_not_read_as_it_was_rendered_is_not_exact():
    assert certify(with_template(CALLS)).is_exact
    found = certify(with_template(CALLS.replace('{"name": "', '{"name": "my ')))
    assert found.exit_code == 1
    wrong = {example.difference for example in found.examples if not example.equal}
    assert all(text.startswith("its calls are read as [") for text in wrong)
    assert "its calls are read as [({'q': 'that is eighty four'}, 'my get_parity')]" in wrong


@every_supported
def test_examples_show_the_conversation_and_how_it_was_bridged(family):
    prompt, *rest = certificate_of(family).examples
    assert "Forty two" in prompt.ours
    assert (prompt.bridge, prompt.compared) == ("", "whole")
    for example in rest:
        closed = "c" not in family.codes and not ("S" in family.codes and example.shape == "system")
        assert example.bridge == ("exact" if example.ending == "stop" and closed else "truncated")
        assert ("that is eighty four" in example.ours) == (example.ending == "stop")
        assert "that is eigh" in example.ours
        assert example.ours.count("even") == len(FOLLOW_UPS[example.shape])
        assert example.num_synthesised == 0 or example.ending == "length"
        if family.close and example.shape in ("user", "2xuser"):
            assert (example.num_synthesised > 0) == (example.ending == "length")


@every_supported
def test_all_ids_are_compared_but_where_the_generation_prompt_is_taken_back(family):
    compared = {example.shape: example.compared for example in certificate_of(family).examples if not example.context}
    assert compared["user"] == ("from the close on" if "G" in family.codes else "whole")
    # Between a generation prompt that ends in a line and calls that begin with one, DeepSeek-Coder has one token.
    odd = {shape for shape in compared if compared[shape] != compared["user"] and shape != "prompt"}
    assert not odd or "G" in family.codes or family.name == "DeepSeek-Coder"


@every_kind
def test_no_family_lets_a_token_be_forged_and_text_markers_are_reported(family):
    injection = certificate_of(family).injection
    assert (injection.forged, injection.altered) == ((), ())
    assert bool(injection.text_markers) == ("t" in family.codes and family.name != "gpt2 (no roles)")
    warned = [text for text in certificate_of(family).warnings if "role markers" in text.lower()]
    assert bool(warned) == ("t" in family.codes)
    if family in SUPPORTED:
        assert injection.num_tried == len(load(family).added_tokens_decoder)
        assert injection.places == ("prompt", "user", *(["tool"] if "tool" in family.shapes else []))


@pytest.mark.parametrize("family", UNSUPPORTED, ids=lambda f: f.name)
def test_an_unsupported_template_is_reported_with_its_error_and_what_to_do(family):
    found = certificate_of(family)
    assert found.verdict == f"{family.name}: unsupported, {found.error}"
    assert found.error
    assert set(found.shapes.values()) == {found.error}
    assert (found.is_exact, found.exit_code, found.examples) == (False, 1, ())
    assert "chat_template.jinja" in found.advice


def test_the_templates_message_is_the_error():
    tokenizer = with_template("{{ raise_exception('only on Sundays') }}")
    found = certify(tokenizer, model="m")
    assert found.verdict == "m: unsupported, only on Sundays"


def test_a_refused_shape_has_the_templates_message():
    assert "must alternate user/assistant" in certificate_of(named("Llama-2")).shapes["2xuser"]
    assert certificate_of(named("ChatML")).shapes["tool"]


@pytest.mark.parametrize(
    ("name", "prompt", "opens"),
    [
        ("Qwen3", "<|im_start|>assistant\n", False),
        ("Qwen3.5-think", "<|im_start|>assistant\n<think>\n", True),
        ("Qwen3.5-nothink", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("Llama-2", "", False),
    ],
)
def test_the_generation_prompt_is_shown_and_whether_it_opens_a_think(name, prompt, opens):
    found = certificate_of(named(name))
    assert (found.generation_prompt, found.opens_think) == (prompt, opens)


def test_a_double_bos_is_reported():
    trap = "adds a second BOS"
    assert any(trap in text for text in certificate_of(named("Llama-3")).warnings)
    assert not any(trap in text for text in certificate_of(named("Qwen3")).warnings)
    missing = certificate_of(named("MiniCPM3"))
    assert (missing.renders_bos, missing.adds_bos) == (False, True)
    assert [text for text in missing.warnings if "BOS" in text] == [
        "The template has no BOS, though the tokenizer adds one to text: prompts begin without."
    ]


def test_a_close_that_the_engine_does_not_stop_at_is_reported():
    family = named("Falcon-H1")
    assert certificate_of(family).warnings[:1] != certify(load(family)).warnings[:1]
    assert (
        certify(load(family)).warnings[0].startswith("In history a turn ends with '<|im_end|>', and the engine stops")
    )


def test_a_template_that_refuses_results_without_a_call_still_gets_its_certificate():
    found = certify(load(named("gpt-oss")))  # without the stops that its generation config would name
    assert "tool" not in found.injection.places
    assert found.verdict.startswith("this tokenizer: needs-bridge")


def test_an_opening_system_message_is_its_own_row():
    assert certificate_of(named("Llama-2")).opening_system == ""
    assert certificate_of(named("Gemma")).opening_system
    assert "opening system" in shown(certificate_of(named("Gemma")))


def test_stops_and_role_markers_have_their_texts():
    found = certificate_of(named("GLM-4.5"))
    assert [text for _, text in found.role_markers] == ["<|user|>", "<|observation|>"]
    assert {"<|endoftext|>", "<|user|>", "<|observation|>"} == {text for _, text in found.stops}
    assert dict(found.stops).keys() == {*stop_ids(named("GLM-4.5")), load(named("GLM-4.5")).eos_token_id}


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
    assert found.close == "<|im_end|>"
    assert [example.difference for example in found.examples if not example.equal] == []
    assert {"tool", "tools", "tool+user"} <= {example.shape for example in found.examples}


def test_the_shipped_model_is_exact():
    path = resolve_model("tiny-math")
    found = certify(load_tokenizer(path), model="tiny-math", stop_token_ids=load_stop_token_ids(path))
    assert found.kind in ("prefix-stable", "needs-bridge")
    assert found.is_exact
    assert (found.exit_code, found.injection.forged) == (0, ())
    assert found.verdict.startswith(
        f"tiny-math: {found.kind}, exact on {len(found.examples)} of {len(found.examples)} "
    )


def test_any_tokenizer_with_the_few_methods_will_do():
    found = certify(CharTokenizer())
    assert (found.kind, found.is_exact, found.exit_code) == ("prefix-stable", True, 0)
    assert found.injection.num_tried == 2
    assert found.tokenizer["class"] == "CharTokenizer"


# --- without a template --------------------------------------------------------------------------------------------


def test_without_a_template_messages_are_plain_paragraphs():
    found = certify(with_template(None), model="plain")
    assert found.verdict == "plain: no template, plain paragraphs, 0 of 9 added tokens can be forged"
    assert (found.exit_code, found.is_exact, found.examples) == (0, False, ())
    assert set(found.shapes.values()) == {""}
    assert found.generation_prompt == "Assistant:"
    assert found.injection.places == ("prompt", "user", "tool")
    assert found.injection.text_markers == ("User:", "Assistant:")
    assert "chat_template.jinja" in found.advice
    assert "plain paragraphs" in shown(found)


# --- it can say no -------------------------------------------------------------------------------------------------


def differing(tokenizer):
    found = certify(tokenizer, stop_token_ids=[tokenizer.eos_token_id])
    return found, {(example.shape, example.ending) for example in found.examples if not example.equal}


def test_the_template_that_is_tampered_with_below_is_exact():
    found, wrong = differing(with_template(CHATML))
    assert (found.is_exact, wrong) == (True, set())


def test_a_role_marker_that_depends_on_the_length_of_the_history_is_not_exact():
    found, wrong = differing(with_template(TALLIED))
    assert {("user", "stop"), ("user", "length")} <= wrong
    assert ("prompt", "") not in wrong
    assert (found.is_exact, found.exit_code) == (False, 1)
    assert "Do not train" in found.advice
    assert "exact on" in found.verdict
    assert (
        f"exact on {sum(example.equal for example in found.examples)} of {len(found.examples)} examples"
        in found.verdict
    )
    user = next(example for example in found.examples if example.shape == "user")
    assert user.ours != user.template
    assert user.difference.startswith("id ")


def test_a_rendering_that_depends_on_the_first_message_is_not_exact():
    counted = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ messages[0].content|length if m.role == 'user' }}")
    _, wrong = differing(with_template(counted))
    assert ("user", "stop") in wrong


def test_a_template_that_never_says_the_same_twice_is_not_exact():
    found, wrong = differing(with_template("{{ strftime_now('%f') }}" + CHATML))
    assert ("prompt", "") in wrong
    assert found.exit_code == 1


def test_a_tokenizer_that_renders_by_turns_one_way_and_another_is_not_exact():
    class Alternating(CharTokenizer):
        calls = 0

        def apply_chat_template(self, conversation, **kwargs):
            """ChatML, with a space after the close every other time."""
            type(self).calls += 1
            text = super().apply_chat_template(conversation, **kwargs)
            return text.replace("<|im_end|>\n", "<|im_end|> \n") if self.calls % 2 else text

    found = certify(Alternating())
    assert (found.is_exact, found.exit_code) == (False, 1)


def test_a_conversation_that_the_template_refuses_after_all_is_a_difference_in_its_words():
    late = "{% if messages|length > 4 %}{{ raise_exception('too long a talk') }}{% endif %}" + CHATML
    found, wrong = differing(with_template(late))
    assert ("2xuser", "stop") in wrong
    assert found.exit_code == 1
    assert any("expected a template that renders" in example.difference for example in found.examples)


def unmarked(name="Qwen2.5"):
    """A template that takes out of a message what keeps its text from being a token."""
    return with_template(CHATML.replace("{{ m.content }}", "{{ m.content|replace('\ue001', '') }}"), name)


def test_tokens_that_can_be_forged_are_named():
    found = certify(unmarked(), stop_token_ids=[unmarked().eos_token_id])
    assert set(found.injection.forged) == {token.text for token in named("Qwen2.5").added_tokens}
    assert found.exit_code == 1
    assert found.is_exact
    assert "9 of 9 added tokens can be forged" in found.verdict
    assert "untrusted" in found.advice


@pytest.mark.long
def test_a_token_that_can_be_forged_is_found_among_thousands():
    tokenizer = with_template(CHATML.replace("{{ m.content }}", "{{ m.content|replace('<\ue001r7>', '<r7>') }}"))
    tokenizer.add_tokens([f"<r{i}>" for i in range(1100)])
    found = certify(tokenizer, stop_token_ids=[tokenizer.eos_token_id])
    assert found.injection.num_tried == 1109
    assert found.injection.forged == ("<r7>",)


def test_a_template_that_changes_messages_is_reported_and_does_no_harm():
    found = certify(with_template(CHATML.replace("{{ m.content }}", "{{ m.content|replace('tool', 'TOOL') }}")))
    assert "<tool_call>" in found.injection.altered
    assert (found.injection.forged, found.exit_code) == ((), 0)
    assert any("<tool_call>" in text for text in found.warnings)


# --- what it is a certificate of -----------------------------------------------------------------------------------


def test_another_template_or_tokenizer_has_another_hash():
    tokenizer = with_template(CHATML)
    first = certify(tokenizer)
    assert first.tokenizer == certify(with_template(CHATML)).tokenizer
    assert first.template_sha256 != certify(with_template(CHATML + " ")).template_sha256
    tokenizer.add_tokens(["<new>"])
    grown = certify(tokenizer)
    assert grown.template_sha256 == first.template_sha256
    assert grown.tokenizer["num_added_tokens"] == first.tokenizer["num_added_tokens"] + 1
    assert grown.tokenizer["sha256"] != first.tokenizer["sha256"]


def test_another_normalizer_has_another_hash():
    tokenizer = with_template(CHATML)
    before = certify(tokenizer).tokenizer["sha256"]
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert certify(tokenizer).tokenizer["sha256"] != before


def test_an_added_token_that_absorbs_the_space_next_to_it_has_another_hash():
    tokenizer = with_template(CHATML)
    tokenizer.add_tokens(["<new>"])
    other = with_template(CHATML)
    other.add_tokens([AddedToken("<new>", lstrip=True)])
    assert certify(tokenizer).tokenizer["sha256"] != certify(other).tokenizer["sha256"]


@pytest.mark.parametrize("name", ["Qwen3", "Llama-2", "Phi-3", "gpt-oss", "single turn"])
def test_a_certificate_is_written_as_json_that_reads_the_same(name, tmp_path):
    found, path = certificate_of(named(name)), tmp_path / "c.json"
    write_certificate(found, path)
    values = json.loads(path.read_bytes().decode("ascii"))
    assert values == found.to_dict()
    assert [example["ours"] for example in values["examples"]] == [example.ours for example in found.examples]
    assert (values["is_exact"], values["exit_code"]) == (found.is_exact, found.exit_code)
    assert values["injection"]["num_tried"] == found.injection.num_tried
    assert values["versions"].keys() >= {"agentenv", "transformers", "tokenizers"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.json"]


def test_an_existing_file_stays_when_a_certificate_cannot_be_written(tmp_path):
    (tmp_path / "c.json").mkdir()
    (tmp_path / "c.json" / "kept").touch()
    with pytest.raises(ConfigError, match="expected a file that can be written"):
        write_certificate(certificate_of(named("Qwen3")), tmp_path / "c.json")
    with pytest.raises(ConfigError, match="nowhere"):
        write_certificate(certificate_of(named("Qwen3")), tmp_path / "nowhere" / "c.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.json"]
    assert (tmp_path / "c.json" / "kept").exists()


# --- the screen ----------------------------------------------------------------------------------------------------


@every_kind
def test_a_report_begins_with_the_verdict(family):
    found = certificate_of(family)
    text = shown(found, width=1000)
    assert text.splitlines()[0].strip() == found.verdict
    assert text.count("\n│ equal ") == len(found.examples)
    brief = shown(found, width=1000, examples=False)
    assert brief.count("\n│ equal ") == bool(found.examples)
    assert (f"{found.examples[-1].shape} length" in brief) == (len(found.examples) > 2) if found.examples else True


def test_a_report_shows_tokens_and_what_differs():
    tokenizer = with_template(TALLIED)
    text = shown(certify(tokenizer, stop_token_ids=[tokenizer.eos_token_id]), color=True)
    assert "\x1b[36m<|im_start|>" in text
    assert "\x1b[37;41m" in text
    assert "\x1b[37;41m" not in shown(certificate_of(named("Qwen3")), color=True)


def test_a_template_cannot_act_on_the_terminal():
    certificate = certificate_of(named("Qwen3"))
    bad = "\x1b[2J\x1b]0;x\x07[red]"
    example = replace(certificate.examples[0], ours=bad, template=bad, difference=bad)
    hostile = replace(certificate, error=bad, model=bad, shapes={"user": bad}, examples=(example,), close=bad)
    text = shown(hostile)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]" in text


# --- what it does not touch ----------------------------------------------------------------------------------------


def test_a_certificate_leaves_the_tokenizer_as_it_was():
    tokenizer = with_template(CHATML)
    before = (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, len(tokenizer))
    certify(tokenizer)
    assert (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, len(tokenizer)) == before
    assert Chat(tokenizer).template.kind == "prefix-stable"
