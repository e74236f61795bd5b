"""Evidence of what a model's chat template does: `certify` tests it, `certificate_report` displays the result.

An example is exact if the ids that `Chat` puts after an action equal those of the whole conversation as rendered by the
tokenizer's own `apply_chat_template`. A token is forged if a message that contains its text has one more added token
than a message without it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentenv._util.jsonable import jsonable
from agentenv._util.version import __version__
from agentenv.chat.certify.trial import Example, Injection, Trial
from agentenv.chat.encoding import encoder_of
from agentenv.chat.template import FOLLOW_UPS, REASONS, Template, _Probe
from agentenv.core.engine import Tokenizer
from agentenv.errors import ConfigError

CertificateKind = Literal["prefix-stable", "needs-bridge", "unsupported", "no template"]

_SAMPLE = "Hello  world\n\n\tdef f(x): return 12345 # Ünïcode e\u0301 日本語 😀\r\n"
_ADVICE = {
    "unsupported": "Use a model whose template renders user, assistant and user messages, put such a template into its "
    "folder (chat_template.jinja), or give prompts and observations as text, which needs no template.",
    "no template": "Messages become 'User: …' and 'Assistant:' paragraphs. Put the template that the model was trained "
    "with into its folder (chat_template.jinja), or give prompts and observations as text.",
    "differs": "Do not train on messages with this template: give prompts and observations as text, and report it.",
    "forged": "Do not pass untrusted text to this model as messages: it can forge the tokens above.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The tested behavior of a model's chat template."""

    model: str
    kind: CertificateKind
    template_sha256: str
    variables: Mapping[str, Any]
    """Further variables that the template received."""
    tokenizer: Mapping[str, Any]
    """class, vocab_size, num_added_tokens, sha256 (of the vocabulary, the added tokens and the ids of a sample)."""
    versions: Mapping[str, str]
    reasons: tuple[str, ...]
    error: str
    """Why it is unsupported, in the template's own words."""
    close: str
    close_ids: tuple[int, ...]
    stops: tuple[tuple[int, str], ...]
    """Ids that end a generation in the engine, with their texts."""
    role_markers: tuple[tuple[int, str], ...]
    """Role markers that end the assistant's turn."""
    opening_system: str
    """A system message at the beginning: "" if accepted, else the template's message."""
    shapes: Mapping[str, str]
    """What may follow an assistant's turn: "" if accepted, else the template's message."""
    calls: tuple[str, ...]
    """How an assistant's calls are passed to the template; if empty, text precedes tool results."""
    call_format: str
    """How the model writes calls, as read by `Chat.tool_format`: kind, and the text around a call."""
    needs_tools: bool
    parts: bool
    renders_bos: bool
    adds_bos: bool
    generation_prompt: str
    opens_think: bool
    """True if the generation prompt leaves a `<think>` open, which the model continues."""
    injection: Injection
    examples: tuple[Example, ...]
    added_tokens: tuple[str, ...]
    """Texts of the added tokens in the examples."""
    cold_ms: float
    """Time of the first probe; includes Jinja compilation unless this process has used the template before."""
    warm_ms: float

    @property
    def is_exact(self) -> bool:
        """True if there are examples, and all of them are equal."""
        return bool(self.examples) and all(example.equal for example in self.examples)

    @property
    def exit_code(self) -> int:
        """1 if the template is unsupported, an example differs or a token can be forged; else 0."""
        differs = self.kind != "no template" and not self.is_exact
        return int(differs or bool(self.injection.forged))

    @property
    def verdict(self) -> str:
        """The result in one line."""
        who, tried = self.model or "this tokenizer", self.injection
        if self.kind == "unsupported":
            return f"{who}: unsupported, {self.error}"
        equal = sum(example.equal for example in self.examples)
        exact = f"exact on {equal} of {len(self.examples)} examples" if self.examples else "plain paragraphs"
        return f"{who}: {self.kind}, {exact}, {len(tried.forged)} of {tried.num_tried} added tokens can be forged"

    @property
    def advice(self) -> str:
        """What to do; empty if there is nothing to do."""
        differs = self.kind not in _ADVICE and not self.is_exact
        found = [_ADVICE.get(self.kind), differs and _ADVICE["differs"], self.injection.forged and _ADVICE["forged"]]
        return " ".join(text for text in found if text)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Facts that are harmless here but may matter elsewhere, or cannot be changed."""
        ids, found, tried = {i for i, _ in self.stops}, [], self.injection
        ends = set(self.close_ids[-1:] or [i for i, _ in self.role_markers])
        if ends and not ends & ids:
            names = repr(self.close) if self.close else " or ".join(repr(text) for _, text in self.role_markers)
            found.append(
                f"In history a turn ends with {names}, and the engine stops only at {_named(self.stops) or 'nothing'} "
                "(eos_token_id in the model's generation_config.json). Add it there if the model is trained to end its "
                "turns so; a model that writes channels (gpt-oss) is not."
            )
        if self.renders_bos and self.adds_bos:
            found.append("Encoding a rendering with special tokens adds a second BOS; `Chat` adds none.")
        if self.adds_bos and not self.renders_bos and self.kind not in _ADVICE:
            found.append("The template has no BOS, though the tokenizer adds one to text: prompts begin without.")
        if tried.text_markers or REASONS["t"] in self.reasons:
            markers = list(tried.text_markers)
            found.append(
                f"Role markers are plain text, which any message can contain: {markers}."
                if markers
                else "Nothing separates a user's words from the assistant's: the template has no role markers."
            )
        if tried.altered:
            found.append(f"The template changes messages that contain these texts: {list(tried.altered)}.")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON values, with its derived properties."""
        derived = ("verdict", "is_exact", "exit_code", "advice", "warnings")
        values: dict[str, Any] = jsonable({**{name: getattr(self, name) for name in derived}, **asdict(self)})
        return values


