"""`agentenv launch openrlhf`: each release's own parser takes the printed command, and it means what the flags meant.

openrlhf_flags.json has the flags of the releases, read from their parsers; the slow tests use the parsers themselves.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.cli.flags import parse
from agentenv.errors import ConfigError
from agentenv.runs.flat_config import flag_fields
from agentenv.training import launch
from agentenv.training.config_checks import FOR_GAE, validate
from agentenv.training.flags import translate
from agentenv.training.launch import ONLY_WITH, LaunchConfig, check_launch, command, shell, warnings
from agentenv.training.openrlhf_flags import DEFAULTS, DOTTED, PLACEMENT, VERSIONS
from tests.drivers import command as agentenv
from tests.training import openrlhf_parser
from tests.with_openrlhf.where import FOLDER

OPENRLHF = json.loads(openrlhf_parser.DATA.read_text())
TYPES = {"int": int, "float": float, "str": str}
LINES = {
    "defaults": "--agent_func_path a.py",
    "the guide's": (
        "--async_train --agent_func_path ./agent_func_math.py --label_key answers --max_steps 3 --prompt_data gsm8k "
        "--pretrain deepseek-ai/deepseek-math-7b-base --advantage_estimator reinforce"
    ),
    "reward function": (
        "--remote_rm_url ./reward_func.py --advantage_estimator rloo --init_kl_coef 0.001 --kl_estimator k2 "
        "--use_kl_loss --seed 7 --top_p 0.9 --temperature 0.7 --no_apply_chat_template"
    ),
    "gae": (
        "--agent_func_path a.py --advantage_estimator gae --lambd 0.95 --gamma 0.99 --critic_pretrain c "
        "--adam_betas 0.9 0.99 --l2 0.1 --max_norm 0.5 --lr_warmup_ratio 0.1 --lr_scheduler cosine_with_min_lr "
        "--actor_num_gpus_per_node 4 --init_kl_coef 0.02 --freezing_actor_steps 2 --value_clip 0.3 "
        "--critic_learning_rate 1e-5"
    ),
    "much": (
        "--agent_func_path a.py --dynamic_filtering --dynamic_filtering_reward_range 0.1 0.9 --eps_clip_low_high "
        "0.2 0.3 --dual_clip 3 --entropy_loss_coef 0 --no_advantage_std_norm --policy_loss_type gspo --lora_rank "
        "8 --lora_alpha 32 --target_modules q_proj v_proj --packing_samples --use_dynamic_batch "
        "--gradient_checkpointing --train_max_tokens_per_gpu 8192 --full_determinism --enforce_eager "
        "--reward_clip_range -1 1 --max_epochs 2 --overlong_buffer_len 256 --overlong_penalty_factor 0.5 "
        "--load_checkpoint --ckpt_path ckpt --save_path out --save_steps 5 --max_ckpt_num 2 --use_wandb key "
        "--wandb_project p --wandb_run_name r --use_tensorboard tb --eval_dataset d --eval_steps 10 "
        "--eval_temperature 0 --eval_n_samples_per_prompt 2 --prompt_split s --eval_split t --max_samples 500 "
        "--num_episodes 3 --train_batch_size 64 --logging_steps 2"
    ),
    "colocated": (
        "--agent_func_path a.py --colocate_all_models --vllm_num_engines 4 --vllm_tensor_parallel_size 2 "
        "--vllm_enable_sleep --no_enable_prefix_caching --vllm_gpu_memory_utilization 0.5 --max_tokens 100"
    ),
    "dtype": "--agent_func_path a.py --param_dtype bf16 --lr_warmup_ratio 0.1 --max_length 4096",
    "fp16": "--agent_func_path a.py --param_dtype fp16",
    "queue": "--agent_func_path a.py --async_train --async_queue_size 2",
    "partial": "--agent_func_path a.py --async_train --partial_rollout",
    "evaluation": "--agent_func_path a.py --async_train --eval_dataset d",
    "oversampling": "--agent_func_path a.py --async_train --vllm_generate_batch_size 32",
    "penalty": "--remote_rm_url r.py --stop_properly_penalty_coef 0.5",
    "penalty below 0": "--remote_rm_url r.py --stop_properly_penalty_coef -0.5",
    "penalty of agents": "--agent_func_path a.py --stop_properly_penalty_coef 0.5",
    "tis": "--agent_func_path a.py --is_correction tis",
    "tis at the top": "--agent_func_path a.py --is_correction tis --is_correction_threshold 0 2",
    "icepop": "--agent_func_path a.py --is_correction icepop --is_correction_threshold 0.25 4",
    "sequences": "--agent_func_path a.py --is_correction seq-mask-tis",
    "flash": "--agent_func_path a.py --advantage_estimator flash_reinforce --n_samples_per_prompt 1 "
    "--rollout_batch_size 64",
    "samples weigh the same": "--agent_func_path a.py --loss_agg_mode seq-mean-token-mean",
    "linear": "--agent_func_path a.py --lr_scheduler linear",
}  # fmt: skip
FIRST = {"penalty of agents": "0.11.1", "flash": "0.11.2", "samples weigh the same": "0.11.2"}
"""The first release that can do it, if it is not the oldest."""


@functools.cache
def parsed(line):
    return parse_launch(shlex.split(line))


def parse_launch(words):
    name = "launch openrlhf"
    return parse(LaunchConfig, name, words, translate=functools.partial(translate, config=LaunchConfig, command=name))


def config(line, version="0.11.2"):
    made = dataclasses.replace(parsed(line), version=version)
    validate(made)
    check_launch(made)
    return made


def at_least(version, first):
    return VERSIONS.index(version) >= VERSIONS.index(first)


def can(case, version):
    return at_least(version, FIRST.get(case, VERSIONS[0]))


@functools.cache
def parser_of(version):
    """A parser with the flags, types, choices and defaults of a version's own."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag, spans in OPENRLHF["flags"].items():
        for span in spans:
            if at_least(version, span["from"]) and at_least(span["to"], version):
                if span["takes"] == "nothing":
                    parser.add_argument(flag, action="store_true")
                else:
                    known = {key: span.get(key) for key in ("nargs", "choices", "default")}
                    parser.add_argument(flag, type=TYPES[span["takes"]], **known)
    return parser


