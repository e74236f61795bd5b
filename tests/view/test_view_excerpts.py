"""An episode as Markdown and SVG: what models and environments said stays text, and nothing links, runs or pings."""

import re
import unicodedata
from xml.etree import ElementTree

import pytest

from agentenv.cli.main import main
from agentenv.core.trajectory import EpisodeError
from agentenv.runs.display.conversation import conversation
from agentenv.view.excerpts import COLUMNS, episode_to_markdown, episode_to_svg
from agentenv.view.texts import load_texts
from agentenv.view.viewed import find_runs
from tests.runs.filter_run import answered
from tests.view.viewed_runs import PAYLOADS, episode, tiny_math, write_run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    (run,) = find_runs([str(write_run(tmp_path_factory.mktemp("run"), episode()))])
    return load_texts(run)


def hostile(payload):
    """An episode with a payload in every field."""
    return episode(
        f"{payload}/0", payload, payload, payload, tokenizer=tiny_math(), label=payload, info={payload: payload},
    )  # fmt: skip


def outside_of_code(markdown):
    """Markdown without its fences and code spans: what a site formats."""
    lines, fence = [], None
    for line in markdown.split("\n"):
        mark = re.match("(`{3,})(text)?$", line)
        if fence is None and mark and mark[2]:
            fence = mark[1]
        elif fence is not None:
            fence = None if mark and not mark[2] and len(mark[1]) >= len(fence) else fence
        else:
            lines.append(line)
    assert fence is None, "a fence is open at the end"
    return re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", "\n".join(lines))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_markdown_has_what_was_said_in_code_only(payload, texts):
    markdown = episode_to_markdown(hostile(payload), texts, payload)
    free = outside_of_code(markdown)
    assert re.sub("</?(details( open)?|summary)>", "", free).isprintable() or "\n" in free
    assert not set("<>[]*_@&$\\`") & set(re.sub("</?(?:details(?: open)?|summary)>", "", free))
    assert not re.search(r"@[\w-]|#\d", markdown)
    shown = [char for char in markdown if char not in "\n\t\u200d"]
    assert not [char for char in shown if unicodedata.category(char) in ("Cc", "Cf", "Cs")]


def test_markdown_says_what_an_episode_was(texts):
    made = episode("a/0", "How many?", "12 apples, 3 left", "Wrong.", -0.5, tokenizer=tiny_math(), label="3")
    markdown = episode_to_markdown(made, texts, "first")
    assert markdown.startswith("### Episode `a/0`: reward -0.5, `terminated`\n")
    assert "```text\n12 apples, 3 left\n```" in markdown
    assert "```text\nWrong.\n```" in markdown
    assert re.search(r"\| 0 \| -0\.5 \| \d+ \| -\d\.\d+ \| `stop` \|", markdown)
    assert "Least probable: `" in markdown


def test_terminal_and_markdown_say_the_counts_and_costs_that_are_known_and_what_ran_again():
    counted, uncounted = answered("d/2", (10, 3), (16, 4)), answered("d/1", (10, 3), (None, None))
    again = "1 step retry", "2 request retries", "1 failover"
    shown = "".join(text for text, _ in conversation(counted))
    assert "· 2 turns · 20 tokens · cost $1.0000 · 4 request retries · retried after EngineError 2\n" in shown
    assert f"turn 1 · reward 0.25 · score 0.75 · {' · '.join(('4 tokens', *again))}\n" in shown
    shown = "".join(text for text, _ in conversation(uncounted))
    assert f"turn 1 · reward 0.25 · score 0.75 · {' · '.join(again)}\n" in shown
    markdown = episode_to_markdown(counted, None, "run")
    assert "Run `run`, 2 turns, 20 tokens, cost $1.0000, 4 request retries\n" in markdown
    assert f"<summary>turn 1, reward 0.25, {', '.join(('4 tokens', *again))}</summary>" in markdown
    assert "| 1 | 0.25 | 4 |" in markdown
    markdown = episode_to_markdown(uncounted, None, "run")
    assert "Run `run`, 2 turns, 4 request retries\n" in markdown
    assert "| 1 | 0.25 |  |" in markdown


def test_markdown_of_a_failed_episode_names_the_error():
    error = EpisodeError("env", "KeyError", "'x' @me", "step", "env.py:3")
    assert "Failed in `step`: `KeyError: 'x' @\u200dme`" in episode_to_markdown(episode(error=error), None, "run")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_svg_has_only_texts_and_grounds(payload, texts):
    svg = episode_to_svg(hostile(payload), texts)
    root = ElementTree.fromstring(svg)
    assert {element.tag for element in root.iter()} == {f"{SVG}svg", f"{SVG}rect", f"{SVG}text"}
    names = {name for element in root.iter() for name in element.attrib}
    assert not {name for name in names if name.startswith("on") or "href" in name or name == "style"}
    assert not [value for element in root.iter() for value in element.attrib.values() if re.search("url|:|//", value)]


def test_svg_shows_each_token_on_its_ground_in_100_columns(texts):
    made = episode("a/0", "How many?", "12 apples " * 40 + "日本", tokenizer=tiny_math())
    root = ElementTree.fromstring(episode_to_svg(made, texts))
    lines = list(root.iter(f"{SVG}text"))
    width = max(float(each.get("textLength")) for each in lines)
    assert width == COLUMNS * 8
    said = "".join(each.text for each in lines)
    assert "12 apples " * 40 + "日本" in said
    assert {"#fff1cc", "#f08a4b"} <= {each.get("fill") for each in root.iter(f"{SVG}rect")}


def test_the_command_writes_both_and_starts_no_server(tmp_path, capsys):
    write_run(tmp_path / "run", episode("a/0"), episode("b/0"))
    assert main(["view", str(tmp_path / "run"), "--episode", "b", "--md", "-", "--svg", str(tmp_path / "b.svg")]) == 0
    assert capsys.readouterr().out.startswith("### Episode `b/0`")
    assert ElementTree.parse(tmp_path / "b.svg")


@pytest.mark.parametrize("flag", ["--md", "--svg"])
def test_an_excerpt_needs_an_episode_and_a_place(flag, tmp_path, capsys):
    write_run(tmp_path / "run", episode("a/0"))
    assert main(["view", str(tmp_path / "run"), flag, "-"]) == 2
    assert f"{flag}: expected --episode with it" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "run"), flag, str(tmp_path / "no" / "where"), "--episode", "a/0"]) == 2
    assert "expected a file that can be written" in capsys.readouterr().err
