"""Train the tiny-math policy from scratch: tokenizer, four layers, a Hugging Face directory. Minutes on two CPU cores.

    python examples/train_tiny_math.py --out agentenv/models/tiny-math

Last line: the accuracies on the shipped task set, as in `first 0.52, after feedback 0.74, control 0.29, ...`.
The policy answers first in a single leap, which four layers find hard, and after feedback works by columns. Wrong attempts are
in the context only; the loss covers the assistant tokens of right attempts. Equal flags give equal bytes on equal machines.
Tensor suffixes: B conversations in a batch, T tokens of the longest.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import tyro
from agentenv_envs.math_retry.problems import TASK_SET, Problem, make_problems, read_questions
from agentenv_envs.math_retry.texts import feedback_text, question_text
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IGNORED = -100
Message = dict[str, str]


@dataclass(frozen=True)
class Args:
    """What to train, and on how much."""

    out: Path
    """Directory to write."""
    seed: int = 0
    """Of the problems, the conversations, the weights and the sampled attempts."""
    train_steps: int = 1200
    """Train steps."""
    batch_size: int = 32
    """Conversations per train step."""
    learning_rate: float = 4e-3
    """At its peak; it rises over the first 5 % of the steps and falls to zero over the last half."""
    hidden_size: int = 128
    """Width; heads are 32 wide."""
    num_layers: int = 4
    """Decoder layers."""
    vocab_size: int = 640
    """At most; bytes and special tokens are 259 of them."""
    first_long: float = 0.1
    """Share of right first attempts that work by columns at once, so that reinforcement has something to find."""
    eval_samples: int = 4
    """First attempts sampled per task at the end; 0 skips the measurement."""
    num_threads: int = 2
    """Of torch; another number may change the last bits."""


def main(args: Args) -> None:
    """Train, save, reload as a user would, and measure."""
    started = time.monotonic()
    torch.set_num_threads(args.num_threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    problems = make_problems(args.train_steps * args.batch_size, args.seed + 1, exclude=read_questions())
    rng = Random(args.seed)
    conversations = [make_conversation(problem, rng, args.first_long) for problem in problems]
    tokenizer = train_tokenizer(conversations[:5000], args.vocab_size)
    model = make_model(args, tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(problems):,} conversations", flush=True)
    examples = [encode(tokenizer, conversation) for conversation in conversations]
    train(model, list(batches(examples, args.batch_size, rng)), args.learning_rate)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved after {time.monotonic() - started:.0f} s", flush=True)
    if args.eval_samples:
        print(", ".join(f"{name} {value:.3g}" for name, value in measure(args.out, args.eval_samples, args.seed).items()))


# ---- data


def make_conversation(problem: Problem, rng: Random, first_long: float) -> list[Message]:
    """Messages from the question to a right attempt; only that last message is trained on."""
    messages = [{"role": "user", "content": question_text(problem.question)}]
    num_failed = rng.choices((0, 1, 2), weights=(50, 42, 8))[0]
    attempts_left = rng.randint(num_failed, 3)
    for index in range(num_failed):
        attempt = wrong_attempt(problem, rng, by_columns=rng.random() < (0.9 if index else 0.1))
        answer = read_answer(attempt)
        feedback = feedback_text("no_answer" if answer is None else "wrong", answer, max(1, attempts_left - index))
        messages += [{"role": "assistant", "content": attempt}, {"role": "user", "content": feedback}]
    by_columns = num_failed > 0 or rng.random() < first_long
    return [*messages, {"role": "assistant", "content": problem.long_solution if by_columns else problem.short_solution}]


def wrong_attempt(problem: Problem, rng: Random, *, by_columns: bool) -> str:
    """An attempt as a weak policy makes it: a digit off, an operation mistaken, or no final answer."""
    text, right = (problem.long_solution if by_columns else problem.short_solution), str(problem.answer)
    if rng.random() < 0.1:
        return text[: text.index("####")].rstrip()
    if not by_columns and rng.random() < 0.2:
        old, new = rng.choice(((" + ", " - "), (" - ", " + "), (" * ", " + ")))
        text = text.replace(old, new, 1)
    wrong = right
    while wrong == right:
        wrong = str(abs(problem.answer + rng.choice((1, 1, 10, 10, 100, rng.randint(2, 99))) * rng.choice((-1, 1))))
    return re.sub(rf"(= |so |#### ){right}(?=\n|\.\n|$)", rf"\g<1>{wrong}", text)


def read_answer(text: str) -> str | None:
    """The number after the last ####, or None."""
    found = re.findall(r"####\s*(-?\d+)", text)
    return found[-1] if found else None


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Token ids as the chat template renders them, and labels that ignore all but the last attempt and its <|im_end|>."""
    start: str = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer.encode(start)
    action_ids = [*tokenizer.encode(messages[-1]["content"]), tokenizer.eos_token_id]
    return prompt_ids + action_ids, [IGNORED] * len(prompt_ids) + action_ids


def batches(
    examples: list[tuple[list[int], list[int]]], batch_size: int, rng: Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of neighbours in length, in random order within each run of 32 batches, padded on the right."""
    for start in range(0, len(examples), 32 * batch_size):
        by_length = sorted(examples[start : start + 32 * batch_size], key=lambda example: len(example[0]))
        chunks = [by_length[i : i + batch_size] for i in range(0, len(by_length), batch_size)]
        for chunk in rng.sample(chunks, len(chunks)):
            longest = max(len(ids) for ids, _ in chunk)
            ids_BT = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in chunk])
            labels_BT = torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in chunk])
            yield ids_BT, labels_BT


