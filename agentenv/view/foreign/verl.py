"""verl's dumps of rollouts (`trainer.rollout_data_dir`, `validation_data_dir`): `{step}.jsonl`, of verl 0.9."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from agentenv.core.types import Answer, Task
from agentenv.view.foreign import building
from agentenv.view.foreign.building import Episodes, Json, number_of

_DUMP = re.compile(r"\d{1,9}\.jsonl")
_UID = re.compile(r"(.+)_\d+_\d+")
_OWN = {"input", "output", "gts", "score"}


class VerlReader(building.Reader):
    """A line is an episode, as text. Siblings have one prompt in a step, or one sample in their uid."""

    peer, files, keys = "verl", "{step}.jsonl", frozenset({"input", "output", "score", "step"})

    def files_in(self, folder: Path) -> list[Path]:
        """Return the dumps in a folder, by step."""
        found = [each for each in folder.iterdir() if _DUMP.fullmatch(each.name) and each.is_file()]
        return sorted(found, key=lambda each: int(each.stem))

    def episodes(self, value: Json) -> Episodes:
        """Yield the episode of a line."""
        uid, prompt = _UID.fullmatch(str(value.get("uid", ""))), str(value["input"])
        same = uid[1] if uid else hashlib.blake2b(prompt.encode("utf-8", "replace"), digest_size=5).hexdigest()
        group = f"{same}@{value['step']}"
        others = {key: each for key, each in value.items() if key not in _OWN}
        task = Task(prompt, value.get("gts"), group, metadata=others)
        info = {key: each for key, each in others.items() if key not in ("step", "uid", "request_id")}
        call = building.Call(Answer(str(value["output"])))
        reward = number_of(value["score"])
        yield building.build_episode(task, next(self.numbers[group]), [call], reward, info, None)