def parsed_by_data(version, argv):
    namespace, rest = parser_of(version).parse_known_args(argv)
    assert rest == []
    return vars(namespace)


def plain(value):
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def assert_means(made, values):
    """What OpenRLHF would train with is what the config says, defaults of flags left out included."""
    for name, flag in DOTTED.items():
        if name in ("param_dtype", "remote_rm_url") or (name == "loss_agg_mode" and made.version != "0.11.2"):
            continue
        if name in ONLY_WITH and not made.flags()[ONLY_WITH[name]]:
            continue
        if name in FOR_GAE and made.advantage_estimator != "gae":
            continue
        if name == "max_length":
            expected = made.limits.for_env().max_length
        elif name == "eval_dataset":
            expected = next(iter(made.eval_dataset), None)
        else:
            expected = made.optimizer_batch_size if name == "train_batch_size" else made.flags()[name]
        if expected is None or (name in ("model", "data") and expected in ("tiny-math", "word_problems_train")):
            continue
        if name == "lr_scheduler" and expected == "constant" and made.lr_warmup_ratio:
            expected = "constant_with_warmup"
        if name == "eps_clip" and made.eps_clip_low_high:
            continue
        if name in ("out", "ckpt_path", "use_tensorboard"):
            expected = os.path.abspath(expected)
        assert plain(values[flag]) == plain(expected), name


CASES = [(case, version) for case in LINES for version in VERSIONS]


def test_the_data_is_of_the_releases_that_are_known():
    assert tuple(OPENRLHF["versions"]) == VERSIONS
    assert len(OPENRLHF["flags"]) > 150


@pytest.mark.long
@pytest.mark.parametrize(("case", "version"), CASES)
def test_what_is_printed_parses_and_means_the_same_or_is_refused_by_the_first_that_can(case, version):
    if can(case, version):
        made = config(LINES[case], version)
        assert_means(made, parsed_by_data(version, command(made)))
        return
    with pytest.raises(ConfigError) as raised:
        config(LINES[case], version)
    named = re.search(r"Use --version (\S+) or later", str(raised.value))
    assert named[1] == FIRST[case]
    assert version in str(raised.value)


