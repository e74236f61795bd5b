"""How much another process has computed: from /proc, from `ps`, or unknown."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentenv.rewards.workers import process
from agentenv.rewards.workers.process import process_cpu_s, ps_seconds


@pytest.fixture
def spent():
    """A process that has computed for 1.2 s and then sleeps."""
    code = "import time\nwhile time.process_time() < 1.2: pass\nprint(flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.kill()
    process.communicate()


@pytest.mark.long
def test_reports_the_cpu_time_of_a_process_and_not_its_age(spent):
    first = process_cpu_s(spent)
    time.sleep(0.3)
    assert first is not None
    assert 1.1 <= first <= 1.5
    assert process_cpu_s(spent) == pytest.approx(first, abs=0.05)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ps") is None, reason="asks ps")
def test_uses_ps_without_proc(spent, monkeypatch, tmp_path):
    monkeypatch.setattr(process, "_PROC", tmp_path)
    used_s = process_cpu_s(spent)
    assert used_s is not None
    assert 1.0 <= used_s <= 1.5


def test_is_unknown_without_proc_and_ps_and_for_a_process_that_is_gone(monkeypatch, tmp_path):
    assert process_cpu_s(2**22 + 1) is None
    monkeypatch.setattr(process, "_PROC", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert process_cpu_s(os.getpid()) is None


def test_a_name_with_spaces_and_brackets_works(monkeypatch, tmp_path):
    (tmp_path / "7").mkdir()
    numbers = " ".join(map(str, range(4, 30)))
    (tmp_path / "7" / "stat").write_text(f"7 (a) R 1 (b)) S {numbers}\n")
    monkeypatch.setattr(process, "_PROC", Path(tmp_path))
    assert process_cpu_s(7) == (14 + 15) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("  0:00.35\n", 0.35),
        ("12:34.50", 754.5),
        ("125:00.00", 7500.0),
        ("00:00:02", 2.0),
        ("01:02:03", 3723.0),
        ("2-01:02:03", 2 * 86400 + 3723.0),
        ("", None),
        ("-", None),
        ("error", None),
    ],
)
def test_reads_the_times_that_ps_writes(said, seconds):
    assert ps_seconds(said) == seconds
