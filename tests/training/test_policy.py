"""The policy: any architecture scores as its own logits say, packed as alone; weights go out whole and come back."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from agentenv.engines.hf.engine import HFEngine
from agentenv.errors import ConfigError
from agentenv.training.algorithm.batch import micro_batches
from agentenv.training.learner import scoring
from agentenv.training.learner.policy import Policy
from agentenv.training.learner.scoring import TokenScorer, separate_packed
from tests.models import make_tiny_qwen2
from tests.training.worlds import ARCHITECTURES, SEPARATE_NOT, batch_of, flags, make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: make_model(tmp_path_factory.mktemp(name), name) for name in ARCHITECTURES}


def policy_of(path, **changes):
    return Policy(flags(**changes), path, device=CPU)


def plain_logprobs(model, batch, temperature):
    """One sequence at a time, through the model's own logits."""
    found = []
    for sequence, place, token in zip(batch.sequence_N, batch.place_N, batch.token_ids_N, strict=True):
        with torch.no_grad():
            logits = model(input_ids=batch.sequences[sequence][None]).logits[0, place - 1]
        found.append((logits.float() / temperature).log_softmax(-1)[token])
    return torch.stack(found)


def scores_of(policy, batch, **plan):
    found = torch.full((len(batch.token_ids_N),), torch.nan)
    with torch.no_grad():
        for micro in micro_batches(batch, **{"max_places": 1000, "packed": False} | plan):
            found[micro.index_n] = policy.score(micro).logprobs_n
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_scores_as_its_own_logits_say(models, name):
    """What a model does after its output layer is done too: Gemma's cap, Cohere's and Granite's scale."""
    batch, model = batch_of(), AutoModelForCausalLM.from_pretrained(models[name]).eval()
    policy = policy_of(models[name], temperature=0.7)
    expected = plain_logprobs(model, batch, 0.7)
    assert expected.std() > 0.5
    torch.testing.assert_close(scores_of(policy, batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_logits_that_are_unknown_are_taken_from_the_model_with_a_warning(models, caplog):
    model = AutoModelForCausalLM.from_pretrained(models["llama"]).eval()
    assert TokenScorer(model, dtype=torch.float32)._head_alone
    model.register_forward_hook(lambda module, args, output: output | {"logits": output.logits.abs()})
    scorer = TokenScorer(model, dtype=torch.float32)
    assert "LlamaForCausalLM: expected logits from its output layer" in caplog.text
    (micro,) = micro_batches(batch_of(), max_places=1000, packed=False)
    expected = plain_logprobs(model, batch_of(), 1.0)[micro.index_n]
    torch.testing.assert_close(scorer.score(micro).logprobs_n.detach(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in SEPARATE_NOT])
def test_packed_sequences_score_as_padded_ones(models, name):
    batch = batch_of()
    policy = policy_of(models[name], packing_samples=True)
    packed, padded = (scores_of(policy, batch, packed=packed) for packed in (True, False))
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)


def test_attention_of_a_packed_row_sees_one_sequence_at_a_time(models, monkeypatch):
    lengths, whole = set(), scoring.sdpa_attention_forward

    def attend(module, query, *args, **kwargs):
        lengths.add(query.shape[2])
        return whole(module, query, *args, **kwargs)

    batch, policy = batch_of(), policy_of(models["llama"], packing_samples=True)
    monkeypatch.setattr(scoring, "sdpa_attention_forward", attend)
    (micro,) = micro_batches(batch, max_places=1000, packed=True)
    policy.score(micro).logprobs_n.sum().backward()
    assert lengths == {len(batch.sequences[each]) for each in micro.sequences}
    assert micro.num_places not in lengths


@pytest.mark.parametrize("window", [4, 1000])
def test_windows_of_attention_hold_in_packed_rows(tmp_path, window):
    path, batch = make_model(tmp_path, "gemma3", sliding_window=window), batch_of()
    policy = policy_of(path, packing_samples=True)
    expected = plain_logprobs(AutoModelForCausalLM.from_pretrained(path).eval(), batch, 1.0)
    torch.testing.assert_close(scores_of(policy, batch, packed=True), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SEPARATE_NOT)
def test_a_model_that_cannot_keep_packed_sequences_apart_is_refused(models, name):
    with pytest.raises(ConfigError, match=r"--packing_samples: expected a model that separates packed sequences"):
        policy_of(models[name], packing_samples=True)
    policy_of(models[name])


def test_a_model_that_ignores_positions_is_refused_for_packing(models):
    model = AutoModelForCausalLM.from_pretrained(models["llama"])
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"position_ids": None}), with_kwargs=True
    )
    with pytest.raises(ConfigError, match="hidden states that differ"):
        separate_packed(model, dtype=torch.float32)


def test_dropout_of_the_model_is_off_while_it_is_trained(tmp_path):
    policy = policy_of(make_model(tmp_path, "gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5))
    (micro,) = micro_batches(batch_of(), max_places=1000, packed=False)
    first, again = (policy.score(micro).logprobs_n for _ in range(2))
    assert first.requires_grad
    assert policy.model.training
    assert torch.equal(first, again)


def gradient_of(policy):
    (micro,) = micro_batches(batch_of(), max_places=1000, packed=False)
    policy.score(micro).logprobs_n.sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.trained.values()])


@pytest.mark.long
def test_gradient_checkpointing_computes_layers_twice_and_changes_no_gradient(models):
    plain, saving = policy_of(models["llama"]), policy_of(models["llama"], gradient_checkpointing=True)
    calls = {}
    for policy in (plain, saving):
        layer = policy.model.model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_, key=policy: calls.update({key: calls.get(key, 0) + 1}))
    torch.testing.assert_close(gradient_of(plain), gradient_of(saving))
    assert list(calls.values()) == [1, 2]


