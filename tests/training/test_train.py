"""`agentenv train` from its command line to the files it leaves: what is learned, written, resumed and refused."""

import json
import logging
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentenv.episode.registry import builtin_datasets
from agentenv.runs.records.directory import read_config, read_trajectories
from agentenv.runs.records.token_stats import read_token_stats
from agentenv.training.logs.journal import read_metrics
from tests.drivers import command, write_rows
from tests.training.trainings import assert_same_numbers, flags, make_place, rows, tiny_model, without_times

ROOT = Path(__file__).parents[2]
AGENT_FUNCS = ROOT / "tests/interop/agent_funcs"


@pytest.fixture
def place(tmp_path, monkeypatch):
    return make_place(tmp_path, monkeypatch)


def weights_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def distance(one, other):
    """How far two models are apart: the largest difference of a weight."""
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def steps_of(folder):
    return [line["step"] for line in read_metrics(folder)]


def column(folder, key):
    return [line.get(key) for line in read_metrics(folder)]


# --- what a training leaves ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_training_leaves_a_model_that_changed_its_numbers_samples_and_checkpoint(place, capfd):
    write_rows(place / "held.jsonl", [{"prompt": "Say more.", "label": "ok"}])
    assert command(flags("--eval_dataset", "held.jsonl", "--eval_steps", 2, "--chat_template_kwargs", "{}")) == 0
    assert "warning: step" not in capfd.readouterr().err
    out = place / "out"

    assert steps_of(out) == [0, 1, 2, 3]
    assert [line["step"] for line in read_metrics(out) if "eval/score" in line] == [0, 2, 3]
    assert all(norm > 0 for norm in column(out, "train/grad_norm")[1:])
    assert all(difference < 1e-4 for difference in column(out, "train/logprob_diff")[1:]), "sampled as it is trained"
    stored = read_config(out)["config"]
    assert stored["flags"]["actor_learning_rate"] == 1e-2
    assert stored["resolved"]["tasks"].startswith("8 tasks, ")

    trajectories = list(read_trajectories(out))
    assert len(trajectories) == 3 * 8
    versions = [t.segments[0].policy_versions[-1] for t in trajectories]
    assert versions == [step for step in range(3) for _ in range(8)], "each step's samples are of the weights before it"
    capfd.readouterr()
    assert command(["tokens", "show", out, trajectories[0].episode_id]) == 0
    assert "Say" in capfd.readouterr().out

    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000003"]
    assert 1e-3 < distance(out / "model", tiny_model()) < 0.1


