"""TrainConfig and its flags: by any of their names, within bounds, and never contradicting each other."""

import itertools
import json
import math
import re
import shlex
from pathlib import Path
from typing import ClassVar, Literal, get_args, get_origin

import pytest

from agentenv.cli.flags import parse
from agentenv.cli.train import configured
from agentenv.core.agent import AgentInstance
from agentenv.episode.registry import builtin_datasets
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError
from agentenv.interop.agent_files import load_agent_func
from agentenv.runs.config import RunConfig
from agentenv.runs.flat_config import flag_fields
from agentenv.runs.prepare import load_source
from agentenv.training import config_checks, train
from agentenv.training.config import TrainConfig
from agentenv.training.config_checks import validate
from agentenv.training.flags import CORRECTION
from agentenv.training.openrlhf_flags import DOTTED, NO_COUNTERPART, OLD_NAMES
from agentenv_envs.guess_number import GuessNumber
from agentenv_envs.math_retry import MathRetry
from tests.training import openrlhf_parser
from tests.with_openrlhf.where import FOLDER

ROOT = Path(__file__).parents[2]
AGENT = "--agent_func_path a.py "
OPENRLHF = json.loads(openrlhf_parser.DATA.read_text())
ALIASES = TrainConfig.ALIASES
FIELDS = {name: kind for name, (_, kind) in flag_fields(TrainConfig).items()}
DEFAULTS = TrainConfig().flags()


def config(line):
    return configured(shlex.split(line))


def wrong(line):
    with pytest.raises(ConfigError) as raised:
        config(line)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# --- the guide's command lines ----------------------------------------------------------------------------------------

GUIDE = {
    "code": (
        "--remote_rm_url ./reward_func_code_gen.py --label_key test_cases "
        "--pretrain codellama/CodeLlama-7b-Instruct-hf "
        "--prompt_data code-generation-dataset --advantage_estimator reinforce"
    ),
    "math": (
        "--remote_rm_url ./reward_func_math.py --label_key answers --pretrain deepseek-ai/deepseek-math-7b-base "
        "--prompt_data gsm8k --advantage_estimator reinforce_baseline --n_samples_per_prompt 4"
    ),
    "agent": (
        "--async_train --agent_func_path ./agent_func_math.py --label_key answers "
        "--pretrain deepseek-ai/deepseek-math-7b-base --prompt_data gsm8k --advantage_estimator reinforce --max_steps 3"
    ),
    "logging": "--agent_func_path a.py --use_wandb token --wandb_project custom-rewards-debug",
}


@pytest.mark.long
@pytest.mark.parametrize("case", GUIDE)
def test_the_guides_command_lines_parse_as_printed(case):
    words = shlex.split(GUIDE[case])
    flags = config(GUIDE[case]).flags()
    for flag, value in zip(words, [*words[1:], "--"], strict=True):
        if flag.startswith("--"):
            expected = True if value.startswith("--") else value
            assert str(flags[ALIASES.get(flag[2:], flag[2:])]) == str(expected)


@pytest.mark.long
def test_every_training_that_the_documentation_shows_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mix.yaml").write_text("- env: math_retry\n- env: tool_use\n")  # which a page writes
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    shown = re.findall(r"^ *agentenv train ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert len(shown) >= 4
    for line in shown:
        words = shlex.split(line.replace("\\\n", " "), comments=True)
        if words[0] == "--resume":  # the others are those of the folder
            assert f"--out {words[2]}" in text.replace(line, "")
            continue
        assert config_checks.notes(configured(words)) == []


class Brought(AgentInstance):
    datasets: ClassVar[dict[str, str]] = {"b": "b.jsonl", "c_train": "c.jsonl"}


@pytest.mark.parametrize(
    ("source", "data"),
    [
        (EnvSource(MathRetry), "word_problems_train"),
        (EnvSource(GuessNumber), "guess_number"),
        (EnvSource(Brought), "c_train"),
        (EnvSource(AgentInstance), None),
        (load_agent_func(ROOT / "agent_funcs/math_retry.py"), "word_problems_train"),
        (load_agent_func(ROOT / "agent_funcs/guess_number.py"), "guess_number"),
    ],
)
def test_an_environment_is_trained_on_its_own_data_by_default(source, data):
    assert train.own_data(source) == data


def test_a_file_without_data_is_trained_on_data_that_ships(tmp_path):
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.0]\n")
    source = load_source(RunConfig(remote_rm_url=str(tmp_path / "reward.py")))
    assert train.own_data(source) in builtin_datasets()


