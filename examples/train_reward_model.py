"""Train a small Bradley-Terry reward model from random weights on one half of some pairs, and measure it on the other.

    python examples/train_reward_model.py --out runs/rm
    agentenv rm check runs/rm
    agentenv rm eval --data rm_chat_pairs --rm runs/rm

Data: rows of `chosen` and `rejected`, as rewards/evaluation/rows.py reads; those that begin alike are in the same half.
The last lines say what it is worth: on the half it has not seen, with a 95 % interval, beside a preference for length
alone. A few hundred pairs teach random weights little: where the interval holds 0.5, nothing is shown to be learned.

Three remedies for so few pairs: the model is small; it begins as a mean over all tokens, for its attention is uniform
until training says otherwise; and it never sees all tokens of a text, so that it cannot know a pair by a rare word.
Tensor suffixes: B pairs in a batch (2B conversations, the chosen ones first), T tokens of the longest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from zlib import crc32

import torch
import transformers as hf
import tyro
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence

from agentenv.episode.registry import builtin_datasets
from agentenv.rewards.evaluation.evaluate import RewardModel, evaluate
from agentenv.rewards.evaluation.rows import Item, read_items
from agentenv.rewards.evaluation.tables import table_of
from agentenv.rewards.models.hf import HFScorer
from agentenv.rewards.models.render import ConversationRenderer

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"]  # pad, beginning and end of a turn, a rare word
Tokens = hf.PreTrainedTokenizerFast


@dataclass(frozen=True)
class Args:
    """Settings of the training."""

    out: Path  # directory to write
    data: str = "rm_chat_pairs"  # pairs: built-in data, a file or a Hugging Face dataset
    seed: int = 0  # of the weights and the order of the batches
    train_steps: int = 80  # batches; with few pairs, each is in several
    batch_size: int = 16  # pairs per train step
    learning_rate: float = 1e-3  # at its peak, after a tenth of the steps; it falls to zero at the end
    token_dropout: float = 0.2  # share of the tokens that are blanked while training
    hidden_size: int = 64  # width; heads are 32 wide
    num_layers: int = 1  # decoder layers
    vocab_size: int = 2048  # words, of the training half
    max_length: int = 1024  # tokens of a conversation; of longer ones the end is scored


def main(args: Args) -> None:
    """Train, save, reload as a user would, and measure."""
    started = time.monotonic()
    torch.set_num_threads(1)  # of so small a model: more only wait for each other
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    items = [item for item in read_items([args.data], builtin=builtin_datasets(args.data)) if item.is_pair]
    halves = [[item for item in items if half_of(item) == half] for half in (0, 1)]
    tokenizer = train_tokenizer(halves[0], args)
    model = new_model(tokenizer, args)
    print(f"{model.num_parameters():,} parameters, {len(halves[0])} pairs to train on, {len(halves[1])} held out")
    renderer = ConversationRenderer(tokenizer, max_length=args.max_length, overflow="left")  # rendered as in scoring
    train(model, [[renderer.ids(each).token_ids for each in conversations(item)] for item in halves[0]], args)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved after {time.monotonic() - started:.0f} s", flush=True)
    sign = 1 if length_alone(halves[0], 1) >= length_alone(halves[0], -1) else -1
    for name, half in zip(("training half", "held out"), halves, strict=True):
        print(f"{name}: {asyncio.run(measure(args, half))}; length alone {length_alone(half, sign):.3f}", flush=True)


def half_of(item: Item) -> int:
    """Return 0 or 1, the same for items whose conversations start with the same words."""
    return crc32(str(item.candidates[0].prompt[0]["content"])[:100].lower().encode()) % 2


def conversations(item: Item) -> list[list[dict[str, str]]]:
    """Return the chosen and the rejected conversation."""
    return [[*each.prompt, {"role": "assistant", "content": each.text}] for each in item.candidates]


def length_alone(items: list[Item], sign: int) -> float:
    """Return the accuracy of preferring the longer answer, or with `sign` -1 the shorter one."""
    differences = [len(chosen.text) - len(rejected.text) for chosen, rejected in (item.candidates for item in items)]
    return sum(sign * difference > 0 for difference in differences) / len(items)


def train_tokenizer(items: list[Item], args: Args) -> Tokens:
    """Return a tokenizer of the lower-case words, marks and line ends that occur at least twice."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=MARKS[3]))
    tokenizer.normalizer = normalizers.Lowercase()
    parts = [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Whitespace()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    sizes = {"vocab_size": args.vocab_size, "min_frequency": 2, "special_tokens": MARKS}
    texts = [f"{m['role']}\n{m['content']}" for item in items for messages in conversations(item) for m in messages]
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(**sizes, show_progress=False))
    ends = {"pad_token": MARKS[0], "eos_token": MARKS[2], "unk_token": MARKS[3]}
    named = {**ends, "additional_special_tokens": [MARKS[1]]}
    return Tokens(tokenizer_object=tokenizer, model_max_length=args.max_length, chat_template=CHAT_TEMPLATE, **named)