@pytest.mark.long
def test_warnings_are_on_the_screen_and_a_training_without_any_shows_its_steps_alone(place, capfd, monkeypatch):
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a process that is not pytest's
    assert command(flags("--max_train_steps", 1)) == 0
    assert "WARNING" not in capfd.readouterr().err
    env = (place / "env.py").read_text().replace(
        "share = sum(", 'logging.getLogger("env").warning("a mishap")\n        share = sum('
    )  # fmt: skip
    (place / "loud.py").write_text(f"import logging\n{env}")
    for chosen in ([], ["--log_level", "error"]):
        monkeypatch.setattr(logging.root, "handlers", [])
        assert command(flags("--max_train_steps", 1, *chosen, env="loud.py:Letters", out=f"out{len(chosen)}")) == 0
        said = capfd.readouterr().err
        assert ("WARNING env: a mishap\n" in said) == (not chosen)
        assert "\nstep 1/1" in said


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--async_train"]], ids=["sync", "async"])
def test_the_policy_learns(place, more):
    argv = flags("--max_train_steps", 16, "--rollout_batch_size", 4, "--n", 8, *more)
    assert command(argv) == 0
    rewards = column(place / "out", "rollout/reward")
    first, last = statistics.fmean(rewards[:4]), statistics.fmean(rewards[-4:])
    assert last > first + 0.2, rewards


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_shipped_agent_func_learns_on_ray_and_vllm_with_async_training(place):
    """On sixteen tasks, the same ones in every batch, of which the shipped model solves a part."""
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    data = Path(builtin_datasets()["word_problems_train"]).read_text().splitlines(keepends=True)
    (place / "sixteen.jsonl").write_text("".join(data[:16]))
    argv = ["train", "--agent_func_path", ROOT / "agent_funcs/math_retry.py", "--async_train", "--engine", "vllm"]
    argv += ["--partial_rollout", "--data", "sixteen.jsonl", "--rollout_batch_size", 16]
    argv += ["--n", 8, "--max_turns", 1, "--max_tokens", 128, "--max_length", 512]
    argv += ["--micro_train_batch_size", 64, "--is_correction", "tis", "--actor_learning_rate", 4e-4]
    argv += ["--max_train_steps", 20, "--seed", 1, "--enforce_eager"]
    argv += ["--out", "out"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}"}
    program = [sys.executable, "-m", "agentenv.cli", *map(str, argv)]
    done = subprocess.run(program, env=environment, cwd=place, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "vllm_local in Ray actors" in done.stderr
    rewards = column(place / "out", "rollout/reward")
    first, last = statistics.fmean(rewards[:4]), statistics.fmean(rewards[-4:])
    assert last > first + 0.1, rewards  # measured at step 16 with five seeds: +0.25 to +0.35
    assert max(column(place / "out", "rollout/staleness_max")) == 1


def positive(value):
    return value is not None and value > 0


def some(value):
    return value is not None and 0 < value < 1


OFF_POLICY = "--max_epochs 3 --train_batch_size 4"
"""The ratio is not 1 then, so that clipping it shows."""
STALE = "--async_train"
"""The ratios of the second step's sequences are 0.43 to 0.71 then. Otherwise they are 1 but for rounding, which decided
what is rejected."""
DISCOUNTED = "--advantage_estimator reinforce --gamma 0.5"
ALGORITHMS = {
    "gae": ("", "--advantage_estimator gae --lambd 0.95 --critic_learning_rate 1e-3", {"value_loss": positive}),
    "kl in the loss": (
        "", "--init_kl_coef 0.1 --use_kl_loss --kl_estimator k3", {"kl": positive, "kl_loss": positive}
    ),
    "icepop": (STALE, "--is_correction icepop --is_correction_threshold 0.55 5", {"is_rejected": some}),
    "gspo": (OFF_POLICY, "--policy_loss_type gspo", {}),
    "several optimizer steps": ("", "--max_epochs 2 --train_batch_size 4", {"num_optimizer_steps": (4.0).__eq__}),
    "overlong": (DISCOUNTED, "--overlong_buffer_len 4", {}),
    "schedule": ("", "--lr_scheduler cosine", {"learning_rate": (1e-2).__gt__}),
    "token budget": ("", "--use_dynamic_batch --train_max_tokens_per_gpu 64", None),
}  # fmt: skip
"""What stands beside the flags, the flags, and numbers that they change; None: they change nothing that is learned."""


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """The training without the flags, once for each line that stands beside them."""
    done = {}

    def trained(line):
        if line not in done:
            done[line] = tmp_path_factory.mktemp("beside") / "out"
            assert command(turns(line, out=done[line])) == 0
        return done[line]

    return trained


def turns(*lines, out="out"):
    words = [word for line in lines for word in line.split()]
    return flags("--env", "env.py:Turns", *words, "--max_train_steps", 2, env=None, out=out)


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_takes_its_steps_and_they_are_others_than_without_it(place, name, beside):
    base, line, expected = ALGORITHMS[name]
    plain = beside(base)
    assert command(turns(base, line)) == 0
    last, before = (read_metrics(folder)[-1] for folder in (place / "out", plain))
    assert last["step"] == 2
    assert last["rollout/turns"] == 3.0
    assert last["train/grad_norm"] > 0
    assert distance(place / "out/model", tiny_model()) > 1e-3
    if expected is None:
        assert distance(place / "out/model", plain / "model") < 1e-3
        return
    assert distance(place / "out/model", plain / "model") > 1e-4
    for key, holds in expected.items():
        assert holds(last[f"train/{key}"]), (key, last[f"train/{key}"])
        assert last[f"train/{key}"] != before.get(f"train/{key}")


@pytest.mark.long
def test_adapters_are_trained_and_the_model_that_is_left_has_them_in_it(place):
    pytest.importorskip("peft")
    assert command(flags("--lora_rank", 4, "--save_steps", 1)) == 0
    assert weights_of(place / "out/model").keys() == weights_of(tiny_model()).keys()
    assert distance(place / "out/model", tiny_model()) > 1e-3
    state = torch.load(place / "out/checkpoints/step-00000003/state.pt", weights_only=True)
    assert all("lora_" in name for name in state["learner"]["policy"]), "only they are in a checkpoint"
    assert all(difference < 1e-4 for difference in column(place / "out", "train/logprob_diff")), "engines have them too"


# --- whose episodes --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_guides_agent_trains_with_the_guides_command_line(place):
    (place / "agent_func_math.py").write_text((AGENT_FUNCS / "math_agent.py").read_text())
    write_rows(place / "gsm8k.jsonl", [{"prompt": f"{n} + 1 = ?", "answers": str(n + 1)} for n in range(1, 9)])
    as_printed = ["--async_train", "--agent_func_path", "./agent_func_math.py", "--label_key", "answers"]
    as_printed += ["--model", tiny_model(), "--data", "gsm8k.jsonl"]
    as_printed += ["--advantage_estimator", "reinforce", "--max_steps", 3]
    other_args = ["--engine", "hf", "--no_ray", "--rollout_batch_size", 4, "--n", 2]
    other_args += ["--max_tokens", 8, "--out", "out", "--max_train_steps", 3]
    assert command(["train", *as_printed, *other_args]) == 0
    out = place / "out"
    assert steps_of(out) == [1, 2, 3]
    assert column(out, "rollout/turns") == [3.0] * 3, "a random model answers nothing in its three attempts"
    assert column(out, "rollout/info/attempts") == [3.0] * 3
    assert column(out, "rollout/reward") == [-0.5] * 3
    assert {t.task.label for t in read_trajectories(out)} <= {str(n) for n in range(2, 10)}


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("env", "more"),
    [
        ("env.py:Letters", []),
        ("env.py:Turns", ["--max_epochs", 2, "--train_batch_size", 4]),
        ("env.py:Letters", ["--group_reward", "compared.py:longest"]),
    ],
    ids=["plain", "several steps", "rewards of groups"],
)
def test_a_resumed_training_has_the_numbers_of_one_that_was_never_interrupted(place, env, more):
    (place / "compared.py").write_text(COMPARED)
    base = flags(*more, env=env)
    named = [arg for index, arg in enumerate(base) if arg != "--out" and base[index - 1] != "--out"]
    assert command([*named, "--out", "whole", "--max_train_steps", 6]) == 0
    assert command([*named, "--out", "parts"]) == 0
    assert steps_of(place / "parts") == [1, 2, 3]
    assert command([*named, "--out", "parts", "--max_train_steps", 6, "--resume"]) == 0
    assert_same_numbers(place / "parts", place / "whole")
    assert distance(place / "parts/model", place / "whole/model") < 1e-5
    stored = [[t.episode_id for t in read_trajectories(place / name)] for name in ("parts", "whole")]
    assert stored[0] == stored[1]
    assert set(read_token_stats(place / "whole")) == set(stored[0])


