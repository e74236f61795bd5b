"""The page of `agentenv view` in Chromium: a run of 100,000 episodes and 1 GB, and an episode of 32,768 tokens.

    python benchmarks/view.py --repeats 5

The server is the command, in its own process. Each figure is the least of several, since the machine may be busy:
the browser draws in software, so figures are those of scripts and answers, not of frames. "On the page" is when the
text stands in the document, as an observer in the page sees it; times begin with the navigation, or with the change of
the address. The heap is read after garbage collection. `without an index` opens the run after its index.jsonl was
deleted, which the server then makes again. Chromium is found as the tests find it, or by AGENTENV_CHROMIUM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from common import ROOT, machine

from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.runs.metrics import aggregate, summarize
from agentenv.runs.records.directory import RunWriter, write_json
from agentenv.runs.records.index import FIELDS, HEADER, INDEX, TRAJECTORIES, encode_row, make_row
from agentenv.runs.records.lines import crc_of, encode_line

sys.path.insert(0, str(ROOT))
from tests.view.browser.conftest import FLAGS, NAMES  # after the path is set

SIBLINGS, TEMPLATES = 8, 64
HIDDEN_ID = "0000000/0"
TEXT = "12 + 34 = 46, so 46. The sum of both is 46 and not 45, so the answer is 46.\n"
PLACES = [list(FIELDS).index(name) for name in ("offset", "length", "episode_id", "group_id", "crc")]
OBSERVER = """() => {
    window.seen = (holds) => new Promise(done => {
        const look = () => {
            if (!holds()) return false;
            observer.disconnect();
            done(performance.now());
            return true;
        };
        const observer = new MutationObserver(look);
        observer.observe(document, {subtree: true, childList: true, characterData: true, attributes: true});
        look();
    });
    window.go = async (hash, holds) => {
        const began = performance.now();
        location.hash = hash;
        return (await seen(holds)) - began;
    };
    window.overview = seen(() => document.querySelector('.tile-value')?.textContent === '%s');
    window.first = seen(() => document.querySelector('.tile-value'));
}"""

FILTERS = ("reward<1 act>400", "info.correct>0", "group.spread>0 turn.reward>0")
SHOWN = "([hash, query]) => go(hash, () => document.querySelector('.summary')?.dataset.query === query)"
RECOLOR = """([by, selector]) => {
    const select = document.querySelector('.color-bar select'), began = performance.now();
    select.value = by;
    select.dispatchEvent(new Event('change', {bubbles: true}));
    return seen(() => document.querySelector(selector) !== null).then(at => at - began);
}"""


def play(tokenizer: Any, number: int, num_tokens: int) -> Trajectory:
    """Return an episode of two turns with `num_tokens` sampled tokens in all."""
    task = Task([{"role": "user", "content": f"What is 12 + 34, for the {number}th time?"}], "46", task_id="0000000")
    trajectory = Trajectory(task, 10**6, HIDDEN_ID, "0000000")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    sampled = encode(TEXT * (num_tokens // 2 // len(encode(TEXT)) + 1))[: num_tokens // 2]
    trajectory.append_observation(encode(f"<|im_start|>user\n{task.prompt[0]['content']}<|im_end|>\n"))
    for turn in range(2):
        ids = tuple(sampled[: len(sampled) - number])
        logprobs = tuple(-0.01 - (k * (number + 3)) % 97 / 40 for k in range(len(ids)))
        trajectory.append_turn(Completion(ids, logprobs=logprobs), tokenizer.decode(list(ids)), generate_s=0.5)
        reward = float(turn == 1 and number % 5 < 3)
        info = {"correct": reward, "outcome": "right" if reward else "wrong"}
        trajectory.set_result(
            StepResult("" if turn else "Try again.", reward, terminated=turn == 1, score=reward, info=info)
        )
        if not turn:
            trajectory.append_observation(encode("<|im_start|>user\nTry again.<|im_end|>\n"), bridge="exact")
    trajectory.finish(StopReason.TERMINATED)
    return trajectory


def make_run(folder: Path, num_episodes: int, tokens: int) -> list[bytes]:
    """Write a run of copies of some episodes, each with its id; return the lines of four more."""
    tokenizer = load_tokenizer(resolve_model("tiny-math"))
    with RunWriter.open(folder, {"flags": {"env": "math_retry", "model": "tiny-math"}}):
        pass
    episodes = [play(tokenizer, number, tokens) for number in range(TEMPLATES)]
    summaries = [summarize(each) for each in episodes]
    parts = [encode_line(each).partition(b'"episode":')[2][:-2] for each in episodes]
    rows = [make_row(e, s, 0, 0, "") for e, s in zip(episodes, summaries, strict=True)]

    def line_of(number: int) -> bytes:
        task = b"%07d" % (number // SIBLINGS)
        episode = parts[number % TEMPLATES].replace(HIDDEN_ID.encode(), b"%b/%d" % (task, number % SIBLINGS))
        episode = episode.replace(b'"0000000"', b'"%b"' % task)
        return b'{"v":3,"crc":"%08x","episode":%b}\n' % (zlib.crc32(episode, 3), episode)

    offset, crc = 0, zlib.crc32(HEADER)
    with (folder / TRAJECTORIES).open("wb") as record, (folder / INDEX).open("wb") as index:
        index.write(HEADER)
        for number in range(num_episodes):
            line, row = line_of(number), list(rows[number % TEMPLATES])
            task = f"{number // SIBLINGS:07d}"
            own = (offset, len(line), f"{task}/{number % SIBLINGS}", task, crc_of(line))
            for place, value in zip(PLACES, own, strict=True):
                row[place] = value
            text = encode_row(row, crc)
            assert text is not None
            crc = zlib.crc32(text, crc)
            record.write(line)
            index.write(text)
            offset += len(line)
    found = aggregate(summaries, num_samples=SIBLINGS)
    write_json(folder / "metrics.json", found.to_dict())
    return [line_of(num_episodes + k) for k in range(64)]


def make_long(folder: Path, num_tokens: int) -> Path:
    with RunWriter.open(folder, {"flags": {"env": "math_retry", "model": "tiny-math"}}) as writer:
        writer.append(play(load_tokenizer(resolve_model("tiny-math")), 0, num_tokens))
    return folder


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, float, int]]:
    """Yield the address of `agentenv view`, the seconds until it was printed, and the process id."""
    began = time.perf_counter()
    argv = [sys.executable, "-m", "agentenv.cli", "view", str(folder), "--no_open", "--no_token"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "http://" in line:
                took = time.perf_counter() - began
                yield "http://" + line.partition("http://")[2].split()[0].rstrip("/") + "/", took, process.pid
                return
        raise SystemExit("agentenv view: expected an address, got none.")
    finally:
        process.terminate()
        process.wait()


class Figures:
    """The least value of each figure, in the order of their first measurements."""

    def __init__(self) -> None:
        self.least: dict[str, tuple[float, str, str]] = {}

    def add(self, name: str, target: str, value: float, unit: str = "ms") -> None:
        known = self.least.get(name, (value, "", ""))[0]
        self.least[name] = (min(known, value), unit, target)
        print(f"  {name}: {value:,.1f} {unit}", file=sys.stderr, flush=True)

    def table(self) -> str:
        rows = [f"| {name} | {value:,.0f} {unit} | {target} |" for name, (value, unit, target) in self.least.items()]
        return "\n".join(["| | measured | target |", "|---|---:|---:|", *rows])


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_page(browser: Any, address: str, place: str, num: int) -> Any:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(120_000)
    page.add_init_script(f"({OBSERVER % f'{num:,}'})()")
    page.goto(f"{address}#{place}")
    return page


def measure_run(browser: Any, folder: Path, num: int, lines: list[bytes], figures: Figures) -> None:
    with serving(folder) as (address, took, pid):
        figures.add("`agentenv view`, until the address is printed", "1,000 ms", 1000 * took)
        before = rss_mb(pid)
        page = open_page(browser, address, "/0/overview", num)
        every = page.evaluate("overview")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        figures.add("first contentful paint", "300 ms", paint)
        figures.add(f"overview, first numbers of {num:,} episodes", "1,000 ms", page.evaluate("first"))
        figures.add(f"overview, all {num:,} counted", "1,000 ms", every)
        begin = "() => go('#/0/episodes?q=', () => document.querySelectorAll('[data-episode]').length > 9)"
        figures.add("table of all rows, after the overview", "1,000 ms", page.evaluate(begin))
        for query in FILTERS:
            address_of = f"#/0/episodes?q={quote(query)}"
            whole = page.evaluate(SHOWN, [address_of, query])
            found = float(page.locator(".summary").get_attribute("data-ms"))
            figures.add(f"filter `{query}`: rows found", "50 ms", found)
            figures.add(f"filter `{query}`: on the page", "", whole)
        figures.add("sort by tokens: on the page", "250 ms", page.evaluate(SHOWN, ["#/0/episodes?q=&sort=-act", ""]))
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        figures.add("heap of the page", "150 MB", page.evaluate("performance.memory.usedJSHeapSize") / 1e6, "MB")
        figures.add("memory of the server, more than at its start", "150 MB", rss_mb(pid) - before, "MB")
        measure_live(page, folder / TRAJECTORIES, num, lines, figures)
        page.close()


def measure_live(page: Any, record: Path, num: int, lines: list[bytes], figures: Figures) -> None:
    """Append lines, and take the time until the page counts them; the record is cut again."""
    size = record.stat().st_size
    page.evaluate("go('#/0/overview', () => document.querySelector('.tile-value'))")
    for count, line in enumerate(lines[:8], start=1):
        page.evaluate(
            "text => { window.grown = seen(() => document.querySelector('.tile-value')?.textContent === text) }",
            f"{num + count:,}",
        )
        page.wait_for_timeout(400)  # the page is at rest
        with record.open("ab") as file:
            file.write(line)
        began = 1000 * time.time()
        shown_at = page.evaluate("async () => performance.timeOrigin + await grown")
        figures.add("a new episode, from the file to the page", "300 ms", shown_at - began)
    os.truncate(record, size)


def measure_without_index(browser: Any, folder: Path, num: int, figures: Figures) -> None:
    (folder / INDEX).unlink()
    with serving(folder) as (address, _, _):
        page = open_page(browser, address, "/0/overview", num)
        figures.add("without an index: first numbers", "3,000 ms", page.evaluate("first"))
        figures.add("without an index: all counted", "", page.evaluate("overview") / 1000, "s")
        page.close()


def measure_tokens(browser: Any, folder: Path, num_tokens: int, figures: Figures, repeats: int) -> None:
    with serving(folder) as (address, _, _):
        page = open_page(browser, address, "/0/overview", 1)
        page.evaluate("overview")
        place = "#/0/episode/0000000%2F0"
        drawn = "() => document.querySelector('.k-action .tokens')?.textContent.length > 99"
        for repeat in range(repeats + 1):
            took = page.evaluate(f"() => go('{place}', {drawn})")
            name = "open, with its answer at hand" if repeat else "open the first time, with its answer"
            figures.add(f"episode of {num_tokens:,} tokens: {name}", "300 ms" if repeat else "", took)
            figures.add("recolor it", "150 ms", page.evaluate(RECOLOR, ["mask", ".center .trained"]))
            page.evaluate(RECOLOR, ["logprob", ".center .p0"])
            page.wait_for_timeout(200)
            page.evaluate("() => go('#/0/overview', () => document.querySelector('.tiles'))")
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the long episode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="folder of the runs, which is used again")
    parser.add_argument("--small", action="store_true", help="2,000 episodes and 4,096 tokens, as a smoke test")
    options = parser.parse_args()
    num, tokens = (2000, 4096) if options.small else (options.episodes, options.tokens)
    from playwright.sync_api import sync_playwright

    path = os.environ.get("AGENTENV_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not path:
        raise SystemExit("Chromium: expected one, got none. apt-get install --no-install-recommends chromium")
    figures = Figures()
    with contextlib.ExitStack() as stack:
        root = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shutil.rmtree(root / "run", ignore_errors=True)
        lines = make_run(root / "run", num, 600)
        long = root / "long" if (root / "long").exists() else make_long(root / "long", tokens)
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, "--enable-precise-memory-info"])
        stack.callback(browser.close)
        for _ in range(options.repeats):
            measure_run(browser, root / "run", num, lines, figures)
        measure_tokens(browser, long, tokens, figures, options.repeats)
        measure_without_index(browser, root / "run", num, figures)
        size = (root / "run" / TRAJECTORIES).stat().st_size
        load = os.getloadavg()[0]
        print(f"{machine()}; Chromium {browser.version}; load {load:.1f}; {num:,} episodes, {size / 1e9:.2f} GB\n")
    print(figures.table())


if __name__ == "__main__":
    main()