def certify(
    tokenizer: Tokenizer,
    *,
    model: str = "",
    stop_token_ids: Sequence[int] = (),
    variables: Mapping[str, Any] | None = None,
) -> Certificate:
    """Test a tokenizer's chat template: its probe, an example of every shape, every added token in every message.

    `stop_token_ids` are the ids besides EOS on which the engine stops; `variables` go to every rendering. Never fails
    because of a template.
    """
    given = dict(variables or {})
    versions = {"agentenv": __version__}
    for name in ("transformers", "tokenizers"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    template, cold_ms = (
        _timed(tokenizer, stop_token_ids, given) if has_template else (Template("prefix-stable", ""), 0.0)
    )
    warm_ms = _timed(tokenizer, stop_token_ids, given)[1] if has_template else 0.0
    trial = Trial(tokenizer, template, stop_token_ids, given)
    unsupported, eos = template.kind == "unsupported", getattr(tokenizer, "eos_token_id", None)
    generation_prompt = "Assistant:" if not has_template else "" if unsupported else trial.generation_prompt()
    thinks = re.findall(r"<(/?)(?:\w+:)?think>", generation_prompt)
    examples = trial.examples() if has_template and not unsupported else ()
    seen = "".join(example.ours + example.template for example in examples)
    return Certificate(
        model=model,
        kind=template.kind if has_template else "no template",
        template_sha256=template.sha256,
        variables=given,
        tokenizer=_tokenizer_facts(tokenizer),
        versions=versions,
        reasons=template.reasons,
        error=template.error,
        close=template.close,
        close_ids=template.close_ids,
        stops=trial.texts({*stop_token_ids, *([] if eos is None else [eos])}),
        role_markers=trial.texts(template.markers),
        opening_system=trial.opening_system(),
        shapes={name: trial.refusal(name) for name in FOLLOW_UPS},
        calls=tuple(f"arguments as {'JSON text' if j else 'a mapping'}, content {c!r}" for j, c in template.calls),
        call_format=trial.call_format() if has_template and not unsupported else "",
        needs_tools=template.needs_tools,
        parts=template.parts,
        renders_bos=template.renders_bos,
        adds_bos=template.adds_bos,
        generation_prompt=generation_prompt,
        opens_think=thinks[-1:] == [""],
        injection=trial.injection(),
        examples=examples,
        added_tokens=tuple(text for text in encoder_of(tokenizer).added if text in seen),
        cold_ms=round(cold_ms, 3),
        warm_ms=round(warm_ms, 3),
    )


def _timed(tokenizer: Tokenizer, stop_token_ids: Sequence[int], variables: Mapping[str, Any]) -> tuple[Template, float]:
    started = time.perf_counter()
    template = _Probe(tokenizer, stop_token_ids, variables).run()
    return template, (time.perf_counter() - started) * 1000


def _tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    sample = list(tokenizer.encode(_SAMPLE, add_special_tokens=False))  # depends on merges and normalizers
    known = [sorted(vocabulary.items()), sorted((int(i), repr(token)) for i, token in added.items()), sample]
    return {
        "class": type(tokenizer).__name__,
        "vocab_size": len(vocabulary),
        "num_added_tokens": len(added),
        "sha256": hashlib.sha256(json.dumps(known).encode()).hexdigest(),
    }


def write_certificate(certificate: Certificate, path: str | Path) -> None:
    """Write the certificate as JSON, atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(json.dumps(certificate.to_dict(), indent=2) + "\n", encoding="ascii")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"certificate: expected a file that can be written, got {str(path)!r}: {error}. Choose another path."
        ) from error


def certificate_report(certificate: Certificate, *, examples: bool = False) -> RenderableType:
    """Return the certificate for a terminal: the verdict, warnings, the facts, and examples side by side.

    The examples are the first that follows an action and all that differ; with `examples`, all of them.
    """
    style = "bold red" if certificate.exit_code else "bold green"
    notes = [Text(f"! {text}", style="yellow") for text in certificate.warnings]
    advice = [Text(_visible(certificate.advice))] if certificate.advice else []
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(certificate):
        facts.add_row(Text(name, style="bold"), Text(_visible(value)))
    first = [example for example in certificate.examples if example.ending][:1]
    shown = [e for e in certificate.examples if examples or not e.equal or e in first]
    equal = [_name_of(e) for e in certificate.examples if e not in shown]
    more = [Text(f"Also equal: {', '.join(equal)}. Show them: --examples")] if equal else []
    tables = [_examples(certificate, shown)] if shown else []
    return Group(Text(_visible(certificate.verdict), style=style), *notes, *advice, facts, *tables, *more)


def _facts(c: Certificate) -> list[tuple[str, str]]:
    shapes = ", ".join(name for name, refusal in c.shapes.items() if not refusal)
    wants = [text for wanted, text in ((c.needs_tools, "a list of tools"), (c.parts, "content as parts")) if wanted]
    prompt = repr(c.generation_prompt) + (", which opens <think>" if c.opens_think else "")
    bos = (
        f"{'rendered' if c.renders_bos else 'not rendered'}, {'added' if c.adds_bos else 'not added'} by the tokenizer"
    )
    rows = [
        ("template", f"sha256 {c.template_sha256[:16]}…" if c.template_sha256 else "none"),
        ("variables", ", ".join(f"{name} {value}" for name, value in c.variables.items())),
        ("tokenizer", ", ".join(f"{key} {str(value)[:24]}" for key, value in c.tokenizer.items())),
        ("versions", ", ".join(f"{name} {version}" for name, version in c.versions.items())),
        ("class", "; ".join([c.kind, *c.reasons])),
        ("wants", " and ".join(wants)),
        ("close", _named(zip(c.close_ids, [c.close], strict=False)) if len(c.close_ids) == 1 else repr(c.close)),
        ("engine stops at", _named(c.stops)),
        ("role markers", _named(c.role_markers)),
        ("generation prompt", prompt),
        ("BOS", bos),
        ("opening system", c.opening_system or "accepted"),
        ("after a turn", f"{shapes}   (tools: two results; 2xuser: two user messages)" if shapes else ""),
        *((f"not {name}", refusal) for name, refusal in c.shapes.items() if refusal and c.kind != "unsupported"),
        ("calls", c.call_format),
        ("added tokens tried", f"{c.injection.num_tried} in {', '.join(c.injection.places) or 'nothing'}"),
        ("forged", ", ".join(map(repr, c.injection.forged))),
        ("probe", f"{c.cold_ms:.1f} ms the first time, {c.warm_ms:.1f} ms after"),
    ]
    return [(name, value) for name, value in rows if value and value != "''"]


def _named(pairs: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"{i} {text!r}" for i, text in pairs)


def _name_of(example: Example) -> str:
    return f"{example.shape} {example.ending} {example.context and f'({example.context})'}".strip()


def _examples(certificate: Certificate, shown: Sequence[Example]) -> Table:
    table = Table(title="From the action on", title_justify="left", show_lines=True)
    for name in ("example", "ours", "apply_chat_template"):
        table.add_column(name, overflow="fold")
    tokens = "|".join(re.escape(_visible(text)) for text in sorted(certificate.added_tokens, key=len, reverse=True))
    for example in shown:
        what = Text(_name_of(example), style="bold")
        what.append("\nequal" if example.equal else f"\n{_visible(example.difference)}", "" if example.equal else "red")
        if example.bridge:
            what.append(f"\n{example.compared}\n{example.bridge}, {example.num_synthesised} synthesised", style="dim")
        # Both texts: added tokens in color, and the part that differs from the other text marked.
        pairs = enumerate(zip(example.ours, example.template, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(example.ours), len(example.template)))
        both = []
        for text in (example.ours, example.template):
            both.append(Text(_visible(text[:same])).append(_visible(text[same:]), style="white on red"))
            if tokens:
                both[-1].highlight_regex(tokens, "cyan")
        table.add_row(what, *both)
    return table


def _visible(text: str) -> str:
    """Return text without terminal controls, with visible line ends."""
    shown = "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
    return shown.replace("\n", "⏎\n")
