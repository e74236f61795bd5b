"""README.md and docs/ as a newcomer follows them: every block of a page runs, in order, in an empty folder.

The line before a block marks how it runs:

- `<!-- run -->`: execute it.
- `<!-- run: long -->`: execute it with the long tests (more than about 10 s).
- `<!-- run: file NAME -->`: write it to NAME.
- `<!-- run: slow, vllm -->`: execute it with the slow tests where vLLM is installed; also `ray` and `transformers`.
- `<!-- not run: REASON -->`: only show it.

The folder of a page has `examples` as a checkout has it.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentenv.cli.flags import parse
from agentenv.core.dataset import read_tasks
from agentenv.episode.registry import builtin_datasets
from agentenv.runs.config import FREE_ON_RESUME, RunConfig
from agentenv.training.logs.records import FIXED_ON_RESUME

ROOT = Path(__file__).parents[1]
GENERATED = {"cli.md", "environment.md", "rewards.md", "errors.md", "tables.md", "clients.md"}
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name not in GENERATED or
         p.parent.name != "reference")]  # fmt: skip
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
README = TEXTS["README.md"]
EVERYTHING = "\n".join(TEXTS.values())
MAKEFILE = (ROOT / "Makefile").read_text()
BLOCK = re.compile(
    r"^(?:<!-- ((?:not )?run[^>]*?) -->\n)?```(bash|python|sh|console|shell|py)\b[^\n]*\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"run|run: long|run: slow, (?:vllm|ray|transformers)|run: file [\w./]+|not run: .+")


@dataclass(frozen=True)
class Block:
    mark: str
    language: str
    text: str
    where: str

    @property
    def file(self) -> str | None:
        return self.mark.removeprefix("run: file ") if self.mark.startswith("run: file ") else None

    @property
    def is_slow(self) -> bool:
        return self.mark.startswith("run: slow")


def blocks_of(name):
    text = TEXTS[name]
    return [
        Block(match[1] or "", match[2], match[3], f"{name}:{text.count(chr(10), 0, match.start(3))}")
        for match in BLOCK.finditer(text)
    ]


BLOCKS = {name: blocks_of(name) for name in TEXTS}
SLOW = [block for blocks in BLOCKS.values() for block in blocks if block.is_slow]


def pages_with(*marks):
    return [name for name, blocks in BLOCKS.items() if any(block.mark in marks for block in blocks)]


@pytest.mark.parametrize("name", TEXTS)
def test_every_block_says_how_it_is_run(name):
    assert TEXTS[name].count("```") % 2 == 0
    for block in BLOCKS[name]:
        assert MARK.fullmatch(block.mark), block
        assert block.language in ("bash", "python"), block


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The folder of the command `agentenv`: see `tests/warm.py`."""
    folder = tmp_path_factory.mktemp("command")
    with subprocess.Popen([sys.executable, ROOT / "tests/warm.py", folder]) as server:
        while not (folder / "agentenv").exists():
            assert server.poll() is None
            time.sleep(0.05)
        yield folder
        server.kill()


WITHOUT_LONG_BLOCKS = sorted({*pages_with("run")} - {*pages_with("run: long")})


@pytest.mark.parametrize(
    "name", ["README.md", *(pytest.param(name, marks=pytest.mark.long) for name in WITHOUT_LONG_BLOCKS)]
)
def test_the_blocks_of_a_page_do_what_they_say(name, tmp_path, command):
    execute_page(BLOCKS[name], tmp_path, command, marks=("run",))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", pages_with("run: long"))