@pytest.mark.long
def test_load_checkpoint_where_there_is_none_begins_a_training(place):
    assert command(flags("--resume")) == 0
    assert steps_of(place / "out") == [1, 2, 3]


@pytest.mark.long
def test_a_training_resumes_with_no_flag_but_its_folder_and_other_flags_change_it(place, capfd):
    named = flags("--save_steps", 1, "--chat_template_kwargs", "{}", "--advantage_estimator", "rloo")
    assert command([*named, "--max_train_steps", 4, "--out", "whole"]) == 0
    assert command([*named, "--max_train_steps", 2]) == 0
    resume = ["train", "--resume", "--out", "out"]
    assert command([*resume, "--max_train_steps", 3]) == 0
    said = capfd.readouterr().err
    assert "changed on resume, from step 3 on: --max_train_steps 2 → 3\n" in said
    assert "resumed after step 2 of 3, from " in said
    assert command(["train", "--load_checkpoint", "--save_path", "out", "--max_train_steps", 4]) == 0  # OpenRLHF's
    assert_same_numbers(place / "out", place / "whole")
    assert command([*resume, "--n", 2]) == 2
    assert "n was 4, is now 2" in capfd.readouterr().err


@pytest.mark.long
def test_resuming_without_a_training_or_from_a_run_is_one_line(place, capfd):
    resume = ["train", "--resume", "--out"]
    assert command([*resume, "nothing"]) == 2
    said = capfd.readouterr().err
    assert "--resume: expected a directory of `agentenv train` in --out, got 'nothing'." in said
    run = ["run", "--env", "env.py:Letters", "--data", "tasks.jsonl", "--model", tiny_model(), "--engine", "hf"]
    assert command([*run, "--max_tokens", 2, "--limit", 1, "--out", "run"]) == 0
    capfd.readouterr()
    assert command([*resume, "run"]) == 2
    assert (
        "--resume: expected a directory of `agentenv train` in --out, got one of `agentenv run`"
        in capfd.readouterr().err
    )