@pytest.mark.long
@pytest.mark.parametrize("case", FIRST)
def test_a_refusal_is_of_the_release_before_the_first_that_can(case):
    before = VERSIONS[VERSIONS.index(FIRST[case]) - 1]
    with pytest.raises(ConfigError):
        config(LINES[case], before)
    config(LINES[case], FIRST[case])


def test_defaults_that_are_left_out_are_those_of_every_version():
    for version in VERSIONS:
        namespace = parsed_by_data(version, [])
        for name, default in DEFAULTS.items():
            if name == "loss_agg_mode" and version != "0.11.2":
                continue
            assert plain(namespace[(DOTTED | PLACEMENT)[name]]) == plain(default), (version, name)


def test_no_field_is_lost_in_silence():
    assert flag_fields(LaunchConfig).keys() <= launch.covered()


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "version", "expected"),
    [
        ("icepop", "0.11.1", "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop "
                             "--algo.advantage.is_correction_threshold 0.25 4.0"),
        ("icepop", "0.11.2", "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode mask "
                             "--algo.advantage.is_correction_threshold 0.25 4.0"),
        ("tis", "0.11.2", "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip "
                          "--algo.advantage.is_correction_threshold 0.5 5.0"),
        ("sequences", "0.11.2", "--algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode mask "
                                "--algo.advantage.is_correction_threshold 0.5 5.0"),
    ],
)  # fmt: skip
def test_a_correction_is_written_in_each_versions_words_and_read_back(case, version, expected):
    made = config(LINES[case], version)
    assert expected in " ".join(command(made))
    back = [*command(config(LINES["defaults"], version))[:2], *expected.split()]
    again = parse_launch(["--version", version, *back])
    assert (again.is_correction, again.is_correction_threshold) == (made.is_correction, made.is_correction_threshold)


@pytest.mark.long
def test_the_critic_is_spoken_of_where_there_is_one():
    values = parsed_by_data("0.11.2", command(config(LINES["gae"])))
    for name in ("max_norm", "adam.betas", "adam.weight_decay", "lr_warmup_ratio"):
        assert values[f"critic.{name}"] == values[f"actor.{name}"]
    assert values["critic.num_gpus_per_node"] == values["ref.num_gpus_per_node"] == 4
    assert "critic" not in " ".join(command(config("--agent_func_path a.py --value_clip 0.1 --max_norm 0.5")))


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0.8.9", "0.10.4", "1.0", "latest", "0", "0.11", "0.11.3", "x", ""])
def test_other_versions_are_refused(text):
    with pytest.raises(ConfigError, match=r"--version: expected one of 0\.11\.0, 0\.11\.1, 0\.11\.2, got"):
        config("--agent_func_path a.py", text)


# --- what no version can ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--env math_retry", "--env: expected --agent_func_path instead for OpenRLHF"),
        ("--agent_func_path a.py --credit turn", "--credit: expected episode for OpenRLHF, got turn"),
        ("--agent_func_path a.py --engine hf", "It samples with vLLM only"),
        ("--agent_func_path a.py --no_ray", "--no_ray: expected Ray"),
        ("--agent_func_path a.py --use_mlflow u", "expected --use_wandb or --use_tensorboard for OpenRLHF, got MLflow"),
        ("--agent_func_path a.py --max_train_steps 10", "use --limit 160 --num_episodes 1"),
        ("--agent_func_path a.py --async_train --async_queue_size 3 --max_staleness 2", "shorten the queue"),
        (
            "--agent_func_path a.py --actor_num_gpus_per_node 64",
            "expected at most 2 with 64 training GPUs for OpenRLHF, got 8",
        ),
        (
            "--agent_func_path a.py --colocate_all_models",
            "as many GPUs for engines as for training for OpenRLHF, got 1 and",
        ),
        ("--agent_func_path a.py --vllm_enable_sleep", "expected --colocate_all_models with it"),
        ("--agent_func_path a.py --actor_num_nodes 0", "--actor_num_nodes: expected an integer >= 1, got 0"),
        ("--agent_func_path a.py --param_dtype fp32", "--param_dtype: expected bf16 or fp16 for OpenRLHF, got fp32"),
        ("--agent_func_path a.py --ds.zero_stage 3", "Put it after --, which passes it on."),
    ],
)
def test_flags_that_no_version_supports_are_refused_with_what_to_do(line, said):
    for version in VERSIONS:
        with pytest.raises(ConfigError, match=re.escape(said)):
            config(line, version)


