"""Published chat templates: are the tokens after an action those of the whole conversation, and is every call read?

    python benchmarks/chat_templates.py FOLDER... [--processes 2] [--timeout 120]

Walks folders (checkouts of public projects, or files) for chat templates: *.jinja, strings in *.json, and literals in
sources. Doubles and those of `tests/chat/templates` are left out. Every template gets two tokenizers of the tests, one
as GPT-2's and one with SentencePiece's dummy space; its added tokens are guessed from its text and its renderings. The
scenarios are played through `Dialogue`, with the template's own rendering of the whole as the policy and as the truth:

exact         the ids after every action are those of the rendering of the whole, and every call is read as it was given
refused       agentenv refuses with a reason what the template renders
not rendered  the template refuses the conversation, or drops part of it, and agentenv refuses too or is not comparable
declared      code M: the template moves system messages to the newest user turn, which appending cannot do
fault         the template itself is at fault, for the reason in `FAULTS`
WRONG, SILENT, CRASH: other ids or another call; a rendered call neither read nor refused; another error, or a timeout

The templates of benchmarks/RESULTS.md are from public repositories on GitHub, at their newest commit of August 2026 or
before: huggingface.js, transformers.js, TRL, hf-chat-template, chat_templates, OpenVINO GenAI and its model server,
llama.cpp and its forks, vLLM's forks, xinference, unsloth, axolotl, open-instruct, mistral.rs, gpt4all, NeMo-RL, kaito,
llama-cpp-python, swift-jinja, text-generation-inference, onnxruntime-genai, minja, verl, slime and others of fewer.
None is copied into this repository.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import multiprocessing
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from agentenv.chat.chat import Chat
from agentenv.chat.dialogue import Dialogue
from agentenv.chat.template import CALL_FORMS
from agentenv.errors import AgentEnvError

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.chat.templates.family import TEMPLATES, Added, Family, load  # after the path is set

Row = tuple[str, str, str, str]
"""A base tokenizer, a scenario, a verdict of the docstring above, and its details."""
VERDICTS = ("exact", "refused", "not rendered", "declared", "fault", "WRONG", "SILENT", "CRASH")
BAD = VERDICTS[-3:]
NAMED = (".jinja", ".jinja2", ".json")
IS_CHAT = re.compile(r"\{%-?\s*for\b[^%]*messages")
BASES = ("byte_gpt2", "spm_legacy")
TOKENS = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|<\|[\w\"]{1,40}>|<[\w\"]{1,40}\|>|\[\|\w+\|\]|</?seed:\w+>|</?think>"
    r"|<(?:start|end)_of_\w+>|</?(?:longcat_)?(?:tool|arg)_\w+>|<SPECIAL_\d+>|</?longcat_\w+>"
    r"|<(?:bos|eos|sep|sop|step)>|<[A-Z]+_TOKEN>|\]~b\]|\]~!b\[|\[e~\[|\[gMASK\]"
    r"|\[/?(?:TOOL_\w+|AVAILABLE_TOOLS|SYSTEM_PROMPT|CALL_ID|ARGS|THINK)\]"
)
STOPS = frozenset(
    """
    </s> <|im_end|> <|eot_id|> <|eom_id|> <|eot|> <|eom|> <|call|> <|return|> <|end|> <end_of_turn> <turn|>
    [e~[ <eos> <sep> <|END_OF_TURN_TOKEN|> <|endoftext|> <|end_of_text|> <｜end▁of▁sentence｜> <|observation|>
    <|stop|> <|endofturn|> <end_of_utterance> [|endofturn|] <step> <seed:eos> <|assistant_end|>
    <|tools_suffix|> <|tool_response> <|EOT|> <|end_of_turn|> <|message_sep|> <|role_end|> <|end_of_msg|>
    [EOS] <|hy_eos|> <|calls|> <|eos|> <|content_model_end_sampling|> </longcat_s> <SPECIAL_12>
    """.split()  # noqa: SIM905
)
PROPERTIES = {
    **{name: {"type": "string", "description": name} for name in ("city", "zone", "text")},
    "days": {"type": "integer", "description": "days"},
    "scale": {"type": "number", "description": "scale"},
    "hourly": {"type": "boolean", "description": "hourly"},
    "options": {"type": "object", "description": "options"},
    "parts": {"type": "array", "description": "parts", "items": {"type": "object"}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Call {name}.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": []},
        },
    }
    for name in ("get_weather", "get_time")
]
ROME, TIME = ("get_weather", {"city": "Rome"}), ("get_time", {"zone": "CET"})
NESTED = {"city": "Rome", "options": {"hours": [6, 12], "units": {"wind": "kn"}}, "parts": [{"id": 1}, {"id": None}]}


class Scenario(NamedTuple):
    """Answers, which are text or calls, each followed by its results or a question."""

    answers: tuple[Any, ...]
    system: bool = False
    nameless: bool = False
    cut: bool = False
    """The last action is cut off within its text or its call."""


SCENARIOS = {
    "turns": Scenario(("that is forty two", "that is eighty four")),
    "turns, truncated": Scenario(("that is forty two", "that is eighty four"), cut=True),
    "system and turns": Scenario(("that is forty two", "that is eighty four"), system=True),
    "string argument": Scenario(([ROME],)),
    "number arguments": Scenario(([("get_weather", {"city": "Rome", "days": 3, "hourly": True, "scale": 2.5})],)),
    "nested arguments": Scenario(([("get_weather", NESTED)],)),
    "no arguments": Scenario(([("get_weather", {})],)),
    "unicode argument": Scenario(([("get_weather", {"text": '日本 é 😀\n"so" it\'s 5 > 3'})],)),
    "several calls": Scenario(([ROME, TIME],)),
    "two cycles": Scenario(([ROME], [TIME])),
    "result without name": Scenario(([ROME],), nameless=True),
    "call, truncated": Scenario(([ROME],), cut=True),
}
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "is_output_first is never set back: the results of a second cycle lack their opening and have its close": (
        "is_output_first",
        ("two cycles",),
    ),
    "the spaces between its tags are text, and nothing closes a call: where one ends is not determined": (
        "{% if messages %} {% if system or tools %} {% if system %} {{ system }}",
        tuple(SCENARIOS)[3:],
    ),
}
"""By reason: the text that a template with this fault has, and the scenarios that it spoils."""


class NotRendered(Exception):
    """The template refuses a conversation or drops part of it."""


class Judged(Exception):
    """A verdict and its details."""


class Play:
    """One tokenizer, on which scenarios are played."""

    def __init__(self, tokenizer: Any, stops: list[int]) -> None:
        self.tokenizer, self.stops = tokenizer, {*stops}
        needs_tools = Chat(tokenizer, stop_token_ids=stops).template.needs_tools
        self.chat = Chat(tokenizer, stop_token_ids=stops, tools=TOOLS if needs_tools else None)
        self.offered: Any = None

    def render(self, messages: list[Any], *, gen: bool = True) -> str:
        """Return the template's own rendering."""
        if self.chat.template.parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in messages]
        options = {"tokenize": False, "add_generation_prompt": gen, "tools": self.offered}
        try:
            return str(self.tokenizer.apply_chat_template(messages, **options))
        except Exception as error:
            raise NotRendered(f"{type(error).__name__}: {error}") from error

    def play(self, scenario: Scenario) -> tuple[str, str]:
        """Return the verdict on a scenario, and its details."""
        template = self.chat.template
        offers = template.needs_tools or (template.renders_tools and not isinstance(scenario.answers[0], str))
        self.offered = TOOLS if offers else None
        messages = [{"role": "system", "content": "Be qzbriefqz."}] * scenario.system
        messages = [*messages, {"role": "user", "content": "What is qzfirstqz?"}]
        try:
            prompt = self.render(messages)
            if any(message["content"] not in prompt for message in messages):
                raise NotRendered("it drops a message of the prompt")
            dialogue = Dialogue(self.chat, 1 << 20)
            dialogue.begin(messages, self.offered)
            if dialogue.ids != self.chat.encode(prompt):
                return "WRONG", f"the prompt: {dialogue.text!r}"
            for turn, answer in enumerate(scenario.answers):
                messages = self.step(dialogue, messages, answer, turn, scenario)
        except NotRendered as error:
            return "not rendered", str(error)
        except AgentEnvError as error:
            return "refused", str(error)
        except Judged as verdict:
            declared = verdict.args[0] == "WRONG" and scenario.system and self.moves_system(messages)
            return ("declared" if declared else verdict.args[0]), verdict.args[1]
        return "exact", ""

    def moves_system(self, messages: list[Any]) -> bool:
        """Return True if the template writes the system message after the first user message of a longer talk."""
        try:
            whole = self.render([*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}])
        except NotRendered:
            return False
        return whole.find("qzbriefqz") > whole.find("qzfirstqz")

    def step(self, dialogue: Dialogue, messages: list[Any], answer: Any, turn: int, scenario: Scenario) -> list[Any]:
        """Act, read the calls and reply; return the longer conversation. Raise Judged if anything is not as known."""
        calls = [] if isinstance(answer, str) else answer
        cut = scenario.cut and turn + 1 == len(scenario.answers)
        new = [
            {"role": "tool", "tool_call_id": f"callid{turn}0{i}", "name": name, "content": f"qzresult{turn}{i}qz"}
            for i, (name, _) in enumerate(calls)
        ] or [{"role": "user", "content": f"And qznext{turn}qz?"}]
        for message in self.forms(answer, new) if calls else [{"role": "assistant", "content": answer}]:
            try:
                said, action, tail = self.known(dialogue.ids, messages, message, answer, new, cut and not calls)
                break
            except NotRendered as error:
                refusal = error
        else:
            with suppress(AgentEnvError):
                shown = self.chat.decode(self.chat.bridge([], new, history=messages).ids)
                if any(m["content"] not in shown for m in new):
                    raise Judged("SILENT", f"{new} answered with {shown!r}")
            raise refusal
        if cut and calls:
            said = said[: said.find("Rome") + 2]
            action = self.chat._encoder.follow(said)
        dialogue.append_action(action)
        text = self.chat.action_text(action)
        parsed = dialogue.parse_calls(text, turn)
        if cut and calls and parsed.malformed and not parsed.calls:
            return messages
        if parsed.malformed:
            raise Judged("refused", f"{parsed.malformed[0].problem}, in {text!r}")
        read = [(call.name, dict(call.arguments)) for call in parsed.calls]
        if read != calls or (cut and calls):
            raise Judged("WRONG" if read else "SILENT", f"{calls} read as {read} in {text!r}")
        for call, known, result in itertools.zip_longest(parsed.calls, message.get("tool_calls", ()), new):
            if call and call.call_id != result["tool_call_id"]:  # a template that writes no ids, or Kimi's
                result["tool_call_id"] = call.call_id
                if known:
                    known["id"] = call.call_id
        _, _, tail = self.known(dialogue.ids, messages, message, answer, new, cut)
        sent = [{k: v for k, v in m.items() if k != "name" or not scenario.nameless} for m in new]
        reply = dialogue.reply_to(action, text, sent)
        if reply is None or reply.ids != tail:
            ours = None if reply is None else self.chat.decode(reply.ids)
            raise Judged("WRONG", f"after {text[-200:]!r}: {ours!r}, known {self.chat.decode(tail)!r}")
        dialogue.append_reply(reply)
        return [*messages, message, *new]

    def forms(self, calls: list[Any], new: list[Any]) -> Iterator[dict[str, Any]]:
        """Yield an assistant's message with calls, in the forms that templates take; then in Hermes' form as text."""
        syntax = self.chat.tool_format
        for as_json, content in sorted(CALL_FORMS, key=lambda form: form[0] != syntax.arguments_as_json):
            items = []
            for i, (name, arguments) in enumerate(calls):
                given = json.dumps(arguments, ensure_ascii=False) if as_json else arguments
                call_id = f"functions.{name}:{i}" if syntax.id_is_name else new[i]["tool_call_id"]
                items.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": given}})
            yield {"role": "assistant", "content": content, "tool_calls": items}
        texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        yield {"role": "assistant", "content": "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)}

    def known(
        self, ids: list[int], messages: list[Any], message: Any, answer: Any, new: list[Any], cut: bool
    ) -> tuple[str, list[int], list[int]]:
        """Return the action as text and as ids, and the ids after it, by the rendering of the whole."""
        prompt, text, alone = self.render(messages), self.render([*messages, message, *new]), ""
        first = said_at = self.after(text, [messages[-1]["content"]], 0)
        is_text = "tool_calls" not in message
        words = [message["content"]] if is_text else [x for name, a in answer for x in (name, *a)]
        with suppress(NotRendered):  # the name of a call without arguments may stand in its result alone
            alone = self.render([*messages, message], gen=False)
        self.after(alone or text, [messages[-1]["content"], *words], 0)
        end = self.after(text, words, first)
        limit = self.after(text, [m["content"] for m in new[:1]], end)
        self.after(text, [m["content"] for m in new[1:]], limit)
        header = prompt[self.after(prompt, [messages[-1]["content"]], 0) :]
        shared = common(header, text[first:])  # without half a tag of a generation prompt that history drops
        said_at += len(shared if shared == header else re.sub(r"[<\[][^<>\[\]]*$", "", shared))
        encoded = self.tokenizer._tokenizer.encode(text, add_special_tokens=False)
        spans = list(zip(encoded.ids, encoded.offsets, strict=True))
        stops = (i for i, (t, (a, b)) in enumerate(spans) if a >= end and b <= limit and t in self.stops)
        stop = None if cut else next(stops, None)
        if stop is None and not is_text:
            end = max(end, len(common(text, alone)))
        last = end if stop is None else spans[stop][1][1]
        rest = next(i for i, (_, (a, b)) in enumerate(spans) if a >= end and b > a) if stop is None else stop + 1
        said, close = text[said_at:last], self.chat.tool_format.reasoning_close
        said = said if not close or said.lstrip().startswith(close) else close + said
        is_whole = encoded.ids[: len(ids)] == ids
        action = encoded.ids[len(ids) : rest] if is_whole else self.chat._encoder.follow(said)
        if stop is None and not is_text:
            action = [*action, self.tokenizer.eos_token_id]
        return said, action[:-2] if cut else action, encoded.ids[rest:]

    def after(self, text: str, words: list[str], at: int) -> int:
        """Return where the last of these words ends, in this order after `at`. Raise NotRendered if one is missing."""
        for word in words:
            found = text.find(word, at)
            if found < 0:
                raise NotRendered(f"it drops {word!r}")
            at = found + len(word)
        return at


def common(one: str, other: str) -> str:
    """Return what two texts begin with."""
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def plays(path: Path) -> list[Row]:
    """Return the verdicts on one template."""
    rows, source = [], path.read_text(encoding="utf-8")
    for base in BASES:
        # A literal ▁ is a space to SentencePiece: templates with it (DeepSeek's) are of byte-level models.
        text = source.replace("▁", "_") if base == "spm_legacy" else source
        path.write_text(text, encoding="utf-8")
        tokens = {*TOKENS.findall(text), "<s>", "</s>"}
        for _ in range(2):  # the second time with those that only renderings have
            added = tuple(Added(t, special=not re.match(r"</?(?:think|tool|arg|seed:t)", t)) for t in sorted(tokens))
            options = {"eos_token": "</s>", "bos_token": "<s>", "added_tokens": added}
            tokenizer = load(Family(name=f"{base} {path.name}", template=path, tokenizer=base, **options))
            play, after = Play(tokenizer, []), ""
            talk = [{"role": role, "content": f"qz{role}qz"} for role in ("user", "assistant", "user")]
            for play.offered in (None, TOOLS):
                with suppress(NotRendered):
                    shown = play.render(talk)
                    tokens |= {*TOKENS.findall(shown)}
                    after = after or shown.partition("qzassistantqz")[2]
        stops = {*TOKENS.findall(after)[:1], *(STOPS & tokens)}
        play = Play(tokenizer, tokenizer.convert_tokens_to_ids(sorted(stops)))
        for name, scenario in SCENARIOS.items():
            try:
                verdict, details = play.play(scenario)
            except Exception as error:  # noqa: BLE001  (a verdict)
                verdict, details = "CRASH", "".join(traceback.format_exception(error)[-3:])
            faults = [reason for reason, (part, of) in FAULTS.items() if part in text and name in of]
            rows.append((base, name, *(("fault", faults[0]) if faults and verdict in BAD else (verdict, details))))
    return rows


def work(pipe: Any) -> None:
    """Judge the templates whose paths come through a pipe."""
    with suppress(EOFError):
        while True:
            pipe.send(plays(pipe.recv()))


def judged(paths: list[Path], timeout: float) -> dict[Path, list[Row]]:
    """Return the verdicts on templates, from a process that is replaced if a template hangs or ends it."""
    context, found, process = multiprocessing.get_context("spawn"), {}, None
    for path in paths:
        if process is None:
            pipe, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
        pipe.send(path)
        lost = f"none within {timeout} s"
        try:
            rows = pipe.recv() if pipe.poll(timeout) else None
        except EOFError:
            rows, lost = None, "the process died"
        if rows is None:
            rows = [(base, name, "CRASH", lost) for base in BASES for name in SCENARIOS]
            process.kill()
            process = None
        found[path] = rows
    return found


def literals(path: Path) -> Iterator[str]:
    """Yield the texts of a file that may be templates."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix in (".jinja", ".jinja2", ".j2"):
        yield text
    elif path.suffix == ".json":
        values = [json.loads(text)]
        while values:
            value = values.pop()
            values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            if isinstance(value, str):
                yield value
    elif path.suffix == ".py":
        nodes = ast.walk(ast.parse(text))
        yield from (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    elif path.suffix != ".md":
        yield from (m[1] for m in re.finditer(r"`([^`]*)`|r#+\"(.*?)\"#+|\"\"\"(.*?)\"\"\"", text, re.DOTALL) if m[1])
        for found in re.finditer(r"\"(?:[^\"\\\n]|\\.)*\"", text):
            with suppress(ValueError):
                yield json.loads(found[0])


def main() -> None:
    """Find, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--verbose", action="store_true", help="print refusals and the like too")
    args = parser.parse_args()
    ours = {path.read_text(encoding="utf-8").strip() for path in TEMPLATES.glob("*.jinja")}
    texts: dict[str, Path] = {}
    for path in sorted(p for folder in args.folders for p in ([folder] if folder.is_file() else folder.rglob("*"))):
        with suppress(ValueError, SyntaxError, OSError, RecursionError):
            for text in literals(path) if path.is_file() else ():
                if (
                    len(text) >= (0 if path.suffix in NAMED else 250)
                    and "{{" in text
                    and IS_CHAT.search(text)
                    and text.strip() not in ours
                ):
                    texts.setdefault(text.strip(), path)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.processes) as pool:
        files = {Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.jinja": text for text in texts}
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        parts = [list(files)[i :: args.processes] for i in range(args.processes)]
        found = {
            path: rows for part in pool.map(lambda p: judged(p, args.timeout), parts) for path, rows in part.items()
        }
    print(f"{len(files)} templates")
    counts = Counter((base, name, verdict) for rows in found.values() for base, name, verdict, _ in rows)
    print("| base, scenario | " + " | ".join(VERDICTS) + " |\n|---|" + "---:|" * len(VERDICTS))
    for base, name in itertools.product(BASES, [*SCENARIOS, ""]):
        names = [name] if name else list(SCENARIOS)
        of = [sum(counts[base, each, verdict] for each in names) for verdict in VERDICTS]
        print(f"| {base}, {name or 'all'} | " + " | ".join(map(str, of)) + " |")
    for path, rows in found.items():
        for base, name, verdict, details in rows:
            if verdict in BAD or (args.verbose and verdict != "exact"):
                print(f"{verdict} {path.stem} {texts[files[path]]}: {base}, {name}: {details}")
    raise SystemExit(any(verdict in BAD for rows in found.values() for _, _, verdict, _ in rows))


if __name__ == "__main__":
    main()