@pytest.mark.long
@pytest.mark.parametrize("kept", [8, 0], ids=lambda kept: f"{kept} samples kept")
def test_a_training_that_is_there_is_not_written_over(place, capfd, kept):
    assert command(flags("--save_samples", kept)) == 0
    before = (place / "out/metrics.jsonl").read_bytes(), (place / "out/config.json").read_bytes()
    assert command(flags("--save_samples", kept, "--actor_learning_rate", 0.5)) == 2
    assert "--out" in capfd.readouterr().err
    assert ((place / "out/metrics.jsonl").read_bytes(), (place / "out/config.json").read_bytes()) == before


CHANGED = {
    "another model": ["--model", "other"],
    "another environment": ["--env", "env.py:Turns"],
    "another seed": ["--seed", 7],
    "other data": ["--data", "other.jsonl"],
    "less data": ["--limit", 3],
}


@pytest.mark.long
@pytest.mark.parametrize("num_samples", [0, 8], ids=["no samples kept", "samples kept"])
def test_another_training_is_not_continued(place, capfd, num_samples):
    assert command(flags("--max_train_steps", 1, "--save_samples", num_samples)) == 0
    write_rows(place / "other.jsonl", [{"prompt": f"Shout {n}.", "label": "ok"} for n in range(8)])
    (place / "other").symlink_to(tiny_model())
    before = (place / "out/metrics.jsonl").read_bytes()
    for change in CHANGED.values():
        base = flags("--resume", "--save_samples", num_samples)
        base = [arg for index, arg in enumerate(base) if change[0] not in (arg, base[index - 1] if index else None)]
        capfd.readouterr()
        assert command([*base, *change]) == 2, change
        said = capfd.readouterr().err
        assert "expected the configuration that this run was started with" in said
        assert said.endswith("or start a new run with another --out.\n")
    assert (place / "out/metrics.jsonl").read_bytes() == before
    assert json.loads((place / "out/config.json").read_text())["config"]["flags"]["seed"] == 42


@pytest.mark.long
def test_changes_on_resume_are_on_the_screen_and_the_directory_has_the_flags_in_use(place, capfd):
    assert command(flags("--max_train_steps", 1)) == 0
    assert "changed" not in json.loads((place / "out/config.json").read_text())
    (place / "env.py").write_text((place / "env.py").read_text() + "\n")
    more = ["--resume", "--max_train_steps", 2, "--actor_learning_rate", 0.5, "--rollout_batch_size", 2]
    capfd.readouterr()
    assert command(flags(*more)) == 0
    changes = "--max_train_steps 1 → 2, --actor_learning_rate 0.01 → 0.5, env.py"
    assert f"changed on resume, from step 2 on: {changes}" in capfd.readouterr().err.splitlines()
    document = json.loads((place / "out/config.json").read_text())
    assert document["config"]["flags"]["actor_learning_rate"] == 0.5
    (change,) = document["changed"]
    assert change["from_step"] == 2
    assert change["was_and_is"]["actor_learning_rate"] == [0.01, 0.5]
    assert change["was_and_is"].keys() == {"actor_learning_rate", "max_train_steps", "agent_file"}
    before = without_times(place / "out"), weights_of(place / "out/model")
    assert command(flags(*more)) == 0
    assert without_times(place / "out") == before[0]
    assert all(torch.equal(before[1][name], tensor) for name, tensor in weights_of(place / "out/model").items())
    said = capfd.readouterr().err
    assert "changed on resume" not in said
    assert "nothing left to train: 2 of 2 steps are done" in said
    assert json.loads((place / "out/config.json").read_text()) == document


