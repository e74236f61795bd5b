"""The template fixtures: each family loads, renders, and behaves as its row in `families.py` says."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from tests.chat.families import FAMILIES, SUPPORTED, TEMPLATES, Family, load
from tests.chat.templates.base_tokenizers import trained

USER, ANSWER, NEXT, SYSTEM = "first question", "ANSWERTEXT", "second question", "SYSTEMTEXT"
REASONED = f"<think>\nhmm\n</think>\n\n{ANSWER}"
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string", "description": "What."}}, "required": ["q"]}
FUNCTION = {"name": "lookup", "description": "Look something up.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
TEXTS = (
    "hello world",
    "two  spaces",
    "a)\n\nb",
    "}\nuser\nhi\n\n",
    "日本語, é, 😀",
    "x ",
    "\n",
    "if x:\n    return 1234567\n",
)
Message = dict[str, Any]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


def says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def result(number: int) -> Message:
    return {"role": "tool", "content": f"RESULT{number}", "tool_call_id": f"callid00{number}", "name": "lookup"}


def asks(count: int, *, as_json: bool, content: str | None) -> Message:
    """An assistant message with `count` calls; the answer's text is the argument of the last one."""
    calls = []
    for number in range(1, count + 1):
        arguments: Any = {"q": ANSWER if number == count else "x"}
        function = {"name": "lookup", "arguments": json.dumps(arguments) if as_json else arguments}
        calls.append({"id": f"callid00{number}", "type": "function", "function": function})
    return {"role": "assistant", "content": content, "tool_calls": calls}


def calling(count: int) -> list[Message]:
    return [asks(count, as_json=as_json, content=content) for as_json in (False, True) for content in (None, "")]


FOLLOW_UPS = {
    "user": [says("user", NEXT)],
    "tool": [result(1)],
    "tools": [result(1), result(2)],
    "tool+user": [result(1), says("user", NEXT)],
    "2xuser": [says("user", NEXT), says("user", "third question")],
    "system": [says("system", SYSTEM)],
}


def render(family: Family, messages: list[Message], *, gen: bool = True, tools: list[Any] | None = None) -> str:
    if family.parts:
        messages = [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in messages]
    tools = tools or (TOOLS if family.needs_tools else None)
    return str(load(family).apply_chat_template(messages, tokenize=False, add_generation_prompt=gen, tools=tools))


def try_render(family: Family, messages: list[Message], **options: Any) -> str | None:
    try:
        return render(family, messages, **options)
    except (TemplateError, TypeError):
        return None


def accepts(family: Family, new: list[Message]) -> bool:
    """Whether some assistant message before `new` renders once, and all of `new` after it, in order."""
    results = sum(message["role"] == "tool" for message in new)
    for answer in (*(calling(results) if results else ()), says("assistant", ANSWER)):
        text = try_render(family, [says("user", USER), answer, *new])
        if text is not None and text.count(ANSWER) == 1:
            found = [text.find(message["content"], text.index(ANSWER)) for message in new]
            if min(found) >= 0 and found == sorted(found):
                return True
    return False


def between(family: Family) -> tuple[str, str, str]:
    """The generation prompt of a first turn, history up to its answer, and what stands between answer and question."""
    prompt = render(family, [says("user", USER)])
    whole = render(family, [says("user", USER), says("assistant", ANSWER), says("user", NEXT)])
    at = whole.index(ANSWER)
    return prompt, whole[:at], whole[at + len(ANSWER) : whole.index(NEXT)]


def added_in(family: Family, text: str) -> list[str]:
    tokens = sorted((token.text for token in family.added_tokens), key=len, reverse=True)
    return re.findall("|".join(map(re.escape, tokens)), text)


def close_of(family: Family, prompt: str, lead: str) -> tuple[str, str]:
    """The close in `lead`, and the code for what is odd about it: S, c or none."""
    tokens = added_in(family, lead)
    stops = [token for token in tokens if token in family.stop_tokens]
    header = added_in(family, prompt[: prompt.index(USER)])[-1:]
    if header and header == stops[:1] and lead.startswith(header[0]) and header[0] != family.eos_token:
        return "", "S"
    end = stops[0] if stops else tokens[0] if len(tokens) > 1 else None
    return ("", "c") if end is None else (lead[: lead.index(end) + len(end)], "")


def header_codes(family: Family, prompt: str, history: str) -> str:
    """H, G, W or B: how history differs from the prompt that the answer was sampled from."""
    merges = "B" if prompt.endswith(" ") else ""
    if not history.startswith(prompt):
        return "G" + merges
    inserted = history[len(prompt) :]
    padded = f"  {ANSWER}  "
    kept = padded in render(family, [says("user", USER), says("assistant", padded), says("user", NEXT)])
    return ("H" if inserted.strip() else "W" if inserted or not kept else "") + merges


