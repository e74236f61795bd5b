"""HFScorer: what it gives is the model's own raw number, whatever is in the batch, whichever token pads."""

import asyncio
import gc
import json
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
)

from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.rewards.models.classifier import Classifier
from agentenv.rewards.models.hf import HFOptions, HFScorer
from tests.models import make_tiny_tokenizer
from tests.rewards.models.tiny import EOS, VOCAB_SIZE, make_tiny_rm, said, tiny_rm

TOLERANCE = 1e-4
SEQUENCES = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=70), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_rm())


@pytest.fixture(scope="module")
def classifier():
    return opened(str(tiny_rm()))


@pytest.fixture
async def scorer():
    scorer = HFScorer(tiny_rm())
    yield scorer
    await scorer.close()


def opened(model, label=None):
    return Classifier(model, device="cpu", dtype="auto", label=label)


def plain(path, ids, pad=None):
    """What transformers says of one sequence, or of several padded at the right."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    longest = max(map(len, ids))
    rows = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    with torch.no_grad():
        return model(rows, attention_mask=mask).logits[:, 0].tolist()


def edited(path, *, config=None, rename=None):
    """The checkpoint in `path` with another config, and with weights under other names."""
    weights = load_file(path / "model.safetensors")
    for old, new in (rename or {}).items():
        weights[new] = weights.pop(old)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((path / "config.json").read_text())
    for key, value in (config or {}).items():
        known.pop(key) if value is None else known.update({key: value})
    (path / "config.json").write_text(json.dumps(known))
    return path


async def once(scorer, conversation):
    try:
        return await scorer.score(conversation)
    finally:
        await scorer.close()


# --- the number -----------------------------------------------------------------------------------------------------


async def test_the_value_is_the_heads_own_without_activation(scorer, tokenizer):
    """vLLM's default is a sigmoid, in which 7.908 and 7.635 become 0.99963 and 0.99952."""
    ids = tokenizer.apply_chat_template(said("42"), tokenize=True, return_dict=False)
    scored = await scorer.score(said("42"))
    assert scored.value == pytest.approx(plain(tiny_rm(), [ids])[0], abs=TOLERANCE)
    assert not 0.0 <= scored.value <= 1.0
    assert (scored.num_tokens, scored.truncated) == (len(ids), False)


