"""Load a user's reward function by name, select its arguments, and read its answer; here and in a worker."""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.util
import inspect
import json
import math
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from agentenv._util.paths import place_of
from agentenv._util.suggest import did_you_mean
from agentenv.core.arguments import is_finite
from agentenv.errors import AgentEnvError, ConfigError, ContractError, DataError, InfraError
from agentenv.rewards.types import Response, RewardResult

_T = TypeVar("_T")
_OURS = ("response", "prompt", "label", "metadata")
_VERLS = ("data_source", "solution_str", "ground_truth", "extra_info")
_TEXTS = ("extracted", "feedback", "detail")
_LOADING = threading.RLock()  # guards sys.modules while a file is loaded: no other thread may see half of it


def load_function(spec: str) -> Callable[..., Any]:
    """Return the function that `FILE.py:name` or `module:name` names.

    Raises:
        ConfigError: it is neither, the file or module is missing or fails to import, or has nothing callable of that
            name.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"function: expected FILE.py:name or module:name, got {spec!r}. Name the function.")
    try:
        module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    except AgentEnvError:
        raise
    except Exception as error:
        raise ConfigError(f"function: expected {spec!r} to import, got {type(error).__name__}: {error}.") from error
    function = getattr(module, name, None)
    if not callable(function):
        own = {key: each for key, each in vars(module).items() if callable(each) and not key.startswith("_")}
        names = [key for key, each in own.items() if getattr(each, "__module__", "") == module.__name__]
        advice = did_you_mean(name, names, f"There are {', '.join(names)}." if names else "Define it.")
        raise ConfigError(f"{spec}: expected a function or a class {name!r}, got {function!r}.{advice}")
    return function  # type: ignore[no-any-return]


def _load_file(where: str) -> Any:
    """Return the file as a module, loaded once for all spellings of its path."""
    path = Path(where).expanduser().resolve()
    name = f"agentenv_function_{path.stem}_{crc32(str(path).encode()):08x}"
    with _LOADING:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise ConfigError(f"function: expected a Python file, got {where!r}. Fix the path.")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # for modules beside it, also those imported when it is called
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def argument_names(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the arguments that a function is called with, besides `kwargs`; `**kw` takes all of one kind.

    They are `response`, `prompt`, `label`, `metadata` or, for verl's functions, `data_source`, `solution_str`,
    `ground_truth`, `extra_info`.

    Raises:
        ConfigError: the function takes no response, or requires unknown arguments.
    """
    where = getattr(function, "__qualname__", type(function).__name__)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: expected a function with a signature, got none. Wrap it in one.") from error
    ours = _VERLS if "solution_str" in parameters else _OURS
    rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name for name, parameter in parameters.items() if parameter.kind in (1, 3)}  # by keyword
    lacking = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (2, 4)
        and name not in named & {*ours, *kwargs}
    ]
    unknown = [] if rest else [name for name in kwargs if name not in named]
    if not {"response", "solution_str"} & named or lacking or unknown:
        advice = "Name them so."
        if "queries" in parameters:
            advice = "`run` and `train` take a reward_func of OpenRLHF as --reward_func_path FILE.py."
        raise ConfigError(
            f"{where}: expected parameters among {', '.join(_OURS)} (or verl's {', '.join(_VERLS)}), a response among "
            f"them, and kwargs, got {inspect.signature(function)} with kwargs {list(kwargs)}. {advice}"
        )
    return tuple(name for name in ours if name not in kwargs and (rest or name in named))


