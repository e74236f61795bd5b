"""Chat-template families to try chat code on: each a template under `templates/`, its tokens, and what is known of it.

`FAMILIES` has one row a family. The letters in `codes` and the shapes are those of the project's survey of templates:
W whitespace trimmed or inserted · H history inserts an assistant header that the model must sample itself · R strips or
rewrites history · G tokens of the generation prompt vanish from history · M system or tools move to the newest user
turn · S the stop token is the next role's marker · B the generation prompt merges with the answer · t role markers are
plain text · c no close token. `templates/SOURCES.md` says where each template is from.
"""

from __future__ import annotations

from typing import Any

from tests.chat.templates.base_tokenizers import Kind
from tests.chat.templates.family import TEMPLATES, Added, Family, load, plain, specials, stop_ids

__all__ = ["BY_NAME", "FAMILIES", "ONE_OF_EACH", "SUPPORTED", "TEMPLATES", "Added", "Family", "load", "stop_ids"]

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


FAMILIES: tuple[Family, ...] = (
    qwen("Qwen1.5", "qwen1_5_shape", "byte_bpe_nfc"),
    qwen("Qwen2.5", "trl_qwen2_5", "byte_bpe_nfc"),
    qwen("Qwen3", "trl_qwen3", codes="R"),
    qwen("Qwen3 (TRL patch)", "trl_qwen3_training", codes="H"),
    qwen("Qwen3-2507", "trl_qwen3_instruct_2507"),
    qwen("Qwen3-VL", "trl_qwen3_vl", shapes=NO_SYSTEM),
    qwen("Qwen3.5-think", "trl_qwen3_5_think", codes="GR", shapes=NO_SYSTEM),
    qwen("Qwen3.5-nothink", "trl_qwen3_5_nothink", codes="GR", shapes=NO_SYSTEM),
    qwen("Qwen3.6", "trl_qwen3_6", codes="GR", shapes=NO_SYSTEM),
    qwen("Qwen3-Coder", "qwen3_coder_shape"),
    qwen("ChatML", "chatml_strict_shape", codes="W", shapes=("user",)),
    qwen("ChatML (plain)", "axolotl_chatml"),
    family("ChatML (stripping tokens)", "axolotl_chatml", "byte_bpe",
        (Added("<|endoftext|>"), Added("<|im_start|>", lstrip=True), Added("<|im_end|>", lstrip=True, rstrip=True)),
        "<|im_end|>", "<|im_end|>", shapes=ALL),
    qwen("SmolLM3", "smollm3_shape", "byte_bpe_digits", shapes=NO_SYSTEM),
    family("Hermes-2-Pro", "hermes_shape", "spm_legacy", (*LLAMA2, *CHATML, *TOOL_TAGS), "<|im_end|>", "<|im_end|>",
        bos_token="<s>", adds_bos=True, codes="R", shapes=ALL, needs_tools=True),
    family("Hermes-3", "hermes_shape", "byte_bpe_digits", (*LLAMA3, *CHATML, *TOOL_TAGS), "<|im_end|>", "<|im_end|>",
        bos_token="<|begin_of_text|>", adds_bos=True, codes="R", shapes=ALL, needs_tools=True),
    llama2("InternLM2", "internlm2_shape", close="<|im_end|>", tokens=CHATML[1:], shapes=ALL),
    llama2("MiniCPM3", "minicpm3_shape", close="<|im_end|>",
        tokens=(*CHATML[1:], *specials("<|tool_call_start|> <|tool_call_end|> <|thought_start|> <|thought_end|>")),
        shapes=ALL),
    llama2("Llama-2", "llama2_shape", close=" </s>", codes="W"),
    llama3("Llama-3", "llama3_shape"),
    llama3("Llama-3.1", "llama3_1_shape"),
    llama3("Llama-3.2", "llama3_2_shape"),
    family("Llama-4", "llama4_shape", "byte_bpe_digits", specials(
        "<|begin_of_text|> <|end_of_text|> <|header_start|> <|header_end|> <|eot|> <|eom|> <|python_start|>"
        " <|python_end|>"), "<|eot|>", "<|eot|>", bos_token="<|begin_of_text|>", adds_bos=True,
        stop_tokens=("<|end_of_text|>", "<|eom|>", "<|eot|>"), shapes=ALL),
    llama2("Mistral v0.1", "mistral_v0_1_shape", codes="t"),
    llama2("Mixtral", "mixtral_shape", codes="t"),
    llama2("Mistral v1 (axolotl)", "axolotl_mistral_v1", codes="Wt"),
    mistral("Mistral v0.3", "mistral_v0_3_shape", "spm_legacy", " </s>", codes="MW", shapes=NO_SYSTEM),
    mistral("Mistral v2v3 (axolotl)", "axolotl_mistral_v2v3", "byte_fallback", codes="MW", shapes=ALL[:4]),
    mistral("Mistral-Nemo", "axolotl_mistral_v3_tekken", "byte_bpe", codes="M", shapes=ALL[:4]),
    mistral("Mistral-Small v7", "axolotl_mistral_v7_tekken", "byte_bpe", shapes=TURNS),
    mistral("Mistral-Small-3.2", "mistral_small_3_2_shape", "byte_bpe", codes="M", shapes=NO_SYSTEM),
    gemma("Gemma", "gemma_shape"),
    gemma("Gemma3", "gemma3_shape"),
    qwen("MiniCPM5", "minicpm5_shape"),
    qwen("xLAM", "xlam_shape", codes="W"),
    family("Onyx", "onyx_shape", "byte_bpe", specials("<|begin_of_text|> <|start|> <|message|> <|eom|> <|eot|>"),
        "<|eot|>", "<|eot|>", bos_token="<|begin_of_text|>", codes="H", shapes=ALL),
    family("Inkling", "inkling_shape", "byte_bpe",
        specials("<|user|> <|model|> <|tool|> <|system|> <|text|> <|invoke|> <|end_message|> <|end_sampling|>"),
        "<|end_sampling|>", "<|end_message|><|end_sampling|>", codes="H", shapes=ALL),
    mistral(
        "Mistral-Small (no close of the user)", "mistral_small_3_open_shape", "byte_bpe", codes="HM", shapes=NO_SYSTEM),
    llama2("ChatGLM", "chatglm_shape", "byte_fallback", close="", codes="ct", shapes=("user", "2xuser")),
    *(family(name, template, "spm_none", GEMMA4, "<eos>", "<turn|>", bos_token="<bos>", adds_bos=True,
        stop_tokens=("<eos>", "<turn|>", "<|tool_response>"), codes=codes, shapes=ALL)
        for name, template, codes in (("Gemma4", "gemma4_shape", "G"), ("Gemma4 (TRL)", "trl_gemma4_v5", "W"))),
    phi3("Phi-3", "trl_phi3"),
    phi3("Phi-3.5", "trl_phi3_5"),
    family("Phi-4", "axolotl_phi_4", "byte_bpe_digits", (*CHATML, *specials("<|im_sep|>"), *THINK_TAGS), "<|im_end|>",
        "<|im_end|>", shapes=("user", "2xuser")),
    family("Phi-4-mini", "phi4_mini_shape", "byte_bpe_digits",
        specials("<|endoftext|> <|system|> <|user|> <|assistant|> <|end|> <|tool|> <|/tool|>"), "<|endoftext|>",
        "<|end|>", shapes=TURNS),
    deepseek("DeepSeek-LLM", "deepseek_llm_shape", "Wt", tokens=DEEPSEEK[:2], shapes=TURNS),
    deepseek("DeepSeek-Coder", "deepseek_coder_shape", "t", tokens=(*DEEPSEEK[:2], Added("<|EOT|>")), close="\n<|EOT|>",
        stop_tokens=("<|EOT|>",), shapes=ALL),
    deepseek("DeepSeek-V3", "trl_deepseekv3", "GMR", shapes=NO_SYSTEM),
    deepseek("DeepSeek-R1", "deepseek_r1_shape", "MR", shapes=NO_SYSTEM),
    deepseek("DeepSeek-R1-Distill", "trl_deepseek_r1_distill", "GMR", shapes=NO_SYSTEM),
    deepseek("DeepSeek-V3.1", "deepseek_v3_1_shape", "MR", shapes=NO_SYSTEM),
    deepseek("DeepSeek-V3.2", "deepseek_v3_2_shape", "", tokens=(*DEEPSEEK, Added("｜DSML｜", special=False)),
        shapes=ALL),
    family("gpt-oss", "trl_gptoss", "byte_bpe_digits", HARMONY, "<|return|>", "<|end|>", bos_token="<|startoftext|>",
        stop_tokens=("<|return|>", "<|endoftext|>", "<|call|>"), codes="H",
        shapes=("user", "tool", "tool+user", "2xuser")),
    llama2("Zephyr", "zephyr_shape", codes="Wt"),
    llama2("TinyLlama", "zephyr_plain_shape", codes="t", shapes=TURNS),
    family("StableLM-2", "zephyr_plain_shape", "byte_bpe", specials("<|endoftext|>"), "<|endoftext|>", "<|endoftext|>",
        codes="t", shapes=TURNS),
    cohere("Command-R", "command_r_shape", "<|END_OF_TURN_TOKEN|>", codes="W"),
    cohere("Command-R7B", "command_r7b_shape", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    cohere("Command-A-reason", "command_a_reasoning_shape", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", codes="H",
        shapes=TURNS),
    cohere("Command-A-tools", "command_a_tools_shape", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", codes="H", shapes=ALL),
    glm("GLM-4.5", "trl_glm4moe", "HRS"),
    glm("GLM-5.1", "glm_5_1_shape", "GRS"),
    glm("GLM-5.1 (SentencePiece)", "glm_5_1_shape", "GRS", "spm_legacy"),
    family("Granite-3.0", "granite3_shape", "byte_gpt2",
        specials("<|end_of_text|> <|start_of_role|> <|end_of_role|> <|tool_call|>"), "<|end_of_text|>",
        "<|end_of_text|>", bos_token="<|end_of_text|>", shapes=TURNS),
    family("Kimi-K2-Thinking", "kimi_k2_thinking_shape", "byte_bpe_digits", (
        *specials("[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>"),
        *plain("<think> </think> <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>"),
        *plain("<|tool_call_argument_begin|> <|tool_call_end|>")), "[EOS]", "<|im_end|>", bos_token="[BOS]", codes="H",
        shapes=ALL),
    *(family(name, template, "byte_bpe", (*specials(
        "<|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <|tool_list_start|> <|tool_list_end|>"),
        *specials("<|tool_response_start|> <|tool_response_end|> <|tool_call_start|> <|tool_call_end|>"), *THINK_TAGS),
        "<|im_end|>", "<|im_end|>", bos_token="<|startoftext|>", adds_bos=True, codes=codes, shapes=ALL)
        for name, template, codes in (("LFM2", "lfm2_shape", ""), ("LFM2.5", "lfm2_5_shape", "R"))),
    family("Nemotron-3-Nano", "nemotron3_nano_shape", "byte_bpe", (*LLAMA2, *CHATML[1:], *THINK_TAGS, *TOOL_TAGS[:2]),
        "<|im_end|>", "<|im_end|>", bos_token="<s>", codes="GR", stop_tokens=("</s>", "<|im_end|>"), shapes=ALL),
    family("EXAONE-4", "exaone4_shape", "byte_bpe",
        (*specials("[BOS] [|endofturn|] [|system|] [|user|] [|assistant|] [|tool|]"), *THINK_TAGS, *TOOL_TAGS[:2]),
        "[|endofturn|]", "[|endofturn|]", bos_token="[BOS]", codes="R", shapes=ALL),
    family("Falcon-H1", "falcon_h1_shape", "byte_bpe",
        specials("<|begin_of_text|> <|end_of_text|> <|im_start|> <|im_end|>"), "<|end_of_text|>", "<|im_end|>",
        bos_token="<|begin_of_text|>", shapes=NO_SYSTEM),
    family("Jamba-1.6", "jamba_shape", "spm_none",
        specials("<|startoftext|> <|endoftext|> <|bom|> <|eom|> <|system|> <|user|> <|assistant|> <|tool|>"),
        "<|endoftext|>", "<|eom|>", bos_token="<|startoftext|>", adds_bos=True, codes="W", shapes=ALL),
    llama2("OpenChat-3.5", "openchat_shape", close="<|end_of_turn|>", tokens=specials("<|end_of_turn|>"), codes="Wt"),
    llama2("Starling", "starling_shape", close="<|end_of_turn|>", tokens=specials("<|end_of_turn|>"), codes="Wt",
        shapes=ALL),
    llama2("Vicuna", "vicuna_shape", codes="Wt"),
    llama2("Alpaca", "alpaca_shape", codes="Wt"),
    llama2("Alpaca (axolotl)", "axolotl_alpaca", codes="t", shapes=("user", "2xuser")),
    llama2("SOLAR", "solar_shape", close="", codes="tc", shapes=TURNS),
    llama2("Orca Mini", "orca_mini_shape", "byte_fallback", close="", codes="tc", shapes=TURNS),
    family("Falcon instruct", "falcon_instruct_shape", "byte_gpt2", specials("<|endoftext|>"), "<|endoftext|>", "",
        codes="RWtc"),
    llama2("H2O-Danube", "h2o_danube_shape", tokens=specials("<|prompt|> <|answer|> <|system|>"), shapes=TURNS),
    llama2("Functionary-2.2", "functionary_v2_shape", close="<|stop|>",
        tokens=specials("<|from|> <|recipient|> <|content|> <|stop|>"), codes="H", shapes=ALL),
    llama2("CodeLlama-70B", "codellama70b_shape", close=" <step>", tokens=specials("<step>"), codes="BGt"),
    family("gpt2 (no roles)", "no_roles_shape", "byte_gpt2", specials("<|endoftext|>"), "<|endoftext|>",
        "<|endoftext|>", codes="t", shapes=ALL),
    family("MiniMax-M2", "minimax_m2_shape", "byte_bpe_digits",
        (*specials("]~!b[ ]~b] [e~["), *THINK_TAGS, *plain("<minimax:tool_call> </minimax:tool_call>")), "[e~[", "[e~[",
        bos_token="]~!b[", codes="GR", shapes=NO_SYSTEM),
    family("Seed-OSS", "seed_oss_shape", "byte_bpe",
        (*specials("<seed:bos> <seed:eos>"), *plain("<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>")),
        "<seed:eos>", "<seed:eos>", bos_token="<seed:bos>", codes="W", shapes=ALL),
    family("OLMo-2", "olmo2_shape", "byte_bpe_digits", specials("<|endoftext|>"), "<|endoftext|>", "<|endoftext|>",
        bos_token="<|endoftext|>", codes="t", shapes=TURNS),
    llama2("Yi", "axolotl_chatml", "byte_fallback", close="<|im_end|>", tokens=CHATML[1:], adds_bos=False, shapes=ALL),
    llama2("Baichuan2", "baichuan2_shape", "byte_fallback", close="", tokens=specials("<reserved_106> <reserved_107>"),
        codes="c", shapes=TURNS),
    family("SmolVLM", "trl_smolvlm", "byte_bpe",
        specials("<|endoftext|> <|im_start|> <|im_end|> <end_of_utterance> <image>"), "<end_of_utterance>",
        "<end_of_utterance>", bos_token="<|im_start|>", codes="Wt", shapes=ALL, parts=True),
    llama2("Firefunction-v1", "functions_role_shape", expected_class="unsupported", shapes=()),
    llama2("single turn", "single_turn_shape", close="", expected_class="unsupported", shapes=()),
)  # fmt: skip
SUPPORTED = [family for family in FAMILIES if family.expected_class != "unsupported"]
ONE_OF_EACH = list(
    {(f.codes, f.close == f.close.strip(), f.parts, f.needs_tools): f for f in reversed(SUPPORTED)}.values()
)[::-1]
"""The first family of each set of codes: what holds for it holds for the others of its kind."""
BY_NAME = {family.name: family for family in FAMILIES}
