"""Make judges, and options of how they are asked, from settings such as JSON has them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from agentenv.errors import ConfigError
from agentenv.rewards.loading import construct

if TYPE_CHECKING:
    from agentenv.rewards.judges.protocol import Judge

_T = TypeVar("_T")


def settings_from(where: str, given: Any, default: _T) -> _T:
    """Return an object of the default's class: `given` itself, or the default with the fields of a mapping replaced.

    Raises:
        ConfigError: `given` is something else, or names an unknown field.
    """
    if given is None:
        return default
    if isinstance(given, type(default)):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where}: expected {type(default).__name__}(…), or an object with some of its fields, got {given!r:.200}."
        )
    usual = {each.name: getattr(default, each.name) for each in fields(default)}  # type: ignore[arg-type]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return cast(_T, construct(where, type(default), {**usual, **values}))


def judge_of(where: str, judge: Any) -> Judge:
    """Return the judge, made from settings if it is a mapping; see `judge_from`.

    Raises:
        ConfigError: it is not a judge, or the settings are wrong.
    """
    if isinstance(judge, Mapping):
        judge = judge_from(judge)
    if not callable(getattr(judge, "complete", None)) or isinstance(judge, type):
        raise ConfigError(f"{where}.judge: expected an object with `async def complete(messages)`, got {judge!r:.200}.")
    return cast("Judge", judge)


def client_options() -> list[str]:
    """Return the names of the settings that `judge_from` accepts."""
    from agentenv.rewards.judges.openai import OpenAIJudge

    return [*(name for name in inspect.signature(OpenAIJudge).parameters if name != "usage"), "price", "cache"]


def judge_from(settings: Mapping[str, Any]) -> Any:
    """Return an `OpenAIJudge`, or a `CachedJudge` around it.

    Args:
        settings: the constructor's arguments by name, at least `base_url` and `model`; `sampling`, `request_options`
            and `price` (of a `protocol.Price`) are objects of their fields. `cache` is a file of earlier replies.

    Raises:
        ConfigError: an argument is missing or unknown, or has an invalid value.
    """
    from agentenv.rewards.judges.cache import CachedJudge, ReplyCache
    from agentenv.rewards.judges.openai import JUDGING, OpenAIJudge, RequestOptions
    from agentenv.rewards.judges.protocol import JudgeUsage, Price

    options, known = dict(settings), client_options()
    unknown = [name for name in options if name not in known]
    missing = [name for name in ("base_url", "model") if name not in options]
    if unknown or missing:
        got = f"{unknown[0]!r}" if unknown else f"no {' and no '.join(missing)}"
        raise ConfigError(
            f"judge: expected settings with base_url and model, and others among {', '.join(known[2:])}, got {got}. "
            "Correct the settings of the judge."
        )
    cache, price = options.pop("cache", None), settings_from("judge.price", options.pop("price", None), Price())
    options["sampling"] = settings_from("judge.sampling", options.get("sampling"), JUDGING)
    options["request_options"] = settings_from(
        "judge.request_options", options.get("request_options"), RequestOptions()
    )
    try:
        judge = OpenAIJudge(**options, usage=JudgeUsage(price))
        return judge if cache is None else CachedJudge(judge, ReplyCache(cache))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"judge: expected settings of other types, got {dict(settings)!r:.300} ({error}). Correct them."
        ) from error
