"""Judges and how they are asked, from settings such as JSON has them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.rewards.judges.draws import Judge

_T = TypeVar("_T")


def settings_of(where: str, given: Any, default: _T) -> _T:
    """The settings that are given: an object of the default's class, or the default with fields of a mapping in it.

    Raises:
        ConfigError: they are something else, or name a field that there is not.
    """
    if given is None:
        return default
    if isinstance(given, type(default)):
        return given
    assert is_dataclass(default)
    assert not isinstance(default, type)
    names = [each.name for each in fields(default)]
    if not isinstance(given, Mapping) or not given.keys() <= set(names):
        raise ConfigError(
            f"{where}: expected {type(default).__name__}(…), or an object with some of {', '.join(names)}, got "
            f"{given!r:.200}. Correct it."
        )
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return cast(_T, replace(default, **values))
    except TypeError as error:
        raise ConfigError(
            f"{where}: expected values of other types, got {given!r:.200} ({error}). Correct it."
        ) from error


def checked(where: str, judge: Any) -> Judge:
    """The judge.

    Raises:
        ConfigError: it is none, as its name would be.
    """
    if not callable(getattr(judge, "complete", None)) or isinstance(judge, type):
        raise ConfigError(
            f"{where}.judge: expected an object with `async def complete(messages)`, got {judge!r:.200}. Make one."
        )
    return cast("Judge", judge)


def client_options() -> list[str]:
    """The names of what `judge_from` takes."""
    from agentenv.rewards.judges.openai import OpenAIJudge

    return [*(name for name in inspect.signature(OpenAIJudge).parameters if name != "usage"), "price", "cache"]


def judge_from(settings: Mapping[str, Any]) -> Any:
    """A language model behind an address: an `OpenAIJudge`, or a `CachedJudge` before it.

    Args:
        settings: the constructor's arguments by name, at least `base_url` and `model`; `sampling` and `sending` are
            objects of their fields, as is `price`, of a `usage.Price`. With `cache`, a file of the replies that were
            had, what it was asked before is answered from there.

    Raises:
        ConfigError: an argument is missing, there is none of a name, or its value cannot be.
    """
    from agentenv.rewards.judges.cache import CachedJudge, ReplyCache
    from agentenv.rewards.judges.openai import JUDGING, OpenAIJudge, Sending
    from agentenv.rewards.judges.usage import Price, Usage

    given, taken = dict(settings), client_options()
    unknown = [name for name in given if name not in taken]
    missing = [name for name in ("base_url", "model") if name not in given]
    if unknown or missing:
        got = f"{unknown[0]!r}" if unknown else f"no {' and no '.join(missing)}"
        raise ConfigError(
            f"judge: expected settings with base_url and model, and others among {', '.join(taken[2:])}, got {got}. "
            "Correct the settings of the judge."
        )
    cache, price = given.pop("cache", None), settings_of("judge.price", given.pop("price", None), Price())
    given["sampling"] = settings_of("judge.sampling", given.get("sampling"), JUDGING)
    given["sending"] = settings_of("judge.sending", given.get("sending"), Sending())
    try:
        judge = OpenAIJudge(**given, usage=Usage(price))
        return judge if cache is None else CachedJudge(judge, ReplyCache(cache))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"judge: expected settings of other types, got {dict(settings)!r:.300} ({error}). Correct them."
        ) from error