def new_model(tokenizer: Tokens, args: Args) -> hf.Qwen3ForSequenceClassification:
    """Return an untrained model with one output; its queries are zero, so its attention is uniform."""
    width, num_heads = args.hidden_size, args.hidden_size // 32
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": args.num_layers, "head_dim": 32}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "num_labels": 1}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    room = {"vocab_size": len(tokenizer), "max_position_embeddings": args.max_length}
    model = hf.Qwen3ForSequenceClassification(hf.Qwen3Config(**room, **sizes, **heads, **ends))
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_norm.weight)
    return model


def train(model: hf.Qwen3ForSequenceClassification, pairs: list[list[list[int]]], args: Args) -> None:
    """Make each chosen conversation score more than its rejected one: the loss is -log sigmoid of the difference."""

    def blanked(_module: torch.nn.Module, _inputs: object, embedded_BTD: torch.Tensor) -> torch.Tensor:
        return embedded_BTD * (torch.rand(embedded_BTD.shape[:2]) >= args.token_dropout)[..., None]

    hook = model.model.embed_tokens.register_forward_hook(blanked)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    model.train()
    for step, batch in enumerate(islice(batches(pairs, args), args.train_steps)):
        done = (step + 1) / args.train_steps
        optimizer.param_groups[0]["lr"] = args.learning_rate * min(10 * done, (1.001 - done) / 0.9, 1.0)
        rows = [torch.tensor(pair[side]) for side in (0, 1) for pair in batch]
        ids_BT = pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
        mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        chosen_B, rejected_B = model(ids_BT, attention_mask=mask_BT, use_cache=False).logits[:, 0].chunk(2)
        loss = -logsigmoid(chosen_B - rejected_B).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == args.train_steps - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    hook.remove()
    model.eval()


def batches(pairs: list[list[list[int]]], args: Args) -> Iterator[list[list[list[int]]]]:
    """Yield batches forever, each of pairs of similar length; one pass has every pair once."""
    rng = Random(args.seed)
    while True:
        by_length = sorted(pairs, key=lambda pair: max(map(len, pair)) * rng.uniform(0.8, 1.25))
        starts = range(0, len(pairs), args.batch_size)
        yield from (by_length[start : start + args.batch_size] for start in rng.sample(starts, len(starts)))


async def measure(args: Args, items: list[Item]) -> str:
    """Return the accuracy on pairs, as `agentenv rm eval --overflow left` computes it."""
    scorer = HFScorer(args.out, overflow="left")
    table = table_of(await evaluate(RewardModel(str(args.out), scorer=scorer), items), bench="pairs")
    await scorer.close()
    found = table.accuracy
    return f"accuracy {found.mean:.3f} ({found.ci95_low:.3f} to {found.ci95_high:.3f}) of {table.total.judged} pairs"


if __name__ == "__main__":
    main(tyro.cli(Args))
