"""The tokenizer in a run directory: the record is read without the model, and a run does not depend on it."""

import os

import pytest

import agentenv
from agentenv.engines.models import load_stop_token_ids, load_tokenizer, resolve_model
from agentenv.engines.scripted import PlainTextTokenizer
from agentenv.errors import ConfigError
from agentenv.runs.records.directory import RunWriter, read_config
from agentenv.runs.records.tokenizer import keep_tokenizer
from agentenv.runs.tokens.view import load_run_tokenizer
from agentenv.testing.tokenizers import CharTokenizer
from agentenv.view.texts import load_texts
from agentenv.view.viewed import find_runs


def test_a_run_directory_has_the_tokenizer_and_the_stops_of_a_model_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with RunWriter.open(tmp_path / "run", {"flags": {"model": "elsewhere/model"}}):
        pass
    tokenizer = load_tokenizer(resolve_model("tiny-math"))
    keep_tokenizer(tmp_path / "run", tokenizer, (2, 7))
    (tmp_path / "run").rename(tmp_path / "copied")
    found = load_run_tokenizer(tmp_path / "copied")
    assert (found.get_vocab(), found.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)
    assert load_stop_token_ids(str(tmp_path / "copied" / "tokenizer")) == (2, 7)


def test_a_resumed_run_does_not_write_the_tokenizer_again(tmp_path):
    class Saved:
        def save_pretrained(self, folder):
            folder.mkdir()

    keep_tokenizer(tmp_path, Saved(), ())
    (tmp_path / "tokenizer" / "mark").touch()
    keep_tokenizer(tmp_path, Saved(), ())
    assert (tmp_path / "tokenizer" / "mark").exists()
    assert os.listdir(tmp_path) == ["tokenizer"]


def test_a_tokenizer_that_cannot_be_kept_is_left_out(tmp_path, caplog):
    class Failing:
        def save_pretrained(self, folder):
            folder.mkdir()
            raise OSError(28, "No space left on device")

    keep_tokenizer(tmp_path, CharTokenizer(), ())
    assert not caplog.text
    keep_tokenizer(tmp_path, Failing(), ())
    assert "No space left on device" in caplog.text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("tokenizer", [None, CharTokenizer()], ids=["kept", "not kept"])
def test_a_run_of_a_given_engine_is_read_with_its_tokenizer_or_with_none(tmp_path, tokenizer):
    class Ends(agentenv.AgentInstance):
        async def step(self, states):
            return agentenv.StepResult(reward=1.0, terminated=True)

    engine = agentenv.ScriptedEngine(["sieben é"], tokenizer)
    (episode,) = agentenv.rollout(
        Ends, [{"prompt": "Guess.", "label": ""}], engine=engine, out=str(tmp_path / "run"), progress="none"
    )
    assert read_config(tmp_path / "run")["config"]["flags"]["model"] == ""
    (viewed,) = find_runs([str(tmp_path / "run")])
    if tokenizer is None:
        assert "sieben é" in load_run_tokenizer(tmp_path / "run").decode(episode.token_ids)
        texts, _ = load_texts(viewed).of([*episode.token_ids, -1])
        assert "".join(texts) == "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\nsieben é<|im_end|>"
        return
    for load in (lambda: load_run_tokenizer(tmp_path / "run"), lambda: load_texts(viewed)):
        with pytest.raises(ConfigError, match="Pass --tokenizer"):
            load()


def test_a_run_that_starts_again_without_episodes_keeps_the_tokenizer_of_its_own_model(tmp_path):
    for text in ("failed", "right"):
        with RunWriter.open(tmp_path / "run", {"flags": {}}):
            keep_tokenizer(tmp_path / "run", PlainTextTokenizer(text), ())
    assert load_run_tokenizer(tmp_path / "run").chat_template == "right"
