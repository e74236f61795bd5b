"""What a shared page leaves out on request: folders, names of machines and services, and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from agentenv._util.jsonable import jsonable

_NAMES = {
    "env", "agent_func_path", "model", "critic_pretrain", "tokenizer", "data", "split", "eval_dataset", "eval_split",
    "engine", "dtype", "device", "advantage_estimator", "credit", "prompt_key", "label_key",
}  # fmt: skip
"""Flags whose texts are kept, without folders; those of other flags may be addresses, keys or names of machines."""
_HOST_OF_URL = re.compile(r"[a-z][a-z0-9+.-]*://(?:[^\s/@\"]*@)?([A-Za-z][\w.-]*)", re.IGNORECASE)
_OWN_HOSTS = {"localhost"}
_PATH = re.compile(r"(?<![\w.])~?(?:/[\w.@+-]+){2,}/?")
_SOURCES = "c|cc|cpp|cu|go|h|hpp|java|js|jsonl|json|jsx|md|pt|pxd|py|pyi|pyx|rs|sh|so|toml|ts|tsx|txt|yaml|yml"
"""Ends of names that a number of a line follows, not a port."""
_HOSTS = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s'\"<>]+"  # an address as a whole: its path may name what is served
    r"|(?P<key>\b(?:host|hostname|server|peer|addr)=)(?:'[^']*'|\"[^\"]*\"|[^\s,)\]]+)"
    r"|[\w.+-]+@[a-z][\w.-]*"
    r"|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?!\w|\.\w)"
    r"|\[[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\](?::\d+)?"
    rf"|(?<![\w./-])(?![\w.-]*\.(?:{_SOURCES}):)[A-Za-z][\w.-]*:\d{{2,5}}(?!\w|\.\w)",
    re.IGNORECASE,
)
"""Names and addresses of machines in the text of an error: URLs, host=…, user@host, numbers, and host:port."""
_LEFT_OUT, _FILE = "…", "tokenizer.json"
TOLD = ("refusal_reasons", "models")
"""Values of metrics and of rows of the index that are texts of errors, or names that a server gave its models."""


@dataclass(frozen=True, slots=True)
class Redaction:
    """What is left out."""

    paths: bool = False
    """Folders, the texts of flags that may name machines and services, and names of machines in errors."""
    labels: bool = False
    """Labels of tasks, and the entries of their rows that hold them."""
    label_key: str = ""
    """The column of the labels, or `column.key`; see `of_run`."""
    hosts: frozenset[str] = frozenset()
    """Names of machines in the flags of a run, which the texts of its errors may repeat; see `of_run`."""

    def of_run(self, flags: Mapping[str, Any]) -> Redaction:
        """Return what is left out of the episodes of a run with these flags."""
        values = json.dumps(jsonable({name: value for name, value in flags.items() if name not in _NAMES}))
        hosts = frozenset(name for name in _HOST_OF_URL.findall(values) if name.lower() not in _OWN_HOSTS)
        return replace(self, label_key=str(flags.get("label_key") or ""), hosts=hosts)

    def meta(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of `/api/meta` without it."""
        values = dict(meta)
        if not self.paths:
            return values
        config = values.get("config")
        if isinstance(config, dict) and isinstance(config.get("config"), dict):
            known = config["config"]
            flags = known.get("flags") if isinstance(known.get("flags"), dict) else {}
            kept = {name: self._name(name, value) for name, value in flags.items() if self._keeps(name, value)}
            head = {key: config.get(key) for key in ("schema_version", "versions")}
            values["config"] = head | {"config": {"flags": kept}}
        name = values["name"]
        values["name"] = values["path"] = f"{_LEFT_OUT}/{PurePath(name).name}" if PurePath(name).is_absolute() else name
        values["env"] = self._name("env", values["env"])
        values["model"] = self._name("model", values["model"])
        values["changed_flags"] = [
            [name, self._name(name, value)] for name, value in values["changed_flags"] if self._keeps(name, value)
        ]
        known = {"sha256": values["tokenizer"].get("sha256"), "source": _FILE}
        values["tokenizer"] = {"error": "no tokenizer"} if "error" in values["tokenizer"] else known
        values["metrics"] = self._metrics(values["metrics"])
        return values

    def _metrics(self, metrics: Any) -> Any:
        """Return the numbers of a run, and those of each environment of a mixture, without it."""
        if not isinstance(metrics, dict):
            return metrics
        kept = metrics | {name: self.text(metrics[name]) for name in TOLD if name in metrics}
        if isinstance(by_env := metrics.get("environments"), dict):
            kept["environments"] = {name: self._metrics(own) for name, own in by_env.items()}
        return kept

    @staticmethod
    def _keeps(name: str, value: Any) -> bool:
        try:
            float("nan" if value is None else value)
        except (TypeError, ValueError):
            return name in _NAMES
        return True

    @staticmethod
    def _name(name: str, value: Any) -> Any:
        """Return a flag's text without folders."""
        if isinstance(value, list | tuple):
            return [Redaction._name(name, each) for each in value]
        if name == "env" and isinstance(value, Mapping):  # an entry of a mixture
            return {
                key: Redaction._name(key, each)
                for key, each in value.items()
                if key == "name" or Redaction._keeps(key, each)
            }
        if not isinstance(value, str) or ("/" not in value and "\\" not in value):
            return value
        return PurePath(value.replace("\\", "/")).name

    def comparison(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of `/api/diff` without it: without the flags and files that differ."""
        if not self.paths:
            return dict(value)
        caveats = []
        for each in value["caveats"]:
            name, colon, _ = each["text"].partition(": ")
            is_flag = name.startswith("--") and name[2:] not in _NAMES
            is_withheld = colon and (is_flag or name == "code")  # the values of that flag, or the names of files
            caveats.append({**each, "text": self.text(f"{name}: differs" if is_withheld else each["text"])})
        sides = {side: {**value[side], "name": self._name("out", value[side]["name"])} for side in ("a", "b")}
        return {**value, **sides, "changed": {}, "caveats": caveats}

    def record(self, values: dict[str, Any]) -> None:
        """Remove it from the values of an episode: labels, and folders and machines in the texts of its errors."""
        if self.labels and isinstance(task := values.get("task"), dict):
            label, task["label"] = task.get("label"), None
            task["metadata"] = _without_label(task.get("metadata"), label, {"label", *self.label_key.split(".")[:1]})
            for turn in values.get("turns") or ():
                if isinstance(result := turn.get("result"), dict):
                    result["info"] = self.info(result.get("info"), label)
        answers = [turn.get("answer") for turn in values.get("turns") or ()]
        for told in (values, *(answer for answer in answers if isinstance(answer, dict))):
            told.update({name: self.text(told[name]) for name in ("error", "model", *TOLD) if name in told})

    def info(self, info: Any, label: Any) -> Any:
        """Return the `info` of a turn, or of a row of the index, without the values that equal the task's label."""
        if not self.labels or not isinstance(info, dict):
            return info
        kept = {}
        for key, value in info.items():
            # The last value of a key, or it and the sum over the turns.
            parts = [value[0], value[1] - value[0]] if isinstance(value, list) and len(value) == 2 else [value]
            if not any(_is_label(part, label) for part in parts):
                kept[key] = value
        return kept

    def text(self, value: Any) -> Any:
        """Return a text about an error, or all texts of a value, without folders and names of machines."""
        if isinstance(value, dict):  # numbers by names, of which some may become equal
            found: dict[str, Any] = {}
            for key, each in value.items():
                name = self.text(key)
                is_count = isinstance(each, int) and isinstance(found.get(name), int)
                found[name] = found[name] + each if is_count else self.text(each)
            return found
        if isinstance(value, list):
            return list(map(self.text, value))
        if not self.paths or not isinstance(value, str):
            return value
        text = _HOSTS.sub(lambda match: f"{match['scheme'] or match['key'] or ''}{_LEFT_OUT}", value)
        for host in sorted(self.hosts, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", _LEFT_OUT, text, flags=re.IGNORECASE)
        return _PATH.sub(lambda match: f"{_LEFT_OUT}/{PurePath(match[0]).name}", text)


def _without_label(value: Any, label: Any, names: Collection[str]) -> Any:
    """Return a row's entries without those under the names of the label's column and those that equal the label."""
    if isinstance(value, dict):
        return {
            key: _without_label(each, label, names)
            for key, each in value.items()
            if key not in names and not _is_label(each, label)
        }
    if isinstance(value, list):
        return [_without_label(each, label, names) for each in value if not _is_label(each, label)]
    return value


def _is_label(value: Any, label: Any) -> bool:
    """Return True if a value equals a label, as a number or as a text."""
    if label is None or isinstance(value, dict | list):
        return label is not None and bool(value == label)
    return bool(value == label or str(value).strip() == str(label).strip() or _number(value) == _number(label))


def _number(value: Any) -> float | object:
    """Return the number of a value or of its text; an object that equals no other if there is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return object()