@pytest.mark.long
def test_a_model_that_an_interrupted_training_has_not_left_yet_is_answered_with_how_to_get_it(place, capfd):
    assert command(flags("--max_train_steps", 1)) == 0
    run = ["run", "--env", "env.py:Letters", "--data", "tasks.jsonl", "--engine", "hf", "--out", "run", "--model"]
    assert command([*run, "out/checkpoints/step-00000001"]) == 2
    assert "of a training run. Its model is out/model." in capfd.readouterr().err
    shutil.rmtree(place / "out/model")
    assert command([*run, "out"]) == 2
    assert "out has only checkpoints. Finish it: agentenv train --resume --out out;" in capfd.readouterr().err
    assert command(["tokens", "replay", "out"]) == 2
    assert "got a training run, whose weights changed." in capfd.readouterr().err
    assert command(["train", "--resume", "--out", "out", "--max_train_steps", 1]) == 0
    assert (place / "out/model").is_dir()  # as the message says


IGNORED = "--enforce_eager", "--no_enable_prefix_caching"


@pytest.mark.long
def test_more_prompts_a_step_than_there_are_tasks_and_flags_of_vllm_without_it_are_noted(place, capfd, monkeypatch):
    monkeypatch.setattr("agentenv.training.train._num_gpus", lambda: 0)
    assert command(flags("--max_train_steps", 1, "--limit", 1, "--engine", "auto", *IGNORED)) == 0
    said = capfd.readouterr().err
    assert "--rollout_batch_size 2 with 1 task: a train step uses some tasks more than once" in said
    for flag in IGNORED:
        assert f"note: {flag} has no effect here: without vLLM and GPUs, --engine auto uses transformers" in said
    assert command(flags("--max_train_steps", 1, "--limit", 2, out="other")) == 0
    assert "more than once" not in capfd.readouterr().err


# --- failures, JSON -----------------------------------------------------------------------------------------------

FAILS = """
from agentenv import AgentInstance, StepResult


class Fails(AgentInstance):
    def __init__(self):
        print("an environment prints")

    async def step(self, states):
        if int(states["label"]) % 2:
            raise KeyError("no such key")
        share = sum(each.islower() for each in states["action_text"]) / 99
        return StepResult(reward=share, terminated=True)
"""