# --- names --------------------------------------------------------------------------------------------------------

CORRECT = "--algo.advantage.is_correction"


def test_every_flag_of_every_version_of_openrlhf_is_known_or_refused_by_name():
    known = {*FIELDS, *CORRECTION} | {name for name, field in ALIASES.items() if field in FIELDS}
    unknown = {flag[2:] for flag in OPENRLHF["flags"]} - known - NO_COUNTERPART.keys()
    assert unknown == set()
    assert NO_COUNTERPART.keys() & known == set()
    assert {flag[2:] for flag in OPENRLHF["flags"]} >= NO_COUNTERPART.keys()
    assert OLD_NAMES.keys() & (known | NO_COUNTERPART.keys()) == set()
    assert {re.match(r"\w*", text)[0] for text in (NO_COUNTERPART | OLD_NAMES).values()} <= {*FIELDS, ""}


def test_all_flags_that_only_openrlhf_has_are_in_one_error_with_what_replaces_them():
    line = "--ds.zero_stage 3 --n 2 --actor.num_nodes 1 --generate_max_len 64 --ref_num_nodes 1 --zero-stage 3"
    shown = "--ds.zero_stage, --actor.num_nodes, --generate_max_len (here: --max_tokens), --ref_num_nodes, --zero_stage"
    advice = "Set those named here, and leave the others out."
    assert wrong(line).endswith(f"got {shown}, which only OpenRLHF has. {advice}")
    several = 'For several GPUs use torchrun: the page "Train on several GPUs" of the documentation.'
    assert wrong("--train.colocate_all").endswith(f"which only OpenRLHF has. Leave it out. {several}")
    assert wrong(f"{line} --ref.num_gpus_per_node 1").endswith(f"{advice} {several}")


@pytest.mark.slow
def test_the_flags_are_those_that_openrlhfs_own_parser_has():
    if not (FOLDER / "openrlhf/cli/train_ppo_ray.py").is_file():
        pytest.skip(f"OpenRLHF is not in {FOLDER}")
    own = json.loads(json.dumps(openrlhf_parser.flags(FOLDER)))
    known = {flag: spans[-1] for flag, spans in OPENRLHF["flags"].items() if spans[-1]["to"] == "0.11.2"}
    assert own == {
        flag: {key: value for key, value in span.items() if key not in ("from", "to")} for flag, span in known.items()
    }


def test_the_command_of_the_tutorial_is_one_of_openrlhf_and_of_agentenv_train():
    page = (ROOT / "docs/tutorial/5-take-it-to-openrlhf.md").read_text()
    line = page.partition("openrlhf.cli.train_ppo_ray")[2].partition("```")[0].replace("\\\n", " ")
    flags = re.findall(r"--\S+", line)
    assert len(flags) > 20
    assert all(OPENRLHF["flags"][flag][-1]["to"] == "0.11.2" for flag in flags)
    made, num_rows = config(line).flags(), int(re.search(r"seq (\d+)", page)[1])
    assert num_rows * made["n"] // made["train_batch_size"] == 100, "OpenRLHF's steps"


def test_a_dotted_name_sets_what_the_flat_one_sets():
    for name, other in DOTTED.items():
        more = {"use_wandb": "True"} if name.startswith("wandb_") else {}
        kind = flag_fields(TrainConfig)[name][1]
        value = get_args(kind)[-1] if get_origin(kind) is Literal else "4" if str in (kind, *get_args(kind)) else 4
        value = True if kind is bool else value
        flat, dotted = (TrainConfig.from_flags(**more, **{given: value}).flags() for given in (name, other))
        assert flat == dotted
        assert flat[name] == ((value,) if name in TrainConfig.REPEATABLE else value)


def test_a_setting_given_under_both_of_its_names_is_refused_in_python_too():
    with pytest.raises(ConfigError, match=r"^pretrain: expected one name, got model as well"):
        TrainConfig.from_flags(pretrain="a", model="b")


