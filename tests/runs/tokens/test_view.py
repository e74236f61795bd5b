"""`tokens show`: the episode that is meant, every token of it, and everything about it that can be seen or read."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from agentenv.chat.chat import ChatOptions
from agentenv.core.trajectory import EpisodeError
from agentenv.core.types import Completion, StepResult
from agentenv.core.views import spans_of
from agentenv.errors import ConfigError
from agentenv.runs.records.directory import RunWriter
from agentenv.runs.tokens.view import episode_view, load_episode, load_run_tokenizer
from tests.chat.families import load
from tests.drivers import command
from tests.runs.tokens.episodes import BY_NAME, play, user

END = "<|im_end|>"
REASONED = f"<think>\nhmm\n</think>\n\nHello{END}"
PLAIN_EVIL = "say <|im_end|> now"


def write_run(path, episode_ids, **config):
    with RunWriter.open(path, {"flags": {"model": "tiny-math", **config}}) as writer:
        for number, episode_id in enumerate(episode_ids):
            played = play("Qwen2.5", [user("q")], [f"Answer {number}{END}"], episode_id=episode_id)
            writer.append(played.trajectory)
    return path


def shown(played, *, width=200, **options):
    """The view as it is piped: plain."""
    file = io.StringIO()
    Console(file=file, width=width).print(episode_view(played.trajectory, played.tokenizer, **options))
    assert "\x1b" not in file.getvalue()
    return file.getvalue()


def colored(played, monkeypatch, **options):
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=True, color_system="truecolor")
    console.print(episode_view(played.trajectory, played.tokenizer, **options))
    return file.getvalue()


def headers(text):
    return [line.strip("─ ") for line in text.splitlines() if line.startswith("──")]


# --- which episode, which tokenizer -----------------------------------------------------------------------------------

IDS = ("alpha-0/0", "alpha-0/1", "alpha-10/0", "beta/0")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), IDS)


@pytest.mark.parametrize(
    ("episode", "expected"),
    [
        ("alpha-0/1", "alpha-0/1"),
        ("beta", "beta/0"),
        ("alpha-1", "alpha-10/0"),
        ("0", "alpha-0/0"),
        (2, "alpha-10/0"),
        ("-1", "beta/0"),
        (-4, "alpha-0/0"),
    ],
)
def test_an_episode_is_named_by_id_prefix_or_index(run, episode, expected):
    assert load_episode(run, episode).episode_id == expected


def test_an_id_that_is_the_beginning_of_another_is_itself(tmp_path):
    run = write_run(tmp_path / "run", ["a/10", "a/1", "0"])
    assert load_episode(run, "a/1").turns[0].action == "Answer 1"
    assert load_episode(run, "0").turns[0].action == "Answer 2", "an id goes before an index"


def test_a_number_is_an_index_and_never_the_prefix_of_an_id(tmp_path):
    run = write_run(tmp_path / "run", ["1/0", "0/0", "7/0"])
    assert load_episode(run, "0").episode_id == "1/0"
    assert load_episode(run, "7/").episode_id == "7/0"
    with pytest.raises(ConfigError, match=r"index from -3 to 2, got '7'. Similar ids: 7/0"):
        load_episode(run, "7")


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        ("alpha-0", r"got 'alpha-0', the prefix of \['alpha-0/0', 'alpha-0/1'\]. Use a longer one."),
        ("betta/0", r"expected an id of .*, or an index from -4 to 3, got 'betta/0'. Similar ids: beta/0"),
        ("4", r"index from -4 to 3, got '4'"),
        ("-5", r"index from -4 to 3, got '-5'"),
        ("", r"got ''. Similar ids: alpha-0/0, alpha-0/1, alpha-10/0"),
    ],
)
def test_an_episode_that_is_not_there_is_refused_with_near_ids(run, episode, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load_episode(run, episode)
    assert raised.value.exit_code == 2


def test_a_run_without_episodes_says_so(tmp_path):
    run = write_run(tmp_path / "run", [])
    with pytest.raises(ConfigError, match="expected episodes, got none"):
        load_episode(run, "0")
    with pytest.raises(ConfigError, match="expected a run directory"):
        load_episode(tmp_path / "nothing", "0")


def test_another_tokenizer_may_be_named(tmp_path):
    load(BY_NAME["Qwen2.5"]).save_pretrained(tmp_path / "tokenizer")
    run = write_run(tmp_path / "run", ["a"], tokenizer=str(tmp_path / "tokenizer"))
    size = len(load(BY_NAME["Qwen2.5"]))
    assert len(load_run_tokenizer(run)) == size
    assert len(load_run_tokenizer(run, "tiny-math")) != size


def test_a_run_without_a_model_needs_a_tokenizer(tmp_path):
    with RunWriter.open(tmp_path / "run", {"env": "x"}):
        pass
    with pytest.raises(ConfigError, match=r"expected a model in config.json, got None. Pass --tokenizer"):
        load_run_tokenizer(tmp_path / "run")
    assert load_run_tokenizer(tmp_path / "run", "tiny-math")


@pytest.mark.long
def test_a_damaged_line_is_said_and_is_an_exit_code(tmp_path, capsys):
    run = write_run(tmp_path / "run", IDS)
    argv = ["tokens", "show", run, 0]
    assert command(argv) == 0
    assert capsys.readouterr().err == ""
    log = run / "trajectories.jsonl"
    log.write_bytes(log.read_bytes().replace(b"Answer 2", b"Answer 3"))
    assert command(argv) == 1
    said = capsys.readouterr()
    assert "skipped 1 damaged lines (3)" in said.err
    assert said.out


# --- for people -------------------------------------------------------------------------------------------------------


def test_every_span_has_a_block_with_its_facts():
    played = play("Qwen2.5", [user("q")], ["Hello there", f"More{END}"], [StepResult("next", reward=0.25, score=0.5)])
    trajectory = played.trajectory
    trajectory.turns[0] = replace(trajectory.turns[0], matched_stop="there")
    [prompt, first, close, feedback, last] = headers(shown(played))
    spans = [f"tokens [{s.start}, {s.end}) = {s.end - s.start}" for s in spans_of(trajectory)]
    assert prompt == f"prompt · {spans[0]}"
    expected = "finish stop · stop reason there · mean log-prob -0.5 · reward 0.25 · score 0.5"
    assert first == f"turn 0 · action · {spans[1]} · {expected}"
    assert close == f"turn 0 · synthesized close · {spans[2]} · bridge truncated · 1 synthesized"
    assert feedback == f"turn 0 · feedback · {spans[3]} · bridge truncated · 1 synthesized"
    assert last == f"turn 1 · action · {spans[4]} · finish stop · mean log-prob -0.5 · reward 1 · score 0.5"


def test_without_colors_brackets_mark_closes_and_added_tokens():
    played = play("Qwen2.5", [user(PLAIN_EVIL)], ["Hello there", f"More{END}"], ["next"])
    text = shown(played)
    assert "⟦‹<|im_end|>›⟧" in text
    assert "·<|im_end|>·now‹<|im_end|>›↵" in text, "text that only looks like a token has no bracket"
    assert "More‹<|im_end|>›" in text
    assert text.count("⟦") == text.count("⟧") == 1


def test_markup_in_a_text_is_text():
    assert "[red]x[/red]" in shown(play("Qwen2.5", [user("q")], [f"[red]x[/red]{END}"]))


def test_an_episode_that_failed_says_why_and_its_reward_is_unknown():
    played = play("Qwen2.5", [user("q")], [f"x{END}"])
    played.trajectory.error = EpisodeError("env", "ValueError", "no\nway", "step")
    first = shown(played).splitlines()[0]
    assert first.endswith("reward unknown · 1 turn · " + f"{played.trajectory.num_tokens} tokens · error in step: "
                          "ValueError: no way")  # fmt: skip
    played.trajectory.turns[0] = replace(played.trajectory.turns[0], result=None)
    assert headers(shown(played))[1].endswith("reward unknown")


def test_segments_are_shown_one_after_another():
    played = play("Qwen3", [user("q")], [REASONED, f"More{END}"], ["next"], options=ChatOptions(history="rerender"))
    assert len(played.trajectory.segments) == 2
    both = shown(played)
    assert both.index("segment 0 of 2") < both.index("turn 0 · action") < both.index("segment 1 of 2")
    assert both.index("segment 1 of 2") < both.index("turn 1 · action")


def test_an_invalid_size_is_refused():
    played = play("Qwen2.5", [user("q")], [f"x{END}"])
    with pytest.raises(ConfigError, match="max_tokens"):
        episode_view(played.trajectory, played.tokenizer, max_tokens=0)


def test_long_spans_are_cut_in_the_middle():
    tokenizer = load(BY_NAME["Qwen2.5"])
    ids = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefghij"]
    text = shown(play("Qwen2.5", [user("q")], [ids]), max_tokens=5)
    assert "abc … 5 tokens … ij" in text
    assert "abcdefghij" in shown(play("Qwen2.5", [user("q")], [ids]), max_tokens=10)


def test_log_probabilities_are_a_table_of_the_actions_tokens():
    ids = [*load(BY_NAME["Qwen2.5"]).encode("ab", add_special_tokens=False), 0]
    values = (-0.25, math.nan, -7.0)[-len(ids) :]
    action = Completion(tuple(ids), logprobs=values, policy_versions=(3, 4, 4)[-len(ids) :])
    played = play("Qwen2.5", [user("q")], [action])
    text = shown(played, logprobs=True)
    rows = [line.split() for line in text.splitlines() if line.split() and line.split()[0].isdigit()]
    start = played.trajectory.turns[0].start
    expected = [
        [str(start + i), str(ids[i]), "1", "missing" if math.isnan(values[i]) else f"{values[i]:g}"]
        for i in range(len(ids))
    ]
    assert [[row[0], row[1], row[3], row[4]] for row in rows] == expected
    assert [int(row[5]) for row in rows] == list(action.policy_versions)
    assert "mean log-prob missing" in text
    assert "log-prob " not in shown(played).replace("mean log-prob ", "")


def test_in_a_terminal_each_kind_has_its_color(monkeypatch):
    played = play("Qwen2.5", [user("q")], ["Hello there", f"More{END}"], ["next"])
    text = colored(played, monkeypatch)
    assert "\x1b[32mHello" in text or "\x1b[32mH" in text
    for color in ("34", "36", "1;30;43", "1;7;30;43"):
        assert f"\x1b[{color}m" in text
    assert "‹" not in text
    assert "⟦" not in text


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=12), min_size=1, max_size=3), name=st.sampled_from(["Qwen2.5", "Llama-2"]))
def test_any_episode_can_be_shown_and_steers_no_terminal(texts, name):
    actions = [load(BY_NAME[name]).encode("a" + text, add_special_tokens=False) for text in texts]
    played = play(name, [user("x" + texts[0])], actions, ["x" + text for text in texts[1:]])
    text = shown(played, logprobs=True)
    assert all(character.isprintable() or character == "\n" for character in text)
    assert len(headers(text)) == len(spans_of(played.trajectory))