def arguments(response: Response, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of those arguments; `extra_info` is the row's column of that name, else all columns."""
    row = response.metadata
    values = {
        "response": response.text,
        "prompt": response.prompt if isinstance(response.prompt, str) else list(response.prompt),
        "label": response.label,
        "metadata": dict(row),
        "data_source": row.get("data_source", ""),
        "solution_str": response.text,
        "ground_truth": response.label,
        "extra_info": row.get("extra_info", dict(row)),
    }
    return {name: values[name] for name in names}


def copied(columns: _T) -> _T:
    """Return a copy of a row's columns, which a user's function may change.

    Raises:
        DataError: a column cannot be copied.
    """
    try:
        return copy.deepcopy(columns)
    except (TypeError, RecursionError) as error:
        raise DataError(f"row: expected values that can be copied, got {error}. Fix its columns.") from error


def as_result(value: Any, where: str) -> RewardResult:
    """Return a function's answer as a result: a number, a dict with `reward` or `score`, or a result.

    In a dict, `reward` is optimized, or `score` without it; further numbers become components, `extracted` (or `pred`),
    `feedback` and `detail` are kept, and other values are listed in `detail`.

    Raises:
        ContractError: it has another type, or the reward is not a finite number.
    """
    if isinstance(value, RewardResult):
        return value
    columns = dict(value) if isinstance(value, Mapping) else {"reward": value}
    reward = _number(columns.pop("reward", columns.get("score")))
    if reward is None or math.isnan(reward) or not is_finite(reward):
        raise ContractError(f"{where}: expected a finite number or a dict with one, got {value!r:.200}.")
    score = _number(columns.pop("score", reward))
    if "pred" in columns:
        columns.setdefault("extracted", columns.pop("pred"))
    texts: dict[str, Any] = {name: str(columns.pop(name)) for name in _TEXTS if columns.get(name) is not None}
    numbers = {str(name): _number(column) for name, column in columns.items()}
    others = [f"{name}={column!r:.200}" for name, column in columns.items() if numbers[str(name)] is None]
    texts.setdefault("detail", "; ".join(others)[:1000])
    return RewardResult(
        reward,
        score=score if score is not None and 0.0 <= score <= 1.0 else None,
        components={name: value if is_finite(value) else None for name, value in numbers.items() if value is not None},
        **texts,
    )


def _number(value: Any) -> float | None:
    """Return a Python, NumPy or torch number as a float; None for anything else."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def prepare(request: dict[str, Any]) -> None:
    """Load the function of a request, in the worker, before its time limit starts."""
    load_function(request["function"])


_OF_MACHINES = (OSError, MemoryError, BrokenExecutor, EOFError, subprocess.TimeoutExpired)
_OF_FILES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_HTTP_CLIENTS = frozenset(["http", "httpx", "httpcore", "requests", "urllib3", "aiohttp", "openai", "anthropic"])


def failure_of(error: BaseException, where: str) -> AgentEnvError:
    """Return the error of grading for what a reward raised: a ContractError with the file and line in its code.

    Another attempt would fail the same way, unless the machine or another one failed: broken connections and pools of
    processes, time limits, errors of HTTP clients and too little memory, a GPU's too, are InfraErrors. Errors of this
    library stay as they are.
    """
    if isinstance(error, AgentEnvError):
        return error
    places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    found = place_of(error) or "".join(places[-1:])  # a reward of this library has no line outside of it
    place = f" at {found}" if found else ""
    message = f"{where}: expected a reward, got {type(error).__name__}: {error}"[:400]
    for cause in (error, error.__cause__, error.__context__, getattr(error, "reason", None)):
        is_of_client = isinstance(cause, Exception) and type(cause).__module__.partition(".")[0] in _HTTP_CLIENTS
        is_of_gpu = type(cause).__name__ == "OutOfMemoryError"  # torch's is a RuntimeError
        # An OSError is also a broken connection or a time limit.
        if is_of_client or is_of_gpu or (isinstance(cause, _OF_MACHINES) and not isinstance(cause, _OF_FILES)):
            return InfraError(f"{message}{place}")
    return ContractError(f"{message}{place}. Fix the reward; for what may pass, let it raise InfraError.")


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the function's result, in the worker."""
    function = load_function(request["function"])

    async def answer(value: Any) -> Any:
        return await value

    try:
        value = function(**request["arguments"])
        if inspect.isawaitable(value):
            value = asyncio.run(answer(value))
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise failure_of(error, request["function"]) from error
    result = replace(as_result(value, request["function"]), cause=None)  # an exception, which JSON does not have
    return json.loads(json.dumps(asdict(result)))  # type: ignore[no-any-return]