@pytest.mark.parametrize("line", ["--target_modules a b", "--target_modules a --target_modules b"])
def test_a_flag_of_any_number_of_values_may_be_repeated(line):
    assert config(f"{AGENT}--lora_rank 4 {line}").target_modules == ("a", "b")


def test_none_unsets_a_flag_of_any_number_of_values():
    of_file = TrainConfig.from_flags(env="math_retry", eval_dataset=("a", "b"))
    args = ["--resume", "--eval_dataset", "None"]
    assert parse(TrainConfig, "train", args, lambda given: of_file).eval_dataset == ()


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--input_key question", {"prompt_key": "question"}),
        ("--max-steps=3", {"max_turns": 3}),
        ("--max_len 99 --max_new_tokens 9", {"max_length": 99, "max_tokens": 9}),
        ("--pretrain m --prompt_data d --n_samples_per_prompt 4", {"model": "m", "data": "d", "n": 4}),
        ("--use_wandb", {"use_wandb": "True"}),
        ("--use_wandb --seed 1", {"use_wandb": "True", "seed": 1}),
        ("--no_ray", {"ray": False}),
        ("--train.async_enable", {"async_train": True}),
        ("--advantage_estimator grpo", {"advantage_estimator": "group_norm"}),
        (f"{CORRECT}_enable {CORRECT}_type icepop {CORRECT}_threshold 0.1 3",
         {"is_correction": "icepop", "is_correction_threshold": (0.1, 3.0)}),
        (f"{CORRECT}_level token", {"is_correction": "icepop"}),
        (f"{CORRECT}_level token {CORRECT}_mode clip", {"is_correction": "tis"}),
        (f"{CORRECT}_level seq", {"is_correction": "seq-mask-tis"}),
        (f"{CORRECT}_level off", {}),
        ("--dynamic_filtering --dynamic_filtering_reward_range 0.1 0.9",
         {"dynamic_filtering": True, "dynamic_filtering_reward_range": (0.1, 0.9)}),
        ("--lora_rank 8 --target_modules q_proj v_proj", {"lora_rank": 8, "target_modules": ("q_proj", "v_proj")}),
    ],
)  # fmt: skip
def test_other_names_say_the_same(line, expected):
    flags = config(AGENT + line).flags()
    changed = {name: value for name, value in flags.items() if value != DEFAULTS[name]}
    assert changed == {"agent_func_path": "a.py", **expected}


# --- what is wrong ------------------------------------------------------------------------------------------------

UNREAD = {
    "--n_sample_per_prompt 4": "got --n_sample_per_prompt. Did you mean --n_samples_per_prompt?",
    "--train.agent_path x": "Did you mean --train.agent_func_path?",
    "--learning_rate 1": "Did you mean --actor_learning_rate?",
    "--num_generations 4": "Did you mean --n?",
    "--zzzzzz 1": "got --zzzzzz. Run `agentenv train --help` for the flags.",
    "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --n 2": "got 'openrlhf.cli.train_ppo_ray'. Leave it and",
    "--rollout.temp 1": "Did you mean --rollout.temperature?",
    "--train.colocate_al": "Did you mean --train.colocate_all?",
    "--ds.zero_stage 3": "got --ds.zero_stage, which only OpenRLHF has. Leave it out.",
    "--prompt_max_len 64": "(here: --max_length, which counts the answers, too), which only OpenRLHF has. Set those",
    "--ckpt.save_hf": "(here: --out, whose model/ always has it)",
    "--ckpt.best_metric_key score": "(here: --early_stop METRIC:PATIENCE)",
    "--data.prompt_probs 1,2": "(here: --env ENV:WEIGHT)",
    f"{CORRECT}_threshold 0.1 3": f"expected {CORRECT}_enable (0.11.2: {CORRECT}_level) with it",
    "--no_no_advantage_std_norm": "got --no_no_advantage_std_norm",
    f"--is_correction tis {CORRECT}_enable": "They set the same",
    f"{CORRECT}_gating tv": f"{CORRECT}_gating: expected 'ratio'",
    f"{CORRECT}_level seq {CORRECT}_mode clip": f"{CORRECT}_level: expected",
    f"{CORRECT}_enable False": f"{CORRECT}_enable: expected no value",
    f"{CORRECT}_type icepop": f"{CORRECT}_type: expected {CORRECT}_enable with it",
    f"{CORRECT}_mode clip": f"{CORRECT}_mode: expected {CORRECT}_level with it",
    "--advantage_estimator ppo2": "--advantage_estimator: expected one of reinforce, reinforce_baseline",
    "--adam_betas 0.9": "--adam_betas: expected 2 values, got '0.9'. Add all of them.",
    "--dual_clip q": "--dual_clip: expected a number or None, got 'q'.",
    "--ray_runtime_env x": "--ray_runtime_env: expected a JSON object",
    "--chat_template_kwargs x": "--chat_template_kwargs: expected a JSON object",
    "--n 1": "--n: expected at least 2 for reinforce_baseline, got 1",
    "--lora_alpha 64": "--lora_alpha: expected --lora_rank with it, got none.",
}
"""Lines that make no configuration, and a part of the error."""