@pytest.mark.long
def test_failed_episodes_are_one_line_for_each_kind_with_its_place_and_one_of_each_is_kept(place, capfd, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a process that is not pytest's
    (place / "fails.py").write_text(FAILS)
    rows(place, [str(each) for each in range(8)])
    assert command(flags("--max_error_share", 1, "--max_train_steps", 4, env="fails.py:Fails")) == 0
    said = capfd.readouterr().err
    (line,) = [each for each in said.splitlines() if "KeyError" in each]
    assert line.endswith(f"failed (env): KeyError: 'no such key' ({place / 'fails.py'}:11)")
    assert "WARNING" not in said
    assert sum(each.error is not None for each in read_trajectories(place / "out")) == 1


@pytest.mark.long
def test_the_failed_episodes_of_a_step_that_stops_the_training_are_in_the_record_until_it_is_done_again(place, capfd):
    def failed():
        return [each for each in read_trajectories(place / "out") if each.error is not None]

    rows(place, ["later"] * 6)
    assert command(flags("--max_retries", 0, "--rollout_batch_size", 6, "--max_train_steps", 1)) == 0
    (place / "later").touch()
    assert command(["train", "--resume", "--out", "out", "--max_train_steps", 2]) == 3
    (num,) = re.findall(r"to fail, got (\d+) of", capfd.readouterr().err)
    assert len(failed()) >= int(num) >= 20  # more may end before the training does
    (place / "later").unlink()
    assert command(["train", "--resume", "--out", "out"]) == 0
    assert not failed()


@pytest.mark.long
def test_json_prints_json_lines_on_stdout_and_nothing_else(place, capfd):
    (place / "fails.py").write_text(FAILS)
    rows(place, ["0", "2", "4", "1"])
    argv = flags("--json", "--max_error_share", 1, "--actor_learning_rate", 1e-16, env="fails.py:Fails")
    assert command(argv) == 0
    out, err = capfd.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    assert [each["event"] for each in events] == ["launch", "step", "warning", "step", "step", "done"]
    launch, step, warning, *_, done = events
    assert launch["config"]["n"] == 4
    assert {**step, "warnings": ["learning_rate"]} == {"event": "step", **read_metrics(place / "out")[0]}
    assert (warning["step"], warning["name"], warning["show"]) == (1, "learning_rate", "agentenv show out --worst 3")
    assert done["model"] == "out/model"
    assert "an environment prints" in err
    assert "step 1/3" not in err


# --- wrong flags -----------------------------------------------------------------------------------------------------

WRONG = {
    "no such environment": (["--env", "nope"], "nope"),
    "no such model": (["--env", "math_retry", "--model", "./nope"], "--model: expected a model's folder"),
    "no such column": (
        ["--env", "env.py:Letters", "--data", "tasks.jsonl", "--prompt_key", "q"],
        "got keys ['prompt', 'label']. Set --prompt_key to one of them.",
    ),
    "data of another environment": (
        ["--env", "guess_number", "--data", "word_problems_train"],
        "--data word_problems_train: expected rows that GuessNumber can use, got 6 of 8 that it refuses: "
        "GuessNumber: label: expected a whole number from 1 to 15, got '#### 216'.",
    ),
    "an environment without data": (["--env", "env.py:Letters"], "--data: expected tasks, got none."),
    "held-out data": (["--env", "math_retry", "--eval_dataset", "nope.jsonl"], "nope.jsonl"),
}


@pytest.mark.long
def test_a_template_that_cannot_render_is_answered_with_flags_that_the_command_has(place, capfd):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    shutil.copytree(tiny_model(), place / "odd")
    tokenizer.save_pretrained(place / "odd")
    assert command(flags("--model", "odd")) == 2
    said = capfd.readouterr().err
    assert "--model: expected a chat template that renders user, assistant and user, got one of odd" in said
    assert "--tokenizer" not in said


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_flag_is_one_line_and_code_2_before_anything_is_written(place, capfd, name):
    given, said = WRONG[name]
    more = [] if "--model" in given else ["--model", tiny_model()]
    assert command(["train", *given, *more, "--engine", "hf", "--no_ray", "--out", "out"]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert not (place / "out").exists()


# --- rewards of groups ------------------------------------------------------------------------------------------------

COMPARED = """
def longest(prompt, responses, extras):
    scores = [float(len(set(text))) for text in responses]
    return scores, {"comparison_score": scores}
"""


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--async_train", "--partial_rollout", "--is_correction", "tis"]], ids=str)
def test_rewards_of_groups_train_and_their_win_rates_are_curves_of_training_and_evaluation(place, more):
    (place / "compared.py").write_text(COMPARED)
    told = [{"prompt": f"Say {i}.", "label": "ok", "reference": "abc"[: 1 + i % 3]} for i in range(8)]
    write_rows(place / "tasks.jsonl", told)
    grouped = ["--group_reward", "compared.py:longest", "--reference_key", "reference"]
    assert command(flags(*more, *grouped, "--eval_dataset", "tasks.jsonl", "--eval_steps", 2)) == 0
    out = place / "out"
    assert steps_of(out)[-3:] == [1, 2, 3]
    for line in read_metrics(out):
        for prefix in ["rollout/"] * (line["step"] > 0) + ["eval/"] * (line["step"] in (0, 2, 3)):
            win, at_least = (line[f"{prefix}info/reference/{name}"] for name in ("win_rate", "win_or_tie_rate"))
            assert 0.0 <= win <= at_least <= 1.0
            whole = line[f"{prefix}score"] + line[f"{prefix}info/group/reward"]
            assert line[f"{prefix}reward"] == pytest.approx(whole, abs=1e-6)
    assert all(each.turns[-1].result.info["group/reward"] >= 1.0 for each in read_trajectories(out))
