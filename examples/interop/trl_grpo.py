"""TRL's GRPOTrainer on math_retry: our episodes, TRL's optimizer, a tiny model on the CPU.

pip install 'agentenv-rl[trl]' and run it:

    python examples/interop/trl_grpo.py

expected last line: 3 steps, 48 episodes, 0 failed
"""

from agentenv.core.dataset import read_tasks
from agentenv.engines.models import resolve_model
from agentenv.episode.registry import load_env
from agentenv.interop.trl import EnvRollout, dataset, reward


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = resolve_model("tiny-math")
    rows = read_tasks(str(load_env("math_retry").datasets["word_problems_train"]), limit=64)
    rollout = EnvRollout("math_retry", rows, limits={"max_length": 256, "max_turns": 2}, max_tokens=64)
    args = GRPOConfig(
        "runs/trl",
        max_steps=3,
        per_device_train_batch_size=16,
        num_generations=8,
        learning_rate=1e-4,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        # The checkpoint's own type may be a half type, in which two programs compute other log-probabilities.
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        rollout_func=rollout,
        train_dataset=dataset(rows),
        args=args,
    )
    trainer.train()
    count = rollout.failures
    print(f"{trainer.state.global_step} steps, {count.num_episodes} episodes, {count.num_failed} failed")


if __name__ == "__main__":
    main()