def test_the_long_blocks_of_a_page_do_what_they_say(name, tmp_path, command):
    execute_page(BLOCKS[name], tmp_path, command, marks=("run", "run: long"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", SLOW, ids=lambda block: block.where)
def test_a_slow_block_does_what_it_says(block, tmp_path, command):
    needed = block.mark.rpartition(" ")[2]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    execute(block, tmp_path, command, timeout_s=600)


def execute_page(blocks, folder, command, *, marks):
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks:
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.mark in marks:
            output = execute(block, folder, command, timeout_s=600)
            if "nothing is left to do" in block.text:
                assert output.count("64/64 episodes") >= 2, output  # a slow machine shows a line more before the end
                assert "0.0 episodes/s" in output, output
            if "agentenv check" in block.text:
                assert "no contract errors" in output


SHORTER_STARTS = ("TORCHDYNAMO_DISABLE", "VLLM_USE_AOT_COMPILE")


def execute(block, folder, command, *, timeout_s):
    """Return what the block prints. It must succeed and leave no process behind."""
    path = os.pathsep.join([str(command), str(Path(sys.executable).parent), os.environ["PATH"]])
    # The slow tests set these to start vLLM faster. A reader has not set them, so a training runs without them.
    left_out = SHORTER_STARTS if "agentenv train" in block.text else ()
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    options = ["-euo", "pipefail", "-c"] if block.language == "bash" else ["-c"]
    running = subprocess.Popen(
        ["bash" if block.language == "bash" else sys.executable, *options, block.text],
        cwd=folder, env={**inherited, "PATH": path, "HF_HUB_OFFLINE": "1"}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    processes_left = True
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.communicate(timeout=timeout_s)
            processes_left = alive_after(running.pid, 30.0)
    finally:
        ended = running.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        output, _ = running.communicate()
    assert ended, f"{block.where}: not finished within {timeout_s} s: {output}"
    assert running.returncode == 0, f"{block.where}: {output}"
    assert not processes_left, f"{block.where}: a process of this block is still running"
    return output


def alive_after(group, timeout_s):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    return generator()


def test_every_make_command_that_is_named_exists():
    targets = set(re.findall(r"^([\w-]+):(?!=)", MAKEFILE, re.MULTILINE))
    named_targets = set(re.findall(r"(?:`|^    )make ([a-z][\w-]*)", EVERYTHING, re.MULTILINE))
    assert {"demo", "test"} <= named_targets <= targets


def test_make_demo_runs_as_many_episodes_as_the_readme_says():
    flags = re.search(r"^demo:.*\n\t.*agentenv run (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    config = parse(RunConfig, "run", flags)
    num_tasks = len(read_tasks("word_problems", builtin=builtin_datasets()))
    assert (config.env, config.limit, config.dataset.data) == (("math_retry",), None, None)
    assert f"{num_tasks * config.n} episodes of {config.source}" in README


@pytest.mark.long
def test_every_flag_that_is_named_exists(generate):
    of_other_programs = (
        r"vllm serve.*|torchrun.* -m|python -m (?:vllm|agentenv_envs|pytest|zensical|build)(.*\\\n)*.*"
        r"|\| 0\.\d+\.\d+.*|chromium.*|pytest .*|openenv .*|--agentenv-record.*|pip install.*|vf-eval .*"
        r"|(?:docker (?:build|run)|ray (?:job submit|start))(.*\\\n)*.*|`--ipc host`|`--nnodes`|--\w+(?:\.\w+)+"
    )
    flags = set(re.findall(r"(?<![\w-])--([a-z_]+)\b(?!-)", re.sub(of_other_programs, "", EVERYTHING)))
    known = {"help", "version"} | generate.all_flags()
    assert flags - {f"no_{name}" for name in known} <= known


@pytest.mark.parametrize(
    ("page", "flags"), [("resume-and-limits", FREE_ON_RESUME), ("track-and-resume", FIXED_ON_RESUME)]
)
def test_a_page_names_the_flags_that_a_resume_may_or_may_not_change(page, flags):
    text = TEXTS[f"docs/how-to/{page}.md"]
    assert [flag for flag in flags if f"`{flag}`" not in text] == []


def test_every_file_that_is_named_exists():
    for name in re.findall(
        r"`((?:examples|agent_funcs|benchmarks|envs|tests|docs|agentenv)/[\w/.-]+\.\w+|[A-Z]+\.md)`", EVERYTHING
    ):
        assert (ROOT / name).exists(), name


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", EVERYTHING)
    assert named
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), test


def test_every_extra_that_is_named_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"agentenv-rl\[([\w,-]+)\]", EVERYTHING))
    assert {extra for group in named for extra in group.split(",")} <= set(extras)


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_to_a_page_leads_somewhere(name):
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)\s#]+)", TEXTS[name]):
        path = ((ROOT / name).parent / target).resolve()
        assert path.exists(), f"{name}: {target}"


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 180