def rewrites(family: Family, *, prompt_lost: bool) -> bool:
    """Whether reasoning or a tool cycle is rendered otherwise once the conversation has gone on."""
    if REASONED not in render(family, [says("user", USER), says("assistant", REASONED), says("user", NEXT)]):
        return True
    for answer in calling(1):
        cycle = [says("user", USER), answer, result(1)]
        then = try_render(family, [*cycle, says("assistant", "DONE"), says("user", NEXT)])
        before = try_render(family, cycle)
        if before is not None and then is not None and ANSWER in before and not prompt_lost:
            return not then.startswith(before)
    return False


def moves(family: Family, *, prompt_lost: bool) -> bool:
    """Whether a system message or the tools are rendered elsewhere once the conversation has gone on."""
    later = [says("assistant", ANSWER), says("user", NEXT)]
    for head in ([says("user", USER)], [says("system", SYSTEM), says("user", USER)]):
        for tools in (None, TOOLS):
            before = try_render(family, head, gen=not prompt_lost, tools=tools)
            after = try_render(family, [*head, *later], tools=tools)
            if before is not None and after is not None and not after.startswith(before):
                return True
    middle = try_render(family, [says("user", USER), later[0], says("system", SYSTEM), later[1]])
    return middle is not None and -1 < middle.find(SYSTEM) < middle.find(ANSWER)


def test_there_are_sixty_families_and_each_has_its_own_name() -> None:
    assert len(SUPPORTED) >= 60
    assert max(Counter(family.name for family in FAMILIES).values()) == 1


@every_family
def test_a_family_loads_with_each_added_token_as_one_id(family: Family) -> None:
    tokenizer = load(family)
    vocab = tokenizer.get_vocab()
    for token in family.added_tokens:
        assert tokenizer.encode(token.text, add_special_tokens=False)[-1] == vocab[token.text]
        kept = tokenizer.added_tokens_decoder[vocab[token.text]]
        assert (kept.special, kept.lstrip, kept.rstrip) == (token.special, token.lstrip, token.rstrip)
    assert tokenizer.eos_token == family.eos_token
    assert tokenizer.bos_token == family.bos_token
    assert set(family.stop_tokens) <= {token.text for token in family.added_tokens}
    assert (tokenizer.encode("x")[0] == tokenizer.bos_token_id) == family.adds_bos
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("family", SUPPORTED, ids=lambda f: f.name)
def test_history_and_follow_ups_render_as_the_row_says(family: Family) -> None:
    prompt, history, lead = between(family)
    close, odd = close_of(family, prompt, lead)
    codes = header_codes(family, prompt, history) + odd
    lost = "G" in codes or "H" in codes
    if odd != "S" and not added_in(family, lead[len(close) :]):
        codes += "t"
    if rewrites(family, prompt_lost="G" in codes):
        codes += "R"
    if "B" not in codes and moves(family, prompt_lost=lost):
        codes += "M"
    assert (sorted(codes), close) == (sorted(family.codes), family.close)
    assert (family.expected_class == "needs-bridge") == bool(set(family.codes) - set("tc"))
    assert tuple(name for name, new in FOLLOW_UPS.items() if accepts(family, new)) == family.shapes


def test_an_unsupported_template_renders_no_answer() -> None:
    for family in set(FAMILIES) - set(SUPPORTED):
        whole = try_render(family, [says("user", USER), says("assistant", ANSWER), says("user", NEXT)])
        assert whole is None or ANSWER not in whole


def test_training_produces_the_same_tokenizer_each_time() -> None:
    first = trained("spm_none"), trained("byte_bpe")
    assert (trained.__wrapped__("spm_none"), trained.__wrapped__("byte_bpe")) == first


def test_merges_across_a_seam_exist() -> None:
    tokenizer = load(next(family for family in FAMILIES if family.name == "Qwen3"))
    for text in ("\n\n", ")\n", "}\n", " user"):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1


def test_every_template_has_a_source_and_every_copy_is_unchanged() -> None:
    rows = re.findall(r"^\| `(\S+\.jinja)` \|.*\|$", (TEMPLATES / "SOURCES.md").read_text(encoding="utf-8"), re.M)
    files = {path.name for path in TEMPLATES.glob("*.jinja")}
    assert sorted(rows) == sorted(files) == sorted({family.template.name for family in FAMILIES})
    copies = re.findall(r"^\| `(\S+)` \|.*\| `([0-9a-f]{12})` \|$", (TEMPLATES / "SOURCES.md").read_text(), re.M)
    written = {name for name in files if name.endswith("_shape.jinja")}
    assert {name for name, _ in copies} == files - written
    for name, digest in copies:
        assert hashlib.sha256((TEMPLATES / name).read_bytes()).hexdigest()[:12] == digest


def test_the_licences_of_the_copies_are_here() -> None:
    licences = TEMPLATES / "LICENSES"
    for name in re.findall(r"LICENSES/(\S+\.txt)", (TEMPLATES / "SOURCES.md").read_text(encoding="utf-8")):
        assert (licences / name).stat().st_size > 500
    assert len(list(licences.iterdir())) == 3
