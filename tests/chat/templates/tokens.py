"""The tokens that families share, and a row of `tests/chat/families.py` for each group of them."""

from __future__ import annotations

from typing import Any

from tests.chat.templates.base_tokenizers import Kind
from tests.chat.templates.family import TEMPLATES, Added, Family, plain, specials

ALL = ("user", "tool", "tools", "tool+user", "2xuser", "system")
NO_SYSTEM = ALL[:5]
TURNS = ("user", "2xuser", "system")
CHATML = specials("<|endoftext|> <|im_start|> <|im_end|>")
TOOL_TAGS = plain("<tool_call> </tool_call> <tool_response> </tool_response>")
THINK_TAGS = plain("<think> </think>")
QWEN = (*CHATML, *TOOL_TAGS, *THINK_TAGS)
LLAMA2 = specials("<s> </s>")
LLAMA3 = specials(
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>"
)
MISTRAL = specials("<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]")
MISTRAL_V3 = (*MISTRAL, *specials("[/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [CALL_ID] [ARGS] [TOOL_CONTENT]"))
GEMMA = specials("<bos> <eos> <start_of_turn> <end_of_turn> <start_of_image>")
GEMMA4 = specials(
    "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|>"
    ' <|tool_response> <tool_response|> <|"|>'
)
DEEPSEEK = (
    *specials("<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>"),
    *plain(
        "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>"
    ),
    *plain(
        "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜>"
    ),
    *plain("<｜tool▁output▁end｜>"),
)
GLM = (
    *specials("<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"),
    *plain("<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"),
    *plain("<arg_key> </arg_key> <arg_value> </arg_value>"),
)
COHERE = specials(
    "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>"
    " <|START_RESPONSE|> <|END_RESPONSE|> <|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|>"
    " <|START_TOOL_RESULT|> <|END_TOOL_RESULT|>"
)
PHI3 = (
    *specials("<s> <|endoftext|>"),
    *(Added(t, rstrip=True) for t in ("</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
)
HARMONY = specials(
    "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>"
)


def family(
    name: str, template: str, kind: Kind, tokens: tuple[Added, ...], eos: str, close: str, **more: Any
) -> Family:
    """A row: the class follows from the codes, and the engine stops on EOS and on the last token of the close."""
    last = [t.text for t in tokens if close.endswith(t.text)] if close else []
    more.setdefault("stop_tokens", tuple(dict.fromkeys([eos, *last])))
    more.setdefault("expected_class", "needs-bridge" if set(more.get("codes", "")) - set("tc") else "prefix-stable")
    path = TEMPLATES / f"{template}.jinja"
    return Family(name=name, template=path, tokenizer=kind, added_tokens=tokens, eos_token=eos, close=close, **more)


def qwen(name: str, template: str, kind: Kind = "byte_bpe", **more: Any) -> Family:
    """A family with Qwen's tokens."""
    stops = ("<|im_end|>", "<|endoftext|>")
    return family(
        name, template, kind, QWEN, "<|im_end|>", "<|im_end|>", **{"stop_tokens": stops, "shapes": ALL, **more}
    )


def llama3(name: str, template: str) -> Family:
    """A family with Llama 3's tokens."""
    more = {"bos_token": "<|begin_of_text|>", "adds_bos": True, "codes": "W", "shapes": ALL}
    stops = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    return family(name, template, "byte_bpe_digits", LLAMA3, "<|eot_id|>", "<|eot_id|>", stop_tokens=stops, **more)


def llama2(name: str, template: str, kind: Kind = "spm_legacy", close: str = "</s>", **more: Any) -> Family:
    """A family with Llama 2's tokens, and `tokens` besides."""
    tokens = (*LLAMA2, *more.pop("tokens", ()))
    return family(name, template, kind, tokens, "</s>", close, **{"bos_token": "<s>", "adds_bos": True, **more})


def mistral(name: str, template: str, kind: Kind, close: str = "</s>", **more: Any) -> Family:
    """A family with Mistral's tokens, markers included."""
    return family(name, template, kind, MISTRAL_V3, "</s>", close, bos_token="<s>", adds_bos=True, **more)


def gemma(name: str, template: str) -> Family:
    """A family with Gemma's tokens, 1 to 3."""
    more = {"bos_token": "<bos>", "adds_bos": True, "codes": "W"}
    return family(name, template, "spm_none", GEMMA, "<eos>", "<end_of_turn>", **more)


def deepseek(name: str, template: str, codes: str, **more: Any) -> Family:
    """A family with DeepSeek's BOS and EOS."""
    bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    more = {"bos_token": bos, "adds_bos": True, "codes": codes, **more}
    return family(name, template, "byte_bpe_digits", more.pop("tokens", DEEPSEEK), eos, more.pop("close", eos), **more)


def cohere(name: str, template: str, close: str, **more: Any) -> Family:
    """A family with Command's tokens."""
    more = {"bos_token": "<BOS_TOKEN>", "adds_bos": True, **more}
    return family(name, template, "byte_bpe", COHERE, "<|END_OF_TURN_TOKEN|>", close, **more)


def glm(name: str, template: str, codes: str, kind: Kind = "byte_bpe") -> Family:
    """A family with GLM's tokens, whose role markers it stops on."""
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    return family(name, template, kind, GLM, "<|endoftext|>", "", codes=codes, shapes=ALL, stop_tokens=stops)


def phi3(name: str, template: str) -> Family:
    """A family with Phi-3's tokens, which swallow what follows."""
    stops = ("<|endoftext|>", "<|assistant|>", "<|end|>")
    more = {"bos_token": "<s>", "shapes": TURNS, "stop_tokens": stops}
    return family(name, template, "spm_legacy", PHI3, "<|endoftext|>", "<|end|>", **more)
