"""Golden: the trace of a reviewed episode, as a file next to the test.

The file is readable JSON, each list of tokens on a line, without values that differ between runs: no times, no
cached tokens, no paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

from agentenv.core.engine import Tokenizer
from agentenv.core.trajectory import Trajectory
from agentenv.errors import ConfigError, DataError
from agentenv.runs.records.lines import trajectory_from_dict, trajectory_to_dict
from agentenv.testing.diffs import trajectory_diff
from agentenv.testing.tokenizers import CharTokenizer

_RECORD = "Look at the episode and, where it is right, run pytest with --agentenv-record."
_NUMBERS = re.compile(r'\[\n[^{}"]*\]')
"""Lists of numbers, and lists of such lists: strings of JSON have no line ends."""
_TIMES = ("generate_s", "step_s", "num_cached_tokens", "began_s")


class Golden:
    """The traces of one test. Call it with a trajectory to compare it with the trace, or to record it.

    Example::

        def test_a_wrong_answer_gets_another_try(run_episode, golden):
            golden(run_episode("math_retry", ["I think 41.", "#### 42"]))
    """

    def __init__(
        self, folder: Path, test: str, *, record: bool = False, tokenizer_of: Callable[[], Tokenizer] = CharTokenizer
    ) -> None:
        """Use the traces of `test` in `folder`: write them with `record`, else compare with them.

        `tokenizer_of` returns the tokenizer that decodes the tokens of a difference.
        """
        self._folder, self._test, self._record = folder, _file_name(test), record
        self._tokenizer_of = tokenizer_of
        self._seen: set[Path] = set()

    def path(self, name: str = "") -> Path:
        """Return the path of a trace; `name` distinguishes several traces of one test."""
        return self._folder / f"{self._test}{f'-{_file_name(name)}' if name else ''}.json"

    def __call__(self, trajectory: Trajectory, name: str = "", *, tolerance: float = 1e-6) -> None:
        """Compare a trajectory with its trace, or record it.

        Args:
            trajectory: an episode that has ended.
            name: distinguishes several traces of one test.
            tolerance: between numbers that are not tokens; see `trajectory_diff`.

        Raises:
            AssertionError: they differ, with the first token that does; or the trace is missing.
            ConfigError: the test has used the name before.
            DataError: the trace cannot be read.
        """
        __tracebackhide__ = True
        path = self.path(name)
        if path in self._seen:
            raise ConfigError(f"golden: expected a different name for each trace, got {name!r} twice. Name them.")
        self._seen.add(path)
        if self._record:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(_kept(trajectory), ensure_ascii=False, indent=2)
            text = _NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
            # Half a surrogate pair becomes its escape, which JSON has too.
            path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
            return
        was, now = _read(path), trajectory_from_dict(_kept(trajectory))
        names, tokenizer = ("golden", "now"), self._tokenizer_of()
        lines = trajectory_diff(was, now, tokenizer=tokenizer, tolerance=tolerance, names=names)
        if lines:
            advice = f"If what is new is right, run pytest with --agentenv-record and look at the change of {path}."
            raise AssertionError("\n".join([f"{path.name}: the episode is not what it was", *lines, advice]))


def _kept(trajectory: Trajectory) -> dict[str, Any]:
    """Return the record to write, without the values that differ between runs."""
    error = trajectory.error and replace(trajectory.error, place="", traceback="")
    values = trajectory_to_dict(replace(trajectory, wait_s=0.0, attempt=0, error=error))
    turns = [{key: value for key, value in turn.items() if key not in _TIMES} for turn in values["turns"]]
    return {key: value for key, value in values.items() if key not in _TIMES} | {"turns": turns}


def _read(path: Path) -> Trajectory:
    __tracebackhide__ = True
    if not path.is_file():
        raise AssertionError(f"{path}: expected a trace, got none. {_RECORD}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: expected a trace, got {error}. {_RECORD}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: expected a trace, got {values!r:.60}. {_RECORD}")
    return trajectory_from_dict(values)


def _file_name(name: str) -> str:
    """Return a unique name that is valid on every file system."""
    plain = re.sub(r"[^\w.=+-]+", "_", name, flags=re.ASCII)
    short = plain[:80]
    return short if short == name else f"{short}-{crc32(name.encode('utf-8', 'surrogatepass')):08x}"
