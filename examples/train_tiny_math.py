"""Train the tiny-math policy from scratch: tokenizer, model, a Hugging Face directory. 11 minutes on two CPU cores.

    python examples/train_tiny_math.py --out agentenv/_assets/tiny-math

Last line: accuracies and tokens per attempt on the shipped task set, as in "greedy 0.62, ..., third 0.3, ...".
A first attempt leaps over each operation, hard for four layers; after feedback it works by columns. Wrong attempts are
context only: the loss covers the last, right attempt. Equal flags give equal bytes on equal machines.
Tensor suffixes: B conversations in a batch, T tokens of the longest, V tokens of the vocabulary.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import transformers as hf
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from agentenv_envs.math_retry.env import feedback_text, question_text

sys.path.append(str(Path(__file__).parents[1]))
from examples.make.word_problems import TASK_SET, Problem, apply, make_problems, read_questions, work_out

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call one so: <tool_call>{"name": "...", "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{\"name\": {{ call.function.name | tojson }}, "
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Source: tokenizer.json of Qwen/Qwen2-0.5B, and Qwen2Tokenizer of transformers 5.
QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
IGNORED = -100
Tokens = hf.PreTrainedTokenizerFast
Chat = list[dict[str, str]]
Example = tuple[list[int], list[int]]  # token ids and labels


@dataclass(frozen=True)
class Args:
    """Settings of the training."""

    out: Path
    """Directory to write."""
    seed: int = 0
    """Seed of the problems, the conversations, the weights and the sampled attempts."""
    train_steps: int = 2000
    """Train steps."""
    batch_size: int = 16
    """Conversations per train step."""
    learning_rate: float = 3e-3
    """Peak learning rate; it rises over the first 5 % of the steps and falls to zero over the last half."""
    hidden_size: int = 128
    """Width; heads are 32 wide."""
    num_layers: int = 4
    """Decoder layers."""
    eval_samples: int = 4
    """First attempts sampled per task at the end; 0 skips the measurement."""


def main(args: Args) -> None:
    """Train, save, reload as a user would, and measure."""
    started = time.monotonic()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = Random(args.seed)
    problems = training_problems(args)
    conversations = [make_conversation(problem, rng) for problem in problems]
    drills = [make_drill(problems[i : i + 6], rng) for i in range(0, len(problems), 3)]
    tokenizer = train_tokenizer(conversations[:5000])
    model = new_model(args, tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(problems):,} problems", flush=True)
    examples = [encode(tokenizer, messages) for messages in conversations + drills]
    train(model, batches(examples, args.batch_size, rng)[: args.train_steps], args.learning_rate)
    save(model, tokenizer, args.out)
    print(f"saved after {time.monotonic() - started:.0f} s", flush=True)
    if args.eval_samples:
        print(", ".join(f"{k} {v:.3g}" for k, v in measure(args.out, args.eval_samples, args.seed).items()))


def training_problems(args: Args) -> list[Problem]:
    """Return the problems of all steps, without the questions of the shipped task set."""
    return make_problems(args.train_steps * args.batch_size * 3 // 4 + 1, args.seed + 1, exclude=read_questions())


def make_conversation(problem: Problem, rng: Random) -> Chat:
    """Return messages from the question to a right attempt; one first attempt in ten works by columns at once."""
    messages = [{"role": "user", "content": question_text(problem.question)}]
    num_failed = rng.choices((0, 1, 2), weights=(50, 42, 8))[0]
    attempts_left = rng.randint(max(1, num_failed), 3)
    for index in range(num_failed):
        attempt = wrong_attempt(problem, rng, by_columns=rng.random() < (0.9 if index else 0.1))
        messages += failed_turn(attempt, attempts_left - index)
    right = problem.long_solution if num_failed or rng.random() < 0.1 else problem.short_solution
    return [*messages, {"role": "assistant", "content": right}]


def failed_turn(attempt: str, attempts_left: int) -> Chat:
    """Return a wrong attempt and the reply of math_retry."""
    answer = read_answer(attempt)
    feedback = feedback_text("no_answer" if answer is None else "wrong", answer, attempts_left)
    return [{"role": "assistant", "content": attempt}, {"role": "user", "content": feedback}]


def wrong_attempt(problem: Problem, rng: Random, *, by_columns: bool) -> str:
    """Return an attempt of a weak policy: slips that the next lines build on, or no final answer."""
    value = problem.answer
    while value == problem.answer:
        value, lines = -1, []
        for step in problem.short_solution.splitlines()[:-1]:
            first, operator, right = step.split()[:3]
            left = int(first) if value < 0 else value
            operator = rng.choice("+-") if rng.random() < 0.05 else operator
            slip = rng.choice((1, 2, 10, 10, 20, 100)) * rng.choice((-1, 1)) if rng.random() < 0.7 else 0
            value = abs(apply(left, operator, int(right)) + slip)
            columns, _ = work_out(left, operator, int(right)).split(", so ")
            columns = re.sub(r"= -?\d+", lambda m: m[0] if rng.random() < 0.7 else f"= {rng.randint(0, 18)}", columns)
            lines.append(f"{columns}, so {value}." if by_columns else f"{left} {operator} {right} = {value}")
    return "\n".join(lines if rng.random() < 0.1 else [*lines, f"#### {value}"])


def make_drill(problems: list[Problem], rng: Random) -> Chat:
    """Return one operation of each problem, in one step or by columns: more arithmetic per token."""
    by_columns = rng.random() < 0.5
    solutions = [p.long_solution if by_columns else p.short_solution for p in problems]
    lines = [rng.choice(solution.splitlines()[:-1]) for solution in solutions]
    question = "\n".join(re.split(" =|:", line)[0] for line in lines)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "\n".join(lines)}]


def read_answer(text: str) -> str | None:
    """Return the number after the last ####, or None."""
    return (re.findall(r"####\s*(-?\d+)", text) or [None])[-1]


