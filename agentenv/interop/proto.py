"""Rows of a DataProto, which verl and ROLL have alike: its texts without padding, and its columns as plain values.

Nothing here needs either of them: `batch` is a mapping of tensors, `non_tensor_batch` one of numpy arrays of objects.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentenv.errors import DataError
from agentenv.rewards.types import RewardResult

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>")
"""What rewards read a text by."""
BULKY = ("multi_modal_data", "multi_modal_inputs", "raw_prompt_ids")
"""Columns of verl's that no reward is shown."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The prompts and responses of a batch."""

    prompts: list[str]
    responses: list[str]
    prompt_ids: list[tuple[int, ...]]
    """Without padding."""
    num_tokens: list[int]
    """Of each response, without padding."""


def read_texts(data: Any, tokenizer: Any) -> Texts:
    """The texts of `batch["prompts"]` and `["responses"]`, decoded without padding and special tokens.

    Where the columns `prompt_len` and `response_len` say how long they are, that holds: `attention_mask` [B, P+T] is
    not aligned with prompts that verl pads on the right. Without either, tokens of `tokenizer.pad_token_id` at the
    end of a response are its padding.

    Raises:
        DataError: there are no prompts or responses.
    """
    prompts, responses = (_tensor(data, name) for name in ("prompts", "responses"))
    mask = data.batch["attention_mask"] if "attention_mask" in data.batch.keys() else None  # noqa: SIM118 - TensorDict
    masks = [None] * len(responses) if mask is None else mask.bool().tolist()
    pad = getattr(tokenizer, "pad_token_id", None)
    said = zip(column(data, "prompt_len"), column(data, "response_len"), strict=True)
    prompt_ids, response_ids = [], []
    for prompt, response, mask_row, (prompt_len, response_len) in zip(
        prompts.tolist(), responses.tolist(), masks, said, strict=True
    ):
        width = len(prompt)
        prompt_ids.append(_prompt(prompt, None if mask_row is None else mask_row[:width], prompt_len, pad))
        response_ids.append(_response(response, None if mask_row is None else mask_row[width:], response_len, pad))
    return Texts(
        _decoded(tokenizer, prompt_ids),
        _decoded(tokenizer, response_ids),
        [tuple(ids) for ids in prompt_ids],
        [len(ids) for ids in response_ids],
    )


def _decoded(tokenizer: Any, ids: Sequence[Sequence[int]]) -> list[str]:
    """The texts without special tokens, but with the tags that some tokenizers count among them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    tags = {token_id for token_id, token in added.items() if token.special and token.content in TAGS}
    left_out = {token_id for token_id, token in added.items() if token.special and token_id not in tags}
    plain_ids = [[token for token in row if token not in left_out] for row in ids] if tags else list(ids)
    texts: list[str] = tokenizer.batch_decode(plain_ids, skip_special_tokens=not tags)
    return texts


def _tensor(data: Any, name: str) -> Any:
    if name in data.batch.keys():  # noqa: SIM118 - a TensorDict
        return data.batch[name]
    raise DataError(f"batch: expected {name!r}, got {sorted(map(str, data.batch.keys()))}. Grade after generating.")


def _prompt(ids: list[int], mask: list[int] | None, said: Any, pad: int | None) -> list[int]:
    if mask is None:
        return [token for token in ids if token != pad] if said is None else ids[: int(said)]
    if said is None or sum(mask) == int(said):
        return [token for token, real in zip(ids, mask, strict=True) if real]
    return ids[: int(said)]


def _response(ids: list[int], mask: list[int] | None, said: Any, pad: int | None) -> list[int]:
    if said is not None:
        return ids[: int(said)]
    if mask is not None:
        return ids[: sum(mask)]
    end = len(ids)
    while end and ids[end - 1] == pad:
        end -= 1
    return ids[:end]


def column(data: Any, name: str) -> list[Any]:
    """A column's values as plain Python, one per row; None for each where there is no such column."""
    if name not in data.non_tensor_batch:
        return [None] * len(data)
    return [plain(value) for value in data.non_tensor_batch[name]]


def rows(data: Any, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The columns of each row, as plain Python: those of `names` that there are, or all but images and token ids."""
    there = data.non_tensor_batch.keys()
    chosen = (
        [name for name in there if name not in BULKY] if names is None else [name for name in names if name in there]
    )
    columns = {name: column(data, name) for name in chosen}
    return [{name: values[index] for name, values in columns.items()} for index in range(len(data))]


def plain(value: Any) -> Any:
    """The value without numpy's types, which Parquet files bring; mappings and lists are copied, other objects kept."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if type(value).__module__ != "numpy":
        return value
    listed = value.tolist()
    return listed if type(listed) is type(value) else plain(listed)


def placed(responses: torch.Tensor, num_tokens: Sequence[int], rewards: Sequence[float]) -> torch.Tensor:
    """[B, T] float32: each reward at its response's last token, which an empty one lacks; zeros elsewhere."""
    import torch

    tensor = torch.zeros(responses.shape, dtype=torch.float32, device=responses.device)
    at = [row for row, length in enumerate(num_tokens) if length]
    tensor[at, [num_tokens[row] - 1 for row in at]] = tensor.new_tensor([rewards[row] for row in at])
    return tensor


def warn_of_invalid(results: Sequence[RewardResult]) -> None:
    """Say in the log how many have no reward, and why the first: what stands in a tensor instead does not."""
    invalid = [result.detail or str(result.status) for result in results if result.reward is None]
    if invalid:
        logger.warning("%d of %d responses have no reward; the first: %s", len(invalid), len(results), invalid[0])