def test_the_plot_of_the_site_is_that_of_the_benchmark():
    plots = [(ROOT / folder / "train_demo.png").read_bytes() for folder in ("docs/assets", "benchmarks")]
    assert plots[0] == plots[1]


def test_every_page_is_in_the_navigation():
    pages = set(re.findall(r'"([\w/.-]+\.md)"', (ROOT / "zensical.toml").read_text()))
    on_disk = {name.removeprefix("docs/") for name in TEXTS if name != "README.md"}
    assert pages == on_disk | {f"reference/{name}" for name in GENERATED}
    linked = {*re.findall(r"\(([\w/.-]+\.md)\)", (ROOT / "docs/index.md").read_text())}
    left = {"index.md", "changelog.md", "contributing.md"}
    assert {page for page in pages - linked if not page.startswith("reference/api/")} == left


def test_the_generated_pages_are_committed_as_the_code_gives_them(generate):
    assert set(generate.PAGES) == GENERATED
    for name, render in generate.PAGES.items():
        assert (generate.REFERENCE / name).read_text() == generate.GENERATED + render(), "run python docs/generate.py"


@pytest.mark.long
def test_the_generated_pages_hold_all_flags_rewards_and_errors(generate, tmp_path):
    pages = {name: render() for name, render in generate.PAGES.items()}
    for flag in ("--max_turns", "--async_train", "--cpu_s", "--reference", "--prompt_key"):
        assert f"`{flag}`" in pages["cli.md"], flag
    help_text = subprocess.run(
        [sys.executable, "-m", "agentenv.cli", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = set(re.findall(r"^\W{2,6}([a-z]+)  ", help_text, re.MULTILINE))
    assert {"run", "train", "check"} <= commands
    for command in commands:
        assert f"## agentenv {command}" in pages["cli.md"], command
    from agentenv.rewards.groups.registry import GROUP_REWARDS
    from agentenv.rewards.registry import REWARDS

    assert all(f"`{name}`" in pages["rewards.md"] for name in (*REWARDS, *GROUP_REWARDS))
    assert "`tokens_left`" in pages["environment.md"]
    assert "InfraError" in pages["errors.md"]
    assert "`num_action_tokens`" in pages["tables.md"]
    assert all(f"## {name}\n" in pages["clients.md"] for name in ("openai", "mini-swe-agent", "ai"))


@pytest.mark.long
def test_the_pages_on_records_and_metrics_name_every_key(tmp_path):
    out = tmp_path / "run"
    subprocess.run(
        [sys.executable, "-m", "agentenv.cli", "run", "--env", "math_retry", "--engine", "scripted", "--limit", "2",
         "--n", "2", "--out", str(out), "--progress", "none"], check=True, capture_output=True,
    )  # fmt: skip
    line = json.loads((out / "trajectories.jsonl").read_text().splitlines()[0])
    episode = line["episode"]
    keys = {*line, *episode, *episode["task"], *episode["turns"][0], *episode["turns"][0]["result"]}
    entries = [path for path in out.iterdir() if not path.name.startswith(".")]
    keys |= {*episode["segments"][0], *(path.name + "/" * path.is_dir() for path in entries)}
    keys |= set(json.loads((out / "config.json").read_text()))
    records = TEXTS["docs/reference/run-directory.md"]
    assert [key for key in sorted(keys) if f"`{key}`" not in records] == []
    metrics = json.loads((out / "metrics.json").read_text())
    assert [key for key in sorted(metrics) if f"`{key}`" not in TEXTS["docs/reference/metrics.md"]] == []
