"""A DataProto of the shape that verl's and ROLL's have, a tokenizer, batches of texts, and modules that stand in."""

import sys
from types import ModuleType

import numpy as np
import torch

from agentenv.testing.tokenizers import CharTokenizer

PAD = 1


def stand_in(monkeypatch, modules):
    """Let imports find modules of these names with these values."""
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


class Tokenizer(CharTokenizer):
    """With what a Hugging Face tokenizer has for batches, and what it was asked for."""

    pad_token_id = PAD

    def __init__(self):
        super().__init__()
        self.decoded = []

    def batch_decode(self, rows, *, skip_special_tokens=False):
        self.decoded += [list(row) for row in rows]
        return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]


class DataProto:
    def __init__(self, batch, non_tensor_batch=None, meta_info=None):
        self.batch, self.non_tensor_batch = dict(batch), dict(non_tensor_batch or {})
        self.meta_info = dict(meta_info or {})

    @classmethod
    def from_dict(cls, tensors, non_tensors=None, meta_info=None):
        return cls(tensors, non_tensors, meta_info)

    def __len__(self):
        return len(next(iter(self.batch.values())))

    def __getitem__(self, rows):
        if not isinstance(rows, slice):
            rows = list(rows)
        cut = [{key: value[rows] for key, value in part.items()} for part in (self.batch, self.non_tensor_batch)]
        return DataProto(*cut, self.meta_info)

    def chunk(self, chunks):
        assert len(self) >= chunks, f"batch_size {len(self)} < chunks {chunks}"
        return [self[list(part)] for part in np.array_split(np.arange(len(self)), chunks)]

    @staticmethod
    def concat(protos):
        batch = {key: torch.cat([each.batch[key] for each in protos]) for key in protos[0].batch}
        columns = {
            key: np.concatenate([each.non_tensor_batch[key] for each in protos]) for key in protos[0].non_tensor_batch
        }
        return DataProto(batch, columns, protos[0].meta_info)


def objects(values):
    """A column, as both keep them."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def padded(texts, tokenizer, *, left, extra=3):
    """[B, T] ids and mask, `extra` columns wider than the longest."""
    ids = [tokenizer.encode(text) for text in texts]
    width = max(map(len, ids), default=0) + extra
    tokens, mask = [], []
    for row in ids:
        pads = [PAD] * (width - len(row))
        tokens.append(pads + row if left else row + pads)
        mask.append([int(token != PAD) for token in tokens[-1]])
    return torch.tensor(tokens).reshape(len(texts), width), torch.tensor(mask).reshape(len(texts), width)


def batch_of(prompts, responses, *, proto=DataProto, tokenizer=None, meta_info=None, **columns):
    """A batch after generation: prompts padded on the left, responses on the right."""
    tokenizer = tokenizer or Tokenizer()
    prompt_ids, prompt_mask = padded(prompts, tokenizer, left=True)
    response_ids, response_mask = padded(responses, tokenizer, left=False)
    tensors = {
        "prompts": prompt_ids,
        "responses": response_ids,
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
    }
    non_tensors = {name: objects(list(values)) for name, values in columns.items()}
    return proto.from_dict(tensors, non_tensors, meta_info=meta_info or {})
