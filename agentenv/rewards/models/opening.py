"""Names to reward models, wherever they run.

    hf:PATH (or PATH)       a sequence classifier of transformers, in this process
    vllm:PATH               the same in vLLM, in this process; ray:PATH in Ray actors
    http://…/get_reward     `agentenv rm serve`; OpenRLHF's reward server, for messages with the option `tokenizer`
    FILE.py, FILE.py:name   OpenRLHF's reward function, likewise
    classify:http://…       vLLM's server

What a name means is imported when it is opened, and a model is loaded when it is first asked.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin, get_type_hints

from agentenv.errors import ConfigError, MissingDependency
from agentenv.rewards.models._model import resolved
from agentenv.rewards.models.types import Scorer

SCORERS: Mapping[str, str] = {
    "hf": "agentenv.rewards.models.hf:HFScorer",
    "vllm": "agentenv.rewards.models.vllm_local:VLLMScorer",
    "ray": "agentenv.rewards.models.ray_replicas:RayScorer",
    "get_reward": "agentenv.rewards.models.get_reward:GetRewardScorer",
    "classify": "agentenv.rewards.models.vllm_http:VLLMHTTPScorer",
    "function": "agentenv.rewards.models.function:FunctionScorer",
}
"""Where each scorer's class is; its constructor takes what stands behind the colon first."""
_LOADED_HERE = ("hf", "vllm", "ray")


def open_scorer(spec: str, /, **options: Any) -> Scorer:
    """The reward model that a spec names; nothing of it is loaded yet. The caller closes it.

    Args:
        spec: see the module.
        options: arguments of its constructor.

    Raises:
        ConfigError: it names none, or a folder that is not there, or has no such options.
        MissingDependency: what it needs is not installed.
    """
    kind, target = parsed(spec)
    if kind not in SCORERS:
        raise unknown(spec, SCORERS)
    scorer: Scorer = constructed(spec, _class(spec, SCORERS[kind]), options, target)
    return scorer


def parsed(spec: str) -> tuple[str, str]:
    """The kind of a spec, known or not, and what it names.

    Raises:
        ConfigError: it names nothing, or a folder that is not there.
    """
    kind, colon, target = spec.partition(":")
    if kind in ("http", "https"):
        return "get_reward", spec
    if kind.endswith(".py"):
        return "function", spec
    if not colon:
        kind, target = "hf", spec
    if not target:
        raise unknown(spec, SCORERS)
    return kind, _folder(spec, target) if kind in _LOADED_HERE else target


def _folder(spec: str, target: str) -> str:
    """The folder that a model is in, be it one that ships with the package, or its name as it is.

    What only a path can be is one: from `/`, `.` or `~` on, with several slashes, or in a folder that is here.
    """
    target = resolved(target)
    path = Path(target).expanduser()
    if path.exists():
        return str(path)
    here = target.count("/") == 1 and path.parent.is_dir()
    if target.startswith(("/", ".", "~")) or target.count("/") > 1 or here:
        raise ConfigError(f"rm: expected a reward model's folder, got none at {target!r} ({spec!r}). Check the path.")
    return target


def unknown(spec: str, kinds: Iterable[str]) -> ConfigError:
    """What is said of a spec that names none of these kinds."""
    kinds = list(kinds)
    known = ", ".join(f"{name}:…" for name in kinds)
    return ConfigError(
        f"rm: expected a model's folder or name, http://…, FILE.py or one of {known}, got {spec!r}."
        f"{_nearest(spec.partition(':')[0], kinds)} Such as hf:PATH, or classify:http://HOST:8000 for vLLM's server."
    )


def constructed(spec: str, cls: Callable[..., Any], options: Mapping[str, Any], *args: Any) -> Any:
    """An object of the class.

    Raises:
        ConfigError: it takes other arguments; says which.
    """
    names, open_ended = _options(cls, len(args))
    wrong = [name for name in options if name not in names]
    if wrong and not open_ended:
        raise ConfigError(
            f"rm {spec}: expected options among {', '.join(names)}, got {wrong[0]!r}."
            f"{_nearest(wrong[0], names)} Leave it out."
        )
    return cls(*args, **options)


def _options(cls: Callable[..., Any], num_given: int) -> tuple[list[str], bool]:
    """What a constructor takes after its first arguments, by name, with what `**name: Unpack[…]` has; and any else."""
    taken = list(inspect.signature(cls).parameters.values())[num_given:]
    names = [each.name for each in taken if each.kind is not each.VAR_KEYWORD]
    rest = [each.name for each in taken if each.kind is each.VAR_KEYWORD]
    if not rest:
        return names, False
    hint = get_type_hints(cls.__init__).get(rest[0]) if inspect.isclass(cls) else None
    fields = [*get_type_hints(*get_args(hint))] if get_origin(hint) is Unpack else []
    return [*names, *fields], not fields


def _class(spec: str, place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise MissingDependency(
            f"rm: expected what {spec!r} needs to be installed, got {error}. Install it."
        ) from error
    return found


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
