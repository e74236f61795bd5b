r"""A reward for JSON that keeps to a schema: read without Python's freedoms, checked where it can be stopped.

Example:
    >>> schema = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    >>> await JsonSchemaReward(schema=schema).grade(Response('```json\n{"name": "Ada"}\n```'))
    RewardResult(reward=1.0, score=1.0, …, components={'json': 1.0, 'valid': 1.0, 'required': 1.0}, …)

Needs the `jsonschema` package. A schema may hold regular expressions, so a worker process runs it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from agentenv.errors import ConfigError, DataError, MissingDependency
from agentenv.rewards._arguments import label_error, number, one_of, shown
from agentenv.rewards._json_text import MAX_CHARS, NotJson, read_json
from agentenv.rewards.pool import WorkerTimeout, shared_pool
from agentenv.rewards.regex import MIN_CPU_LIMIT_S
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status

MODES = ("strict", "lenient")
CPU_LIMIT_S = 2.0
_FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9]*)[ \t]*\r?$", re.MULTILINE)
_RECURSION_LIMIT = 4000
"""Frames: a document of the deepest kind takes about 600."""
_COMPONENTS = {"json": 0.0, "valid": 0.0, "required": 0.0}


class JsonSchemaReward:
    """1.0 for a document that is valid under the schema, else `partial` times the share of required keys that are.

    The schema is the one given here, else metadata["schema"], else the label: an object, or JSON text of one. Its
    version is its `$schema`, or draft 2020-12; references to other documents are an error, never a download.

    `strict`: the final text is the document, alone or in one fence. `lenient`: the last fenced block, or else what
    stands between the first bracket and the last. Refused are keys that stand twice, NaN and infinite numbers,
    integers of more than 300 digits, and more than 64 levels. With `partial` 0 a document is right or worth nothing.
    Checking that takes more than `cpu_limit_s` is a failure of the text.
    """

    bounds = (0.0, 1.0)

    def __init__(
        self,
        *,
        schema: Mapping[str, Any] | None = None,
        mode: str = "strict",
        partial: float = 0.0,
        cpu_limit_s: float = CPU_LIMIT_S,
    ) -> None:
        where = type(self).__name__
        if find_spec("jsonschema") is None:
            raise MissingDependency(f"{where}: expected jsonschema, got none. Run: pip install 'agentenv[schema]'")
        self._mode = one_of(f"{where}.mode", mode, MODES)
        self._partial = number(f"{where}.partial", partial, low=0.0, high=1.0)
        self._cpu_limit_s = number(f"{where}.cpu_limit_s", cpu_limit_s, low=MIN_CPU_LIMIT_S)
        self._schema = None
        if schema is not None:
            try:
                self._schema = _schema_text(schema, f"{where}.schema")
                _validator(self._schema)
            except DataError as error:
                raise ConfigError(str(error)) from error

    async def grade(self, response: Response) -> RewardResult:
        """Whether there is valid JSON; components `json`, `valid` and the `required` share.

        Raises:
            DataError: there is no schema, or it is none.
            InfraError: the worker failed.
        """
        schema = self._schema or _schema_text(response.metadata.get("schema", response.label), "schema")
        final = final_text(response.text)
        if not final:
            return RewardResult(0.0, score=0.0, status=Status.NO_ANSWER, components=dict(_COMPONENTS))
        if len(final) > MAX_CHARS:
            return _unread(f"the text is longer than {MAX_CHARS} characters")
        request = {"task": "json_schema", "text": final, "schema": schema, "lenient": self._mode == "lenient"}
        try:
            reply = await shared_pool().run(request, cpu_limit_s=self._cpu_limit_s)
        except WorkerTimeout as error:
            return RewardResult(0.0, score=0.0, status=Status.TIMEOUT, components=dict(_COMPONENTS), detail=str(error))
        if reply["unread"]:
            return _unread(reply["unread"])
        share = float(reply["required"])
        worth = 1.0 if reply["valid"] else self._partial * share
        components = {"json": 1.0, "valid": float(reply["valid"]), "required": share}
        return RewardResult(
            worth, score=worth, components=components, extracted=shown(reply["document"]), feedback=reply["wrong"]
        )


def _unread(reason: str) -> RewardResult:
    """The result of a text that is no JSON document."""
    feedback = f"expected a JSON document: {reason}"
    return RewardResult(
        0.0, score=0.0, status=Status.PARSE_ERROR, components=dict(_COMPONENTS), feedback=shown(feedback, 300)
    )


def _schema_text(schema: Any, where: str) -> str:
    """The schema as JSON text, which the worker reads and keeps.

    Raises:
        DataError: it is no object of JSON.
    """
    try:
        schema = read_json(schema) if isinstance(schema, str) else schema
        if isinstance(schema, Mapping):
            return json.dumps(dict(schema), allow_nan=False, sort_keys=True)
    except (NotJson, TypeError, ValueError, RecursionError) as error:
        raise label_error(f"a JSON schema ({error})", schema, where=where) from error
    raise label_error("a JSON schema, an object", schema, where=where)


def prepare(_: dict[str, Any]) -> None:
    """In a worker: imports what no request shall pay for, and makes room for schemas that refer to themselves."""
    _validator("{}")
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _RECURSION_LIMIT))


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """In a worker: the verdict on a text; `unread` says why there is no document, `wrong` what is wrong with it.

    Raises:
        DataError: the schema is none.
    """
    validator = _validator(request["schema"])
    reply = {"unread": "", "valid": False, "required": 0.0, "wrong": "", "document": ""}
    try:
        document = _document(request["text"], lenient=request["lenient"])
        value = read_json(document)
    except NotJson as error:
        return {**reply, "unread": str(error)}
    wrong = _first_error(validator, value)
    reply |= {"valid": wrong is None, "wrong": wrong or "", "document": shown(document)}
    return {**reply, "required": 1.0 if wrong is None else _required_share(validator, value)}


def _document(text: str, *, lenient: bool) -> str:
    """The part of the text that is to be JSON.

    Raises:
        NotJson: there is none.
    """
    fences = list(_FENCE.finditer(text))
    if len(fences) >= 2 and (lenient or (fences[0].start(), fences[-1].end(), len(fences)) == (0, len(text), 2)):
        opened, closed = fences[len(fences) // 2 * 2 - 2 : len(fences) // 2 * 2]
        return text[opened.end() : closed.start()].strip()
    if not lenient:
        return text
    starts = [at for bracket in "[{" if (at := text.find(bracket)) >= 0]
    end = max(text.rfind("]"), text.rfind("}"))
    if not starts or end < min(starts):
        raise NotJson("there is none")
    return text[min(starts) : end + 1]


@lru_cache(maxsize=256)
def _validator(schema_text: str) -> Any:
    """The validator of a schema; it never loads another document.

    Raises:
        DataError: it is no schema.
    """
    jsonschema, referencing = import_module("jsonschema"), import_module("referencing")
    schema = json.loads(schema_text)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise label_error(f"a JSON schema ({error.message})", schema, where="schema") from error
    return kind(schema, registry=referencing.Registry())


def _first_error(validator: Any, value: Any) -> str | None:
    """What is wrong with a value: the place and the rule, not the value that would be right; None if nothing is.

    Raises:
        DataError: the schema refers to what is not there, or holds a pattern that is none.
    """
    unresolvable = import_module("referencing.exceptions").Unresolvable
    try:
        error = next(validator.iter_errors(value), None)
    except (unresolvable, re.error, RecursionError) as reason:
        raise label_error(f"a JSON schema that can be used ({reason})", validator.schema, where="schema") from reason
    return None if error is None else shown(f"{error.json_path}: it breaks the rule {error.validator!r}", 300)


def _required_share(validator: Any, value: Any) -> float:
    """How many of the required keys (of all properties, where none is required) are there and valid, of all of them."""
    schema = validator.schema
    properties = schema.get("properties", {})
    required = schema.get("required") or list(properties)
    if not required or not isinstance(value, dict):
        return 0.0
    sound = [
        key in value and _first_error(validator.evolve(schema=properties.get(key, True)), value[key]) is None
        for key in required
    ]
    return sum(sound) / len(required)
