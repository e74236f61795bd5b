"""A run in a notebook: a table of its results and its first task, in which nothing that a model said is markup."""

from html.parser import HTMLParser

import pytest

import agentenv
from agentenv.cli.main import main
from agentenv.errors import ConfigError, InfraError
from agentenv.runs import view_process
from agentenv.runs.rollout import load_run
from agentenv.runs.view_process import ViewProcess
from tests.view.viewed_runs import PAYLOADS, episode, hostile_run, write_run


class Tags(HTMLParser):
    """Tags with attributes, and texts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = set(), []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add((tag, *attrs))

    def handle_data(self, data):
        self.texts.append(data)


def test_a_run_shows_its_results_and_the_first_task(tmp_path):
    write_run(tmp_path, episode("a/0"), episode("a/1", action="4 pears", reward=0.25), episode("b/0", action="other"))
    shown = Tags(load_run(tmp_path)._repr_html_())
    assert {"episodes", "a/0", "a/1", "4 pears", "0.25", f"agentenv view {tmp_path}"} <= set(shown.texts)
    assert "other" not in shown.texts


@pytest.mark.parametrize("number", range(0, len(PAYLOADS), 5))
def test_nothing_in_it_is_markup_of_a_model(tmp_path, number):
    hostile = load_run(hostile_run(tmp_path))
    run = agentenv.Run(hostile.trajectories[number:], hostile.metrics, hostile.out)
    shown = Tags(run._repr_html_())
    assert shown.tags <= {(tag,) for tag in ("table", "caption", "tr", "th", "td", "br", "p", "code")}
    visible = "\n".join(shown.texts)
    assert all(char.isprintable() or char in "\n\t" for char in visible.replace("\xa0", " "))


def test_an_empty_run_and_one_that_was_not_written_have_no_page(tmp_path):
    write_run(tmp_path)
    assert "<table>" in load_run(tmp_path)._repr_html_()
    run = agentenv.Run((), load_run(tmp_path).metrics)
    with pytest.raises(ConfigError, match=r"^Run.view: expected a run directory"):
        run.view()


def test_the_page_of_a_run_is_a_process_that_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(view_process, "_CLOSE_S", 200.0)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    write_run(tmp_path / "run", episode("a/0"))
    page = load_run(tmp_path / "run").view()
    assert page.address.startswith("http://127.0.0.1:")
    assert "#token=" in repr(page)
    page.close()
    assert page._process.poll() == 0
    page.close()


def test_a_page_that_cannot_start_says_why(tmp_path):
    with pytest.raises(InfraError, match="expected a run directory or a folder of runs"):
        ViewProcess.start(tmp_path / "nowhere")


def test_rollout_refuses_the_flag_of_the_command():
    with pytest.raises(ConfigError, match=r"^view: .*Run.view"):
        agentenv.rollout("math_retry", model="tiny-math", view=True)


def test_run_with_the_flag_serves_its_page_until_it_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(view_process, "_CLOSE_S", 200.0)
    monkeypatch.delenv("DISPLAY", raising=False)
    pages = []
    monkeypatch.setattr(ViewProcess, "wait", lambda page: pages.append((page, page._process.poll())))
    flags = ["--env", "math_retry", "--engine", "scripted", "--limit", "1", "--out", str(tmp_path / "out"), "--view"]
    assert main(["run", *flags]) == 0
    ((page, ended),) = pages
    said = capsys.readouterr()
    assert page.address in said.err
    assert ended is None
    assert page._process.poll() == 0
    assert f"agentenv view {tmp_path / 'out'}" in said.out