def test_a_model_that_does_not_exist_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="--model: expected a causal language model"):
        policy_of(str(tmp_path / "nowhere"))


# --- weights ---------------------------------------------------------------------------------------------------------


def stored_names(path):
    with safe_open(f"{path}/model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_have_the_checkpoints_names_and_tied_ones_are_there_once(models, name):
    assert {name for name, _ in policy_of(models[name]).weights()} == stored_names(models[name])


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied", "gpt_neox", "qwen3_moe"])
async def test_an_engine_takes_the_weights(models, tmp_path, name):
    policy = policy_of(models[name])
    engine = HFEngine(make_model(tmp_path, name, seed=1))
    batch = batch_of([[(6, 0.0)]])
    ids = batch.sequences[0].tolist()
    try:
        before = await engine.score(ids)
        await engine.update_weights(policy.weights(layout="module"), 1)
        after = await engine.score(ids)
    finally:
        await engine.close()
    expected = scores_of(policy, batch).tolist()
    assert after[-6:] == pytest.approx(expected, abs=1e-5)
    assert before[-6:] != pytest.approx(expected, abs=0.1)


class Tokenizer:
    """What a policy asks of one: to write itself."""

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


SAVED = ["qwen2", "qwen2-tied", "gpt2", "gemma2", "gpt_neox"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "changes"), [(name, {}) for name in (*SAVED, "qwen3_moe")] + [(name, {"lora_rank": 2}) for name in SAVED]
)
def test_a_saved_model_is_loaded_again_and_scores_the_same(models, tmp_path, name, changes):
    if changes:
        pytest.importorskip("peft")
    policy, batch = policy_of(models[name], **changes), batch_of()
    with torch.no_grad():
        for parameter in policy.trained.values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    expected = scores_of(policy, batch)
    policy.save(tmp_path, Tokenizer())
    assert stored_names(tmp_path) == stored_names(models[name])
    assert {path.name for path in tmp_path.iterdir()} > {"tokenizer.json", "generation_config.json", "config.json"}
    torch.testing.assert_close(scores_of(policy_of(str(tmp_path)), batch), expected, rtol=1e-4, atol=1e-4)
    assert (expected - scores_of(policy_of(models[name]), batch)).abs().max() > 1e-2
    torch.testing.assert_close(scores_of(policy, batch), expected, rtol=0, atol=0)  # saving changed nothing


def test_weights_that_are_another_models_are_refused(models):
    with pytest.raises(ConfigError, match=r"checkpoint: expected the .* trained weights"):
        policy_of(models["llama"]).load_state(policy_of(models["gpt2"]).state())


# --- adapters and the reference --------------------------------------------------------------------------------------


@pytest.mark.long
def test_adapters_are_all_that_is_trained_and_start_as_the_model(models):
    pytest.importorskip("peft")
    policy = policy_of(models["llama"], lora_rank=2)
    assert policy.trained
    assert all(".lora_" in name for name in policy.trained)
    assert torch.equal(scores_of(policy, batch_of()), scores_of(policy_of(models["llama"]), batch_of()))


@pytest.mark.long
def test_adapters_start_from_the_seed_and_leave_the_callers_random_state_alone(models):
    pytest.importorskip("peft")
    state = torch.get_rng_state()
    first, again, other = (policy_of(models["llama"], lora_rank=2, seed=seed).state() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)


def test_named_modules_get_adapters_and_unknown_ones_are_refused(models):
    pytest.importorskip("peft")
    policy = policy_of(models["llama"], lora_rank=2, lora_alpha=7, lora_dropout=0.25, target_modules=("q_proj",))
    assert all(".q_proj." in name for name in policy.trained)
    adapters = policy.model.peft_config["default"]
    assert (adapters.r, adapters.lora_alpha, adapters.lora_dropout) == (2, 7, 0.25)
    with pytest.raises(ConfigError, match="--target_modules: expected modules of the model"):
        policy_of(models["llama"], lora_rank=2, target_modules=("nothing",))


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}])
def test_the_reference_stays_where_training_began(models, changes):
    if changes:
        pytest.importorskip("peft")
    policy = policy_of(models["llama"], init_kl_coef=0.1, **changes)
    (micro,) = micro_batches(batch_of(), max_places=1000, packed=False)
    before = policy.score(micro).logprobs_n.detach()
    with torch.no_grad():
        for parameter in policy.trained.values():
            parameter += 0.1
    torch.testing.assert_close(policy.reference_logprobs(micro), before, rtol=0, atol=1e-5)
    assert (policy.score(micro).logprobs_n - before).abs().max() > 0.1


def test_without_a_kl_term_the_second_model_is_not_loaded(models):
    policy = policy_of(models["llama"])
    assert policy._reference is None
    with pytest.raises(ConfigError, match="--init_kl_coef"):
        policy.reference_logprobs(micro_batches(batch_of(), max_places=1000, packed=False)[0])


@pytest.mark.long
def test_a_tiny_checkpoint_in_bfloat16_keeps_float32_weights_for_engines_on_a_cpu(tmp_path):
    """Rounded to bfloat16, small updates would be lost and the engine would not be the policy."""
    path = make_tiny_qwen2(tmp_path)
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    policy = policy_of(str(path))
    assert policy.model.checkpoint_dtype == torch.bfloat16
    assert {tensor.dtype for _, tensor in policy.weights()} == {torch.float32}