@pytest.mark.long
def test_all_that_is_refused_is_reported_at_once_with_the_file_that_ships_for_an_environment(capsys):
    line = "--env math_retry --engine hf --max_train_steps 10 --loss_agg_mode seq-mean-token-mean"
    assert agentenv(["launch", "openrlhf", "--version", "0.11.1", *line.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for flag in ("--loss_agg_mode: ", "--env: ", "--engine: ", "--max_train_steps: "):
        assert flag in said
    assert "Use --version 0.11.2 or later." in said
    assert "such as agent_funcs/math_retry.py in agentenv's repository" in said
    for name in launch.SHIPPED:
        assert (Path(__file__).parents[2] / "agent_funcs" / f"{name}.py").is_file()
    with pytest.raises(
        ConfigError, match=r"--env: .* AgentExecutor, which `agentenv new FILE\.py --env ENV` writes\.$"
    ):
        config("--env mine.py:Env")


# --- warnings ---------------------------------------------------------------------------------------------------------

TRAPS = {
    "no cap of a turn": ("--max_tokens 9", "0.11.0", "0.11.2", "reserves room by it"),
    "images": ("", "0.11.0", "0.11.2", "images="),
    "filtering at the end": ("--dynamic_filtering", "0.11.0", "0.11.0", "groups that were already accepted are lost"),
    "icepop": ("--is_correction icepop", "0.11.0", "0.11.0", "NaN if a ratio overflows"),
    "stale blocks": ("--async_train --partial_rollout", "0.11.0", "0.11.2", "--no_enable_prefix_caching"),
    "late metrics": ("--async_train --eval_dataset d", "0.11.0", "0.11.2", "next step's weights"),
    "long replies": ("--overlong_buffer_len 9", "0.11.0", "0.11.2", "replies count towards the length"),
    "gae over replies": (
        "--advantage_estimator gae --lambd 0.9",
        "0.11.0",
        "0.11.2",
        "discount over the environment's",
    ),
    "top_p": ("--top_p 0.9", "0.11.0", "0.11.2", "ignore the cut"),
    "KL loss": ("--use_kl_loss --init_kl_coef 0.1", "0.11.0", "0.11.0", "Use --kl_estimator k2"),
    "KL loss, of late": ("--use_kl_loss --init_kl_coef 0.1", "0.11.1", "0.11.2", "--algo.kl.unbiased_gradient"),
    "oversampling": ("--async_train --vllm_generate_batch_size 64", "0.11.0", "0.11.0", "drawn again after a restart"),
    "oversampling, always": (
        "--async_train --vllm_generate_batch_size 64",
        "0.11.0",
        "0.11.2",
        "are not in checkpoints",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", TRAPS)
def test_a_known_trap_is_warned_of_where_it_is_and_where_its_flag_is_given(case):
    line, first, last, said = TRAPS[case]
    for version in VERSIONS:
        try:
            made = config(f"--agent_func_path a.py {line}", version)
        except ConfigError:
            continue
        warned = any(said in warning for warning in warnings(made))
        assert warned == (at_least(version, first) and at_least(last, version)), version
    if line:
        assert not any(said in warning for warning in warnings(config("--remote_rm_url r.py", last)))


EXECUTES = {
    "takes them": ("async def execute(self, prompt, label, sampling_params, images=None): ...", False),
    "takes them by name": ("async def execute(self, *args, images): ...", False),
    "takes all": ("async def execute(self, prompt, **kwargs): ...", False),
    "has none": ("agent_cls = None", False),
    "lacks them": ("async def execute(self, prompt, label, sampling_params, max_length): ...", True),
    "is a plain one": ("def execute(self, prompt): ...", True),
    "is broken": ("async def execute(self, images", True),
}


@pytest.mark.long
@pytest.mark.parametrize("case", EXECUTES)
def test_images_are_warned_of_only_where_the_files_execute_lacks_them(case, tmp_path):
    body, warned = EXECUTES[case]
    (tmp_path / "a.py").write_text(f"class AgentExecutor:\n    {body}\n")
    made = config(f"--agent_func_path {tmp_path}/a.py")
    assert any("images=" in each for each in warnings(made)) == warned


@pytest.mark.long
@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_data_that_is_not_here_is_noted_and_a_dataset_of_the_hub_is_not(name, tmp_path):
    path = tmp_path / name
    note = f"--data: {path} does not exist here; the job needs it where it runs."
    assert note in warnings(config(f"--agent_func_path a.py --prompt_data {path}"))
    path.touch()
    assert note not in warnings(config(f"--agent_func_path a.py --prompt_data {path}"))
    for hub in ("openai/gsm8k", "word_problems_train"):
        made = config(f"--agent_func_path a.py --prompt_data {hub}")
        assert not any("--data" in each for each in warnings(made))


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "warned"),
    [("--agent_func_path a.py", True), ("--agent_func_path a.py --credit episode", False),
     ("--agent_func_path a.py --max_turns 1", False), ("--remote_rm_url http://host", False)],
)  # fmt: skip
def test_credit_that_is_another_than_that_of_train_is_reported(line, warned, capsys):
    assert agentenv(["launch", "openrlhf", *line.split()]) == 0
    assert ("--credit: the default of `agentenv train` is turn" in capsys.readouterr().err) == warned


def test_lost_environment_actors_are_reported():
    assert any("--env_actors 2" in each for each in warnings(config("--agent_func_path a.py --env_actors 2")))
    assert not any("--env_actors" in each for each in warnings(config("--agent_func_path a.py")))


@pytest.mark.long
@pytest.mark.parametrize("flag", ["agent_func_path", "remote_rm_url"])
def test_a_file_that_is_not_here_is_noted(flag, tmp_path, capsys):
    path = tmp_path / "a.py"
    for there in (False, True):
        if there:
            path.touch()
        assert agentenv(["launch", "openrlhf", f"--{flag}", path]) == 0
        note = f"agentenv: warning: --{flag}: {path} does not exist here; the job needs it where it runs."
        assert (note in capsys.readouterr().err.splitlines()) == (not there)
    assert agentenv(["launch", "openrlhf", "--remote_rm_url", "http://host/get_reward"]) == 0
    assert "does not exist" not in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(("version", "said"), [("0.11.0", "empty requests"), ("0.11.1", "only the first address")])
def test_several_addresses_of_reward_models_are_warned_of(version, said):
    assert any(said in each for each in warnings(config("--remote_rm_url http://a,http://b", version)))
    assert not any(said in each for each in warnings(config("--remote_rm_url http://a", version)))
    assert not any(said in each for each in warnings(config("--remote_rm_url http://a,http://b", "0.11.2")))


@pytest.mark.parametrize("name", launch.IN_THE_FILE)
def test_what_only_the_file_can_say_is_reported(name):
    values = {"text_feedback": "raw", "open_reasoning": "close", "tool_role": "user", "long_observation": "cut",
              "chat_template_kwargs": '{"a": 1}'}  # fmt: skip
    made = LaunchConfig.from_flags(agent_func_path="a.py", **{name: values.get(name, 7)})
    assert any(f"does not have --{name}: set `" in warning for warning in warnings(made))
    assert not any(f"--{name}:" in each for each in warnings(LaunchConfig(agent_func_path="a.py")) if "set `" in each)


def test_columns_that_no_environment_gets_in_openrlhf_are_reported(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "Q", "label": {"a": 1}, "seed": 3, "stock": [1], "images": []}\n')
    said = [text for text in warnings(LaunchConfig(agent_func_path="a.py", data=str(data))) if "do not get" in text]
    assert [text.partition("do not get ")[2] for text in said] == ["seed, stock."]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_is_one_that_a_shell_reads(capsys):
    assert agentenv(["launch", "openrlhf", "--agent_func_path", "my agent.py", "--", "--ds.zero_stage", "3"]) == 0
    captured = capsys.readouterr()
    words = shlex.split(captured.out.replace("\\\n", " "))
    assert words[:4] == ["ray", "job", "submit", "--address=http://127.0.0.1:8265"]
    assert words[4:8] == ["--", "python3", "-m", "openrlhf.cli.train_ppo_ray"]
    assert words[words.index("--train.agent_func_path") + 1] == "my agent.py"
    assert words[-2:] == ["--ds.zero_stage", "3"]
    assert all(line.startswith("agentenv: warning: ") for line in captured.err.splitlines())


@pytest.mark.long
def test_files_are_named_so_that_the_job_finds_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.py").touch()
    line = shell(config("--agent_func_path a.py"))
    assert f"--train.agent_func_path {tmp_path}/a.py" in line
    assert re.search(r"--actor.model_name_or_path /\S+/tiny-math\b", line)
    assert re.search(r"--data.prompt_dataset /\S+word_problems_train.jsonl", line)
    sent = shell(config('--agent_func_path a.py --ray_runtime_env \'{"working_dir": "."}\''))
    assert "--train.agent_func_path a.py" in sent
    for travels in ("", ' --ray_runtime_env \'{"working_dir": "."}\''):  # what is written in a job's folder is lost
        left = shell(
            config(f"--agent_func_path a.py --save_path runs/a --ckpt_path runs/c --use_tensorboard b{travels}")
        )
        for path in ("runs/a", "runs/c", "b"):
            assert f" {tmp_path}/{path} " in f"{left.strip()} ".replace(" \\\n", " ")
    assert '\'--runtime-env-json={"working_dir": "."}\'' in sent


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["launch", "openrlfh"], "or tinker or skyrl or prime-rl, got 'openrlfh'. Write it"),
        (["launch", "openrlhf", "--agent_func_path", "a.py", "--", "x"], "expected flags after --, got 'x'"),
        (["launch", "openrlhf"], "expected one of --agent_func_path, --env and --remote_rm_url, got none"),
        (["launch", "openrlhf", "--version", "0.9.99"], "--version: expected one of 0.11.0"),
    ],
)
def test_errors_are_one_line(argv, said, capsys):
    if "--version" in argv:
        argv = [*argv, "--agent_func_path", "a.py"]
    assert agentenv(argv) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.long