@pytest.mark.long
@given(sequences=SEQUENCES, data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_score_does_not_depend_on_its_batch(classifier, sequences, data):
    """Nobody's score may move with the batch size, as on RewardBench (0.5777, 0.5827, 0.5817 at 16, 20 and 5)."""
    together = classifier.score_batch(sequences)
    at = data.draw(st.integers(0, len(sequences) - 1))
    assert classifier.score_batch([sequences[at]])[0] == pytest.approx(together[at], abs=TOLERANCE)
    order = data.draw(st.permutations(range(len(sequences))))
    again = classifier.score_batch([sequences[index] for index in order])
    assert again == pytest.approx([together[index] for index in order], abs=TOLERANCE)


@pytest.mark.long
def test_a_pad_token_that_is_the_eos_changes_no_score(tmp_path, classifier):
    """transformers then leaves the last EOS out: a chosen and a rejected answer may get the same score."""
    path = make_tiny_rm(tmp_path / "rm", pad=EOS)
    ids = [[40, 41, 42, EOS], [50, 51, EOS], [60, 61, 62, 63, 64]]
    assert plain(path, ids, pad=EOS)[0] == pytest.approx(classifier.score_batch([ids[0][:-1]])[0], abs=TOLERANCE)
    assert opened(str(path)).score_batch(ids) == pytest.approx(classifier.score_batch(ids), abs=TOLERANCE)
    assert classifier.score_batch([ids[0]])[0] != pytest.approx(classifier.score_batch([ids[0][:-1]])[0], abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("pad", [None, -1])
def test_a_model_without_a_pad_token_takes_batches(tmp_path, classifier, pad):
    path = make_tiny_rm(tmp_path / "rm", pad=None)
    if pad is not None:
        edited(path, config={"pad_token_id": pad})
    ids = [[40, 41, 42], [50]]
    assert opened(str(path)).score_batch(ids) == pytest.approx(classifier.score_batch(ids), abs=TOLERANCE)


DECODERS = {
    "gpt2": lambda: GPT2ForSequenceClassification(
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64, num_labels=1, initializer_range=0.3)
    ),
    "bert": lambda: BertForSequenceClassification(
        BertConfig(
            vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64, num_labels=1, initializer_range=0.3,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", DECODERS)
def test_padding_reaches_no_score_in_any_family_of_models(family):
    """NeMo RL's first worker gives padded rows a mask of ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        classifier = opened(DECODERS[family]())
    ids = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12], [13], [3, 4, 6]]
    alone = [classifier.score_batch([row])[0] for row in ids]
    assert classifier.score_batch(ids) == pytest.approx(alone, abs=TOLERANCE)
    assert len({round(value, 3) for value in alone}) == 4


# --- loading --------------------------------------------------------------------------------------------------------


def counted_loads(monkeypatch):
    """The thread of each load from now on."""
    loads = []

    class Counted(Classifier):
        def __init__(self, *args, **options):
            loads.append(threading.get_ident())
            super().__init__(*args, **options)

    monkeypatch.setattr("agentenv.rewards.models.classifier.Classifier", Counted)
    return loads


async def test_the_model_is_loaded_once_in_a_thread_and_not_before_it_is_needed(monkeypatch):
    loads = counted_loads(monkeypatch)
    scorer = HFScorer(tiny_rm())
    assert loads == []
    await asyncio.gather(*(scorer.score(said("42")) for _ in range(8)), scorer.load())
    assert len(loads) == 1
    assert loads != [threading.get_ident()]
    await scorer.close()


@pytest.mark.parametrize("spoil", [
    lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:9000]),
    lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    lambda folder: edited(folder, config={"num_attention_heads": 0}),
    lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": [], "model": {}}'),
], ids=["half", "another format", "no heads", "tokenizer"])  # fmt: skip
async def test_files_that_are_spoilt_are_a_config_error(spoil, tmp_path):
    folder = make_tiny_rm(tmp_path / "rm")
    spoil(folder)
    with pytest.raises(ConfigError, match="HFScorer: expected a"):
        await once(HFScorer(folder), said("x"))


@pytest.mark.long
async def test_options_may_be_a_mapping_as_json_has_them_with_a_tokenizers_folder(tmp_path):
    make_tiny_tokenizer(tmp_path, vocab_size=VOCAB_SIZE)
    options = {"add_eos": True, "tokenizer": str(tmp_path), "max_batch_tokens": 99}
    scorer = HFScorer(tiny_rm(), options=options)
    assert scorer.options == HFOptions(**options)
    usual = await once(HFScorer(tiny_rm()), said("x"))
    assert (await once(scorer, said("x"))).num_tokens == usual.num_tokens + 1
    with pytest.raises(ConfigError, match=r"HFScorer\.options: expected options among .*got 'add_eo'"):
        HFScorer(tiny_rm(), options={"add_eo": True})


async def test_anything_that_cannot_be_loaded_is_not_tried_again(monkeypatch):
    loads = counted_loads(monkeypatch)
    scorer = HFScorer("no-such/model-anywhere")
    for _ in range(3):
        with pytest.raises(ConfigError, match="expected a sequence classifier's folder"):
            await scorer.score("text")
    assert len(loads) == 1
    await scorer.close()


async def test_a_language_model_without_a_head_is_refused(tmp_path):
    """transformers gives it a random one, with a warning."""
    path = edited(make_tiny_rm(tmp_path / "rm"), rename={"score.weight": "lm_head.weight"})
    with pytest.raises(ConfigError, match=r"without score\.weight"):
        await once(HFScorer(path), "text")


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "rename"),
    [
        ({"value_head_prefix": "score", "mean": 1.0, "std": 2.0}, {}),
        ({"value_head_prefix": "value_head"}, {"score.weight": "value_head.weight"}),
        ({"architectures": ["RewardModel"]}, {}),
    ],
    ids=["with its prefix stored", "under another name", "nothing stored"],
)
async def test_openrlhfs_value_head_checkpoints_load(tmp_path, config, rename):
    """They do not say how many labels there are, which transformers then takes to be two; nor is mean / std applied."""
    config = {**config, "id2label": None, "label2id": None}
    path = edited(make_tiny_rm(tmp_path / "rm"), config=config, rename=rename)
    expected = await once(HFScorer(tiny_rm()), said("42"))
    assert (await once(HFScorer(path), said("42"))).value == pytest.approx(expected.value, abs=TOLERANCE)


@pytest.mark.long
async def test_a_model_with_several_labels_needs_one_named(tmp_path):
    path = make_tiny_rm(tmp_path / "rm", num_labels=3)
    with pytest.raises(ConfigError, match=r"HFScorer\.label: .*\['LABEL_0', 'LABEL_1', 'LABEL_2'\], got None"):
        await once(HFScorer(path), "text")
    with pytest.raises(ConfigError, match="got 'good'"):
        await once(HFScorer(path, label="good"), "text")
    values = [(await once(HFScorer(path, label=label), "text")).value for label in (0, "LABEL_0", 1, "LABEL_2")]
    assert values[0] == values[1]
    assert len(set(values)) == 3


def test_an_encoder_with_a_decoder_is_refused():
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, num_labels=1)
    with pytest.raises(ConfigError, match="got T5ForSequenceClassification"):
        opened(T5ForSequenceClassification(config))


async def test_a_model_object_is_taken_as_it_is_with_a_tokenizer(tokenizer):
    model = AutoModelForSequenceClassification.from_pretrained(tiny_rm()).train()
    with pytest.raises(ConfigError, match=r"HFScorer\.options: expected a tokenizer"):
        HFScorer(model)
    expected = (await once(HFScorer(tiny_rm()), said("42"))).value
    scored = await once(HFScorer(model, options=HFOptions(tokenizer=tokenizer)), said("42"))
    assert scored.value == pytest.approx(expected, abs=TOLERANCE)
    assert not model.training
    with pytest.raises(ConfigError, match="expected a folder, a name or a PreTrainedModel"):
        await once(HFScorer(torch.nn.Linear(1, 1), options=HFOptions(tokenizer=tokenizer)), "text")


async def test_a_dtype_is_the_weights_and_the_head_stays_in_float32():
    scorer = HFScorer(tiny_rm(), dtype="bfloat16")
    loaded = await scorer.load()
    assert loaded.classifier.model.dtype == torch.bfloat16
    low, high = (await once(scorer, said("42"))).value, (await once(HFScorer(tiny_rm()), said("42"))).value
    assert low == pytest.approx(high, rel=0.1)
    assert low != high


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int8"}, r"HFScorer\.dtype"),
        ({"overflow": "middle"}, r"HFScorer\.overflow"),
        ({"max_length": 1}, r"HFScorer\.max_length"),
        ({"max_batch": 0}, r"max_batch"),
        ({"options": HFOptions(max_wait_s=-1.0)}, r"max_wait_s"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_loaded(wrong, message):
    with pytest.raises(ConfigError, match=message):
        HFScorer(tiny_rm(), **wrong)


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
async def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ConfigError, match=r"HFScorer\.device"):
        await once(HFScorer(tiny_rm(), device=device), "text")


# --- what cannot be scored ------------------------------------------------------------------------------------------


async def test_by_default_the_models_positions_are_the_limit_and_never_more(scorer):
    with pytest.raises(DataError, match="expected at most 512 tokens"):
        await scorer.score(said("x" * 3000))
    assert (await scorer.load()).renderer.max_length == 512
    with pytest.raises(ConfigError, match="at most the model's 512 positions, got 513"):
        await once(HFScorer(tiny_rm(), max_length=513), "text")


async def test_a_token_that_the_model_does_not_know_fails_alone(tokenizer):
    larger = AutoTokenizer.from_pretrained(tiny_rm())
    larger.add_tokens(["<unheard-of>"])
    scorer = HFScorer(tiny_rm(), options=HFOptions(tokenizer=larger))
    good, bad = await asyncio.gather(scorer.score(said("42")), scorer.score("<unheard-of>"), return_exceptions=True)
    assert isinstance(bad, DataError)
    assert "below 384, got 384" in str(bad)
    assert good.value == pytest.approx((await once(HFScorer(tiny_rm()), said("42"))).value, abs=TOLERANCE)
    await scorer.close()


async def test_closing_frees_the_model_and_closing_again_is_harmless(scorer):
    model = weakref.ref((await scorer.load()).classifier.model)
    await scorer.score(said("42"))
    await scorer.close()
    await scorer.close()
    gc.collect()
    assert model() is None
    with pytest.raises(InfraError, match="expected an open scorer"):
        await scorer.score(said("42"))


def test_a_shipped_models_name_is_that_of_its_folder(monkeypatch):
    from agentenv.engines.models import resolve_model, shipped_models
    from agentenv.rewards.models.factory import parsed
    from agentenv.rewards.models.render import resolved, tokenizer_of

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [resolved(name) for name in shipped_models()] == [resolve_model(name) for name in shipped_models()]
    assert parsed("hf:tiny-math") == ("hf", resolve_model("tiny-math"))
    assert tokenizer_of("here", "tiny-math", "").encode("2 + 2")
    assert (resolved("a/b"), resolved(".."), resolved("")) == ("a/b", "..", "")
