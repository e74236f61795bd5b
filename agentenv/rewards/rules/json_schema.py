r"""Reward JSON that conforms to a schema, read strictly and validated in a process that can be killed.

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

from agentenv._util.lenient_json import MAX_CHARS, LiteralError, read_json
from agentenv.core.arguments import label_error, number, one_of, shown
from agentenv.errors import ConfigError, DataError, MissingDependency
from agentenv.rewards.rules.regex import MIN_CPU_LIMIT_S
from agentenv.rewards.rules.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import WorkerTimeout, shared_pool

MODES = ("strict", "lenient")
CPU_LIMIT_S = 2.0
_FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9]*)[ \t]*\r?$", re.MULTILINE)
_RECURSION_LIMIT = 4000
"""Frames; a document of the maximum depth takes about 600."""


class JsonSchemaReward:
    """1.0 for a document that is valid under the schema, else `partial` times the share of valid required keys.

    The schema is the argument, else metadata["schema"], else the label: an object, or JSON text of one. Its version is
    its `$schema`, or draft 2020-12; references to other documents are an error, never a download.

    `strict`: the final text is the document, alone or in one fence. `lenient`: the document is the last fenced block,
    or else the text from the first bracket to the last. Duplicate keys, NaN, infinite numbers, numbers of more than 300
    characters, and more than 64 levels are rejected. If validation takes more than `cpu_limit_s`, the text fails.
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
            raise MissingDependency(f"{where}: expected jsonschema, got none. Run: pip install 'agentenv-rl[schema]'")
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
        """Return the result; its components are `json`, `valid` and the `required` share.

        Raises:
            DataError: the schema is missing or invalid.
            InfraError: the worker failed.
        """
        schema = self._schema or _schema_text(response.metadata.get("schema", response.label), "schema")
        final = final_text(response.text, response.prompt)
        if not final:
            return _nothing(Status.NO_ANSWER)
        if len(final) > MAX_CHARS:
            return _unread(f"the text is longer than {MAX_CHARS} characters")
        request = {"task": f"{__name__}:handle", "text": final, "schema": schema, "lenient": self._mode == "lenient"}
        try:
            reply = await shared_pool().run(request, cpu_limit_s=self._cpu_limit_s)
        except WorkerTimeout as error:
            return _nothing(Status.TIMEOUT, detail=str(error))
        if reply["unread"]:
            return _unread(reply["unread"])
        share = float(reply["required"])
        worth = 1.0 if reply["valid"] else self._partial * share
        components = {"json": 1.0, "valid": float(reply["valid"]), "required": share}
        return RewardResult(
            worth, score=worth, components=components, extracted=shown(reply["document"]), feedback=reply["wrong"]
        )


def _unread(reason: str) -> RewardResult:
    """Return the result of a text that is not a JSON document."""
    return _nothing(Status.PARSE_ERROR, feedback=shown(f"expected a JSON document: {reason}", 300))


def _nothing(status: Status, **texts: Any) -> RewardResult:
    components = {"json": 0.0, "valid": 0.0, "required": 0.0}
    return RewardResult(0.0, score=0.0, status=status, components=components, **texts)


def _schema_text(schema: Any, where: str) -> str:
    """Return the schema as JSON text, which the worker reads and caches.

    Raises:
        DataError: it is not a JSON object.
    """
    try:
        schema = read_json(schema) if isinstance(schema, str) else schema
        if isinstance(schema, Mapping):
            return json.dumps(dict(schema), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise label_error(f"a JSON schema ({shown(str(error), 300)})", schema, where=where) from error
    raise label_error("a JSON schema, an object", schema, where=where)


def prepare(_: dict[str, Any]) -> None:
    """Import the validator, in the worker, and raise the recursion limit for schemas that refer to themselves."""
    _validator("{}")
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _RECURSION_LIMIT))


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Validate a text, in the worker; `unread` says why it has no document, `wrong` what is wrong with it.

    Raises:
        DataError: the schema is invalid.
    """
    validator = _validator(request["schema"])
    reply = {"unread": "", "valid": False, "required": 0.0, "wrong": "", "document": ""}
    try:
        # The part of the text that should be JSON.
        text, lenient = request["text"], request["lenient"]
        fences = list(_FENCE.finditer(text))
        if len(fences) >= 2 and (lenient or (fences[0].start(), fences[-1].end(), len(fences)) == (0, len(text), 2)):
            opened, closed = fences[len(fences) // 2 * 2 - 2 : len(fences) // 2 * 2]
            document = text[opened.end() : closed.start()].strip()
        elif not lenient:
            document = text
        else:
            starts = [at for bracket in "[{" if (at := text.find(bracket)) >= 0]
            end = max(text.rfind("]"), text.rfind("}"))
            if not starts or end < min(starts):
                raise LiteralError("there is none")
            document = text[min(starts) : end + 1]
        value = read_json(document)
    except LiteralError as error:
        return {**reply, "unread": str(error)}
    wrong = _first_error(validator, value)
    reply |= {"valid": wrong is None, "wrong": wrong or "", "document": shown(document)}
    if wrong is None:
        return {**reply, "required": 1.0}
    # The share of required keys (of all properties, if none is required) that are present and valid.
    properties = validator.schema.get("properties", {})
    required = validator.schema.get("required") or list(properties)
    if not required or not isinstance(value, dict):
        return reply
    valid = [
        key in value and _first_error(validator.evolve(schema=properties.get(key, True)), value[key]) is None
        for key in required
    ]
    return {**reply, "required": sum(valid) / len(required)}


@lru_cache(maxsize=256)
def _validator(schema_text: str) -> Any:
    """Return the validator of a schema; it never loads another document.

    Raises:
        DataError: it is not a schema.
    """
    jsonschema, referencing = import_module("jsonschema"), import_module("referencing")
    schema = json.loads(schema_text)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise label_error(f"a JSON schema ({shown(error.message, 300)})", schema, where="schema") from error
    return kind(schema, registry=referencing.Registry())


def _first_error(validator: Any, value: Any) -> str | None:
    """Return the place and the rule of the first error, without the right value; None if the value is valid.

    Raises:
        DataError: the schema has an unresolvable reference or an invalid pattern.
    """
    unresolvable = import_module("referencing.exceptions").Unresolvable
    try:
        error = next(validator.iter_errors(value), None)
    except (unresolvable, re.error, RecursionError) as reason:
        raise label_error(
            f"a JSON schema that can be used ({shown(str(reason), 300)})", validator.schema, where="schema"
        ) from reason
    return None if error is None else shown(f"{error.json_path}: it breaks the rule {error.validator!r}", 300)