def test_help_names_the_flags(capsys):
    assert agentenv(["launch", "--help"]) == 0
    assert "agentenv launch openrlhf" in capsys.readouterr().out
    assert agentenv(["launch", "openrlhf", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{name}" in out for name in flag_fields(LaunchConfig))


# --- OpenRLHF itself --------------------------------------------------------------------------------------------------

RELEASES = Path(os.environ.get("AGENTENV_OPENRLHF_RELEASES") or Path(sys.prefix) / "openrlhf-releases")
"""A folder VERSION/openrlhf for each release: `pip install --no-deps --target .venv/openrlhf-releases/VERSION ...`."""


def folder_of(version):
    for folder in (RELEASES / version, *([FOLDER] if version == VERSIONS[-1] else [])):
        if (folder / "openrlhf/cli/train_ppo_ray.py").is_file():
            return folder
    return pytest.skip(f"OpenRLHF {version} is not in {RELEASES}")


def asked(version, lines):
    """What a release's own parser, and its checks, make of command lines."""
    done = subprocess.run(
        [sys.executable, openrlhf_parser.__file__, folder_of(version)],
        input=json.dumps(lines), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_releases_own_parser_and_checks_take_every_line(version):
    made = [config(line, version) for case, line in LINES.items() if can(case, version)]
    for each, outcome in zip(made, asked(version, [command(each) for each in made]), strict=True):
        assert isinstance(outcome, dict), outcome
        # Its own checks then fill in and overwrite some.
        given = outcome | {"agent_func_path": each.agent_func_path, "critic_pretrain": each.critic_pretrain}
        assert_means(each, given)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_data_is_what_a_releases_own_parser_says(version):
    own = json.loads(json.dumps(openrlhf_parser.flags(folder_of(version))))
    spans = {
        flag: {key: value for key, value in span.items() if key not in ("from", "to")}
        for flag, known in OPENRLHF["flags"].items()
        for span in known
        if at_least(version, span["from"]) and at_least(span["to"], version)
    }
    assert own == spans


@pytest.mark.slow
def test_the_guides_line_needs_this_command_because_no_release_takes_it_as_printed():
    guide = LINES["the guide's"].split()
    said = asked(VERSIONS[-1], [guide])[0]
    assert "unrecognized arguments" in said