# ---- tokenizer and model


def train_tokenizer(conversations: list[list[Message]], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits digits and loses nothing of any text."""
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+ ?|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    texts = (f"{m['role']}\n{m['content']}" for messages in conversations for m in messages)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], model_max_length=2048
    )
    fast.add_special_tokens({"additional_special_tokens": [special[1]]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(args: Args, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A Qwen2 of random weights, its embeddings tied."""
    num_heads = args.hidden_size // 32
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **ends,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def train(model: Qwen2ForCausalLM, data: list[tuple[torch.Tensor, torch.Tensor]], learning_rate: float) -> None:
    """One pass over the batches: Muon for the matrices, AdamW for embeddings, biases and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    model.train()
    started, num_steps = time.monotonic(), len(data)
    for step, (ids_BT, labels_BT) in enumerate(data):
        factor = min(1.0, (step + 1) / (0.05 * num_steps), 2 * (num_steps - step) / num_steps)
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * factor
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True)


# ---- measurement


def measure(model_dir: Path, num_samples: int, seed: int) -> dict[str, float]:
    """Accuracies of first, second and third attempts on the shipped task set, and of fresh first attempts on the failed."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    torch.manual_seed(seed)
    rows = [json.loads(line) for line in TASK_SET.read_text(encoding="utf-8").splitlines()]

    def attempt(items: list[tuple[list[Message], str]], name: str, *, greedy: bool = False) -> list[str]:
        texts, num_tokens = sample(model, tokenizer, [messages for messages, _ in items], greedy=greedy)
        right = sum(read_answer(text) == answer for text, (_, answer) in zip(texts, items, strict=True))
        figures.update({name: right / max(1, len(items)), f"{name} tokens": num_tokens / max(1, len(items))})
        return texts

    figures: dict[str, float] = {}
    greedy_items = [([{"role": "user", "content": question_text(row["prompt"])}], row["label"][5:]) for row in rows]
    attempt(greedy_items, "greedy", greedy=True)
    items = greedy_items * num_samples
    for name, attempts_left in (("first", 2), ("after feedback", 1), ("third", 0)):
        texts = attempt(items, name)
        failed = []
        for (messages, answer), text in zip(items, texts, strict=True):
            found = read_answer(text)
            if found != answer:
                feedback = feedback_text("no_answer" if found is None else "wrong", found, max(1, attempts_left))
                turn = [{"role": "assistant", "content": text}, {"role": "user", "content": feedback}]
                failed.append(([*messages, *turn], answer))
        items = failed
        if name == "first":
            attempt([(messages[:1], answer) for messages, answer in failed], "control")
    return figures


@torch.inference_mode()
def sample(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[Message]], *, greedy: bool
) -> tuple[list[str], int]:
    """One attempt per conversation at temperature 1 (or greedily), and the number of tokens in all of them."""
    texts, num_tokens = [], 0
    tokenizer.padding_side = "left"
    for start in range(0, len(prompts), 200):
        inputs = tokenizer.apply_chat_template(
            prompts[start : start + 200], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        settings = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        ids_BT = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=160, **settings
        )[:, inputs["input_ids"].shape[1] :]
        num_tokens += int((ids_BT != tokenizer.pad_token_id).sum())
        texts += tokenizer.batch_decode(ids_BT, skip_special_tokens=True)
    return texts, num_tokens


if __name__ == "__main__":
    main(tyro.cli(Args))