@pytest.mark.long
@pytest.mark.parametrize("line", UNREAD)
def test_a_line_that_makes_no_configuration_is_refused(line):
    assert UNREAD[line] in wrong(AGENT + line)


ASYNC = {"async_train": True}
REFUSED = {
    "agent_func_path": [{"env": "math_retry"}, {"remote_rm_url": "r.py"}, {"agent_func_path": "package.module"},
                        {"agent_func_path": None}],
    "env_kwargs": [{"env_kwargs": {"a": 1}}],
    "dual_clip": [{"dual_clip": 1}],
    "n": [{"n": 1}, {"n": 1, "advantage_estimator": "reinforce", "dynamic_filtering": True}],
    "dynamic_filtering_reward_range": [{"dynamic_filtering": True, "dynamic_filtering_reward_range": (1, 0)}],
    "train_batch_size": [{"train_batch_size": 256}, {"train_batch_size": 100}],
    "vllm_generate_batch_size": [
        {**ASYNC, "vllm_generate_batch_size": 8}, {"vllm_generate_batch_size": 32},
        {**ASYNC, "vllm_generate_batch_size": 64},
    ],
    "async_queue_size": [{"async_queue_size": 2}],
    "max_staleness": [{"max_staleness": 2}, {**ASYNC, "max_staleness": 0}, {**ASYNC, "max_staleness": 4}],
    "partial_rollout": [{"partial_rollout": True}],
    "vllm_enable_sleep": [{**ASYNC, "vllm_enable_sleep": True}, {"vllm_enable_sleep": True, "engine": "hf"}],
    "is_correction": [{"is_correction": "tis", "top_p": 0.9}],
    "is_correction_threshold": [{"is_correction": "tis", "is_correction_threshold": (-1, 2)}],
    "overlong_buffer_len": [{"overlong_buffer_len": 65, "max_tokens": 64},
                            {"overlong_buffer_len": 129, "max_length": 128}],
    "init_kl_coef": [{"use_kl_loss": True}],
    "eval_steps": [{"eval_steps": 5}],
    "early_stop": [{"early_stop": "score:2", "eval_dataset": ("d",)},
                   {"early_stop": "score", "eval_dataset": ("d",), "eval_steps": 1}],
    "max_tokens": [{"max_length": 64, "max_tokens": 64}],
    "max_turns": [{"max_turns": 0}],
    "max_length": [{"max_length": 1}],
    "temperature": [{"temperature": 0}],
    "no_ray": [{"ray": False, "num_engines": 2}],
    "eps_clip_low_high": [{"eps_clip_low_high": (0, 0.2)}],
    "stop_properly_penalty_coef": [{"stop_properly_penalty_coef": 2}],
    "max_observation_tokens": [{"max_observation_tokens": 0}],
    "num_episodes": [{"num_episodes": 3, "max_train_steps": 5}],
    "eps_clip": [{"eps_clip": 0.1, "eps_clip_low_high": (0.2, 0.3)}],
    "loss_agg_mode": [{"loss_agg_mode": "seq-mean-token-sum-norm", "policy_loss_type": "gspo"}],
    "gamma": [{"gamma": 0.5, "credit": "episode"}],
    "no_advantage_std_norm": [{"no_advantage_std_norm": True, "advantage_estimator": "rloo"}],
    "vllm_tensor_parallel_size": [{"vllm_tensor_parallel_size": 2, "engine": "hf"}],
    "no_enable_prefix_caching": [{"enable_prefix_caching": False, "engine": "hf"}],
    "engine_cpus": [{"engine_cpus": 4.0, "ray": False}],
    "critic_pretrain": [{"critic_pretrain": "m"}],
    "value_clip": [{"value_clip": 0.1}],
}  # fmt: skip
"""Flags that are out of bounds, contradict each other, or that nothing would read, by the one that the error names."""
ALONE = {
    "lora_alpha": 64, "lora_dropout": 0.1, "target_modules": ("q_proj",), "overlong_penalty_factor": 3,
    "is_correction_threshold": (0.1, 2), "dynamic_filtering_reward_range": (0.2, 0.8), "env_actor_cpus": 4,
    "train_max_tokens_per_gpu": 100, "eval_split": "test", "eval_limit": 7, "eval_temperature": 0.1,
    "eval_n_samples_per_prompt": 9, "early_stop": "score:2", "reward_batch_size": 3,
}  # fmt: skip
"""Flags that nothing reads without another flag."""


