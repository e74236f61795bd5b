"""The tokenizer of a shipped model without transformers, beside transformers' own class."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.chat.chat import Chat
from agentenv.chat.shipped_tokenizer import ShippedTokenizer
from agentenv.chat.template import DUMMY_TOOLS
from agentenv.engines.models import load_light_tokenizer, load_tokenizer, resolve_model

FOLDER = resolve_model("tiny-math")
LIGHT, WHOLE = ShippedTokenizer(FOLDER), load_tokenizer(FOLDER)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "é<|im_end|>"}}}
TEXTS = st.text() | st.sampled_from(["<|im_start|>", "a<|im_end|> b", "<|endoftext|>\n", " 12 + 3"])


@given(st.lists(TEXTS, max_size=3).map("".join), st.booleans())
def test_ids_and_texts_are_those_of_transformers(text, with_special):
    ids = WHOLE.encode(text, add_special_tokens=with_special)
    assert LIGHT.encode(text, add_special_tokens=with_special) == ids
    for skip in (False, True):
        assert LIGHT.decode(ids, skip_special_tokens=skip) == WHOLE.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS})))
def test_conversations_render_as_with_transformers(messages):
    messages.append({"role": "assistant", "content": None, "tool_calls": [CALL]})
    for tools in (None, DUMMY_TOOLS):
        for begins in (False, True):
            options = {"tokenize": False, "add_generation_prompt": begins, "tools": tools}
            assert LIGHT.apply_chat_template(messages, **options) == WHOLE.apply_chat_template(messages, **options)


def test_its_names_and_ids_are_those_of_transformers():
    for name in (
        "eos_token", "eos_token_id", "pad_token", "pad_token_id", "unk_token", "bos_token", "bos_token_id",
        "all_special_ids", "all_special_tokens", "special_tokens_map", "chat_template", "name_or_path",
        "added_tokens_decoder", "model_max_length", "vocab_size", "padding_side",
    ):  # fmt: skip
        values = [getattr(tokenizer, name) for tokenizer in (LIGHT, WHOLE)]
        assert str(values[0]) == str(values[1]), name
    assert len(LIGHT) == len(WHOLE)
    assert LIGHT.get_vocab() == WHOLE.get_vocab()
    assert Chat(LIGHT).template == Chat(WHOLE).template


def test_what_it_lacks_is_asked_of_transformers():
    messages = [{"role": "user", "content": "1 + 1"}]
    assert LIGHT("1 + 1").input_ids == WHOLE("1 + 1").input_ids
    assert LIGHT.apply_chat_template(messages, tokenize=True) == WHOLE.apply_chat_template(messages, tokenize=True)
    assert LIGHT.convert_ids_to_tokens([2]) == ["<|im_end|>"]
    with pytest.raises(AttributeError, match="not_there"):
        _ = LIGHT.not_there


def test_it_survives_pickling_and_its_saved_folder_is_the_same_tokenizer(tmp_path):
    LIGHT.save_pretrained(tmp_path / "kept")
    kept = load_tokenizer(str(tmp_path / "kept"))
    for other in (pickle.loads(pickle.dumps(LIGHT)), kept):
        assert other.encode("12 apples<|im_end|>\n") == WHOLE.encode("12 apples<|im_end|>\n")
        assert other.all_special_ids == WHOLE.all_special_ids
    assert kept.chat_template == WHOLE.chat_template


def test_only_models_that_ship_are_loaded_so(tmp_path):
    LIGHT.save_pretrained(tmp_path / "tiny-math")
    assert isinstance(load_light_tokenizer(FOLDER), ShippedTokenizer)
    assert not isinstance(load_light_tokenizer(str(tmp_path / "tiny-math")), ShippedTokenizer)


@pytest.mark.long
def test_a_scripted_run_imports_no_transformers(tmp_path):
    args = ["run", "--env", "math_retry", "--engine", "scripted", "--limit", "1", "--out", str(tmp_path / "run")]
    code = (
        "import sys; from agentenv.cli.main import main; "
        f"assert main({args!r}) == 0; print({{'torch', 'transformers', 'gymnasium'}} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["set()"], done.stderr