def encode(tokenizer: Tokens, messages: Chat) -> Example:
    """Return token ids as the chat template renders them, and labels for the last attempt and its <|im_end|> only."""
    prompt_ids = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    action_ids = [*tokenizer.encode(messages[-1]["content"]), tokenizer.eos_token_id]
    return prompt_ids + action_ids, [IGNORED] * len(prompt_ids) + action_ids


def batches(examples: list[Example], batch_size: int, rng: Random) -> list[list[torch.Tensor]]:
    """Return ids and labels of examples of similar length, padded on the right; the batches in random order."""
    by_length, made = sorted(rng.sample(examples, len(examples)), key=lambda example: len(example[0])), []
    for start in range(0, len(by_length), batch_size):
        ids, labels = zip(*by_length[start : start + batch_size], strict=True)
        padded = [([torch.tensor(row) for row in rows], fill) for rows, fill in ((ids, 0), (labels, IGNORED))]
        made.append([pad_sequence(rows, batch_first=True, padding_value=fill) for rows, fill in padded])
    return rng.sample(made, len(made))


def train_tokenizer(chats: list[Chat]) -> Tokens:
    """Return a byte-level BPE that splits text as Qwen2 does (NFC, single digits), trained on these words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pieces = Regex(QWEN2_PIECES)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pieces, "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=640, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((f"{m['role']}\n{m['content']}" for chat in chats for m in chat), trainer)
    named = {"pad_token": marks[0], "eos_token": marks[2], "additional_special_tokens": [marks[1]]}
    return Tokens(tokenizer_object=tokenizer, model_max_length=2048, chat_template=CHAT_TEMPLATE, **named)


def new_model(args: Args, tokenizer: Tokens) -> hf.Qwen2ForCausalLM:
    """Return an untrained model for the tokenizer."""
    width, num_heads = args.hidden_size, args.hidden_size // 32
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": args.num_layers}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "max_position_embeddings": 2048}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = hf.Qwen2Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes, **heads, **ends)
    model = hf.Qwen2ForCausalLM(config)
    model.generation_config = hf.GenerationConfig(**{key: ends[key] for key in ("eos_token_id", "pad_token_id")})
    return model


def save(model: hf.Qwen2ForCausalLM, tokenizer: Tokens, out: Path) -> None:
    """Write a directory that loads by name: transformers loads a Qwen2Tokenizer for every qwen2 model."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Qwen2Tokenizer"
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def train(model: hf.Qwen2ForCausalLM, data: list[list[torch.Tensor]], learning_rate: float) -> None:
    """Train one pass over the batches: Muon for the matrices, AdamW for embeddings, biases and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    started, num_steps = time.monotonic(), len(data)
    for step, (ids_BT, labels_BT) in enumerate(data):
        factor = min(1.0, (step + 1) / (0.05 * num_steps), 2 * (num_steps - step) / num_steps)
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.param_groups[0]["lr"] = learning_rate * factor
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True)


def measure(model_dir: Path, num_samples: int, seed: int) -> dict[str, float]:
    """Return accuracies and tokens per attempt on the shipped tasks; the control is a new first attempt."""
    tokenizer = hf.AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = hf.AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto").eval()
    torch.manual_seed(seed)
    figures: dict[str, float] = {}

    def attempt(items: list[tuple[Chat, str]], name: str, left: int = 1) -> list[tuple[Chat, str]]:
        texts, num_tokens = sample(model, tokenizer, [messages for messages, _ in items], name == "greedy")
        tried = [(*item, text) for item, text in zip(items, texts, strict=True)]
        failed = [(chat + failed_turn(text, left), right) for chat, right, text in tried if read_answer(text) != right]
        count = max(1, len(items))
        figures.update({name: 1 - len(failed) / count, f"{name} tokens": num_tokens / count})
        return failed

    rows = [json.loads(line) for line in TASK_SET.read_text(encoding="utf-8").splitlines()]
    items = [([{"role": "user", "content": question_text(row["prompt"])}], row["label"][5:]) for row in rows]
    attempt(items, "greedy")
    failed = attempt(items * num_samples, "first", left=2)
    attempt([(messages[:1], answer) for messages, answer in failed], "control")
    attempt(attempt(failed, "after feedback"), "third")
    return figures


@torch.inference_mode()
def sample(model: hf.Qwen2ForCausalLM, tokenizer: Tokens, chats: list[Chat], greedy: bool) -> tuple[list[str], int]:
    """Return one attempt per conversation at temperature 1 (or greedy), and the number of tokens in all of them."""
    texts, num_tokens = [], 0
    rendering = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    for start in range(0, len(chats), 400):
        inputs = tokenizer.apply_chat_template(chats[start : start + 400], **rendering)
        ids_BT = model.generate(**inputs, **sampling, max_new_tokens=160)[:, inputs["input_ids"].shape[1] :]
        num_tokens += int((ids_BT != tokenizer.pad_token_id).sum())
        texts += tokenizer.batch_decode(ids_BT, skip_special_tokens=True)
    return texts, num_tokens


if __name__ == "__main__":
    main(tyro.cli(Args))