def refusal(**flags):
    with pytest.raises(ConfigError) as raised:
        checked(**flags)
    return str(raised.value)


def checked(**flags):
    made = TrainConfig.from_flags(**{"agent_func_path": "a.py"} | flags)
    validate(made)
    config_checks.check_effective(made)
    return made


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_that_cannot_be_are_refused_with_the_one_to_change(flag):
    for flags in REFUSED[flag]:
        assert refusal(**flags).startswith(f"--{flag}: expected "), flags


def test_a_flag_without_the_one_that_it_needs_is_refused():
    assert ALONE.keys() | {"eval_steps"} == config_checks.ONLY_WITH.keys()
    for flag, value in ALONE.items():
        (needed,) = config_checks.ONLY_WITH[flag]
        assert refusal(**{flag: value}).startswith(f"--{flag}: expected --{needed} with it, got none."), flag


TAKEN = [
    DEFAULTS | {"agent_func_path": "a.py"},
    {"lora_rank": 4, "lora_alpha": 64, "lora_dropout": 0.1, "target_modules": ("q_proj",)},
    {"is_correction": "tis", "is_correction_threshold": (0, 2), "top_p": 1},
    {"overlong_buffer_len": 64, "overlong_penalty_factor": 3, "max_tokens": 64},
    {"overlong_buffer_len": 128, "max_length": 128, "top_p": 0.9},
    {"dynamic_filtering": True, "dynamic_filtering_reward_range": (0.2, 0.8), **ASYNC, "vllm_generate_batch_size": 64},
    {"advantage_estimator": "gae", "value_clip": 0.1, "critic_learning_rate": 1e-3, "gamma": 0.9, "credit": "episode"},
    {"advantage_estimator": "gae", "no_advantage_std_norm": True},
    {"use_dynamic_batch": True, "train_max_tokens_per_gpu": 100},
    {"env_actors": 2, "env_actor_cpus": 4},
    {"eval_dataset": ("d",), "eval_split": "s", "eval_temperature": 0, "eval_steps": 1},
    {"policy_loss_type": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    {**ASYNC, "async_queue_size": 4, "max_staleness": 4},
    {"engine": "vllm", "vllm_tensor_parallel_size": 2, "vllm_enable_sleep": True},
    {"ray_placement": "SPREAD", "ray_wait_s": 5, "engine_cpus": 4, "engine_gpus": 2},
]
"""Flags that are read, or just within their bounds."""


def test_a_flag_that_is_read_or_just_within_its_bound_is_taken():
    for flags in TAKEN:
        assert config_checks.notes(checked(**flags)) == [], flags


NOTED = {
    "--micro_train_batch_size 1 has no effect here: --use": {"use_dynamic_batch": True, "micro_train_batch_size": 1},
    "--micro_rollout_batch_size 1 has no effect": {"use_dynamic_batch": True, "micro_rollout_batch_size": 1},
    "--kl_estimator k2 has no effect here: --init_kl_coef is 0": {"kl_estimator": "k2"},
}


def test_flags_of_openrlhf_without_effect_are_noted():
    for said, flags in NOTED.items():
        (note,) = config_checks.notes(checked(**flags))
        assert said in note


def test_counts_begin_at_one():
    for name in (*config_checks.COUNTS, *config_checks.OFF_OR_COUNT):
        assert refusal(**{name: 0}).startswith(f"--{name}: expected an integer >= 1")


def test_numbers_out_of_bounds_are_refused():
    names = (*config_checks.FROM_ZERO, *config_checks.ABOVE_ZERO, *config_checks.SHARES)
    more = ("vllm_gpu_memory_utilization", "max_retries", "max_error_share", "engine_cpus", "engine_gpus",
            "env_actors", "env_actor_cpus", "ray_wait_s")  # fmt: skip
    for name, value in itertools.product((*names, *more), (-1, math.nan, math.inf)):
        assert re.match(f"--{name}: expected an? (number|integer)", refusal(**{name: value}))
    for name in ("step_timeout_s", "episode_timeout_s", "generate_timeout_s"):
        assert refusal(**{name: 0}).startswith(f"--{name}: expected")


def test_a_name_that_python_gives_and_no_flag_knows_is_refused():
    for name in ("loss_agg_mode", "policy_loss_type", "credit", "lr_scheduler", "is_correction", "engine", "progress"):
        assert re.match(f"--{name}: expected one of .*, got 'k9'", refusal(**{name: "k9"}))


# --- what follows from the flags --------------------------------------------------------------------------------------


def test_what_follows_from_flags():
    def made(**flags):
        return TrainConfig.from_flags(env="e", **flags)

    assert made().staleness_bound == 0
    assert made(async_train=True).staleness_bound == 1
    assert made(async_train=True, async_queue_size=3).staleness_bound == 3
    assert made(async_train=True, async_queue_size=3, max_staleness=2).staleness_bound == 2
    assert made(eps_clip=0.1).clip_range == (0.1, 0.1)
    assert made(eps_clip_low_high=(0.2, 0.3)).clip_range == (0.2, 0.3)
    assert made(max_retries=5).policy.max_retries == 5
    assert [made(rollout_batch_size=num).policy.window for num in (4, 16)] == [200, 2 * 16 * 8]


def test_the_class_of_the_environment_sets_limits_that_no_flag_sets():
    short = type("Short", (), {"max_turns": 3, "max_length": 99})
    for flags, cls, expected in (
        ({}, short, (3, 99)), ({"max_turns": 16, "max_length": 2048}, short, (16, 2048)), ({}, None, (16, 2048)),
    ):  # fmt: skip
        limits = TrainConfig.from_flags(env="e", **flags).limits.for_env(cls)
        assert (limits.max_turns, limits.max_length) == expected


def test_the_written_config_has_no_api_key_and_is_json():
    made = config("--env e --use_wandb secret-key --lora_rank 4 --target_modules a b")
    text = json.dumps(made.to_dict())
    assert "secret" not in text
    assert made.with_flags(use_wandb="True") == TrainConfig.from_flags(**json.loads(text))


@pytest.mark.parametrize(
    ("engine", "installed", "num_gpus", "address", "backend"),
    [
        ("auto", True, 1, None, "vllm_local"),
        ("auto", True, 0, None, "hf"),  # vLLM starts in minutes on a CPU
        ("auto", True, 0, "head:6379", "vllm_local"),  # the GPUs are on other nodes
        ("auto", False, 1, None, "hf"),
        ("vllm", True, 0, None, "vllm_local"),
        ("hf", True, 1, None, "hf"),
    ],
)
def test_the_engine_is_vllm_where_it_is_installed_and_there_are_gpus(
    engine, installed, num_gpus, address, backend, monkeypatch
):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(train, "_num_gpus", lambda: num_gpus)
    config = TrainConfig.from_flags(env="e", engine=engine, ray_address=address)
    assert train.with_engine(config).engine_backend == backend
    sleeping = config.with_flags(vllm_enable_sleep=True)
    if backend == "hf" or not (num_gpus or address):
        with pytest.raises(ConfigError, match=r"^--vllm_enable_sleep: expected vLLM on GPUs, got --engine "):
            train.with_engine(sleeping)
    else:
        assert train.with_engine(sleeping).engine_args["enable_sleep_mode"]
