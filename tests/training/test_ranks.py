"""Two processes that train together: what one learns, to 1e-5; their checkpoints, their faults, and their end.

On CPUs with gloo; no test has a GPU.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from agentenv.errors import ConfigError, RunStopped
from agentenv.training.algorithm.batch import build
from agentenv.training.learner.learner import Learner
from agentenv.training.learner.micro_batches import MicroBatchRunner
from agentenv.training.learner.ranks import RankGroup, run_ranks
from agentenv.training.learner.sharding import RankLost, Ranks
from agentenv.training.logs.journal import read_metrics
from tests.drivers import command, overriding
from tests.ports import held_port
from tests.training.trainings import flags as command_line
from tests.training.trainings import make_place, tiny_model, without_times
from tests.training.worlds import batch_of, episode, flags, make_model

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["tests.training.test_ranks", "transformers.models.qwen2.modeling_qwen2"])
ROOT = Path(__file__).parents[2]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


# --- processes that train together ---


def run_rank(rank, size, port, out, lead, args, prepare):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ["LOCAL_WORLD_SIZE"] = str(size)  # vLLM on a CPU leaves its own in a process that it was used in
    if prepare is not None:
        prepare(rank)
    assert run_ranks(lambda rank_group: torch.save(lead(rank_group, *args), out) or 0) == 0


@contextlib.contextmanager
def started(folder, lead, *args, size=2, prepare=None):
    """What `lead` says on rank 0 will be in a file; the processes."""
    out = folder / f"out{time.monotonic_ns()}.pt"
    with held_port() as port:
        processes = [
            _FORK.Process(target=run_rank, args=(r, size, port, out, lead, args, prepare)) for r in range(size)
        ]
        for process in processes:
            process.start()
        try:
            yield out, processes
        finally:
            for process in processes:
                process.kill()


def on_ranks(folder, lead, *args, size=2, prepare=None):
    """What `lead` gives on rank 0; all ranks end well."""
    with started(folder, lead, *args, size=size, prepare=prepare) as (out, processes):
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0] * size
    return torch.load(out, weights_only=False)


def opened(rank_group, path, changes):
    return rank_group.learner(flags(**changes), path, num_train_steps=10, gpus=[])


def batches():
    """Three batches: of six episodes, of five of other lengths, and of one, fewer than there are ranks."""
    five = [episode([(n, 0.1 * n), (3, 0.5)], group=f"g{n // 2}", name=f"e{n}", seed=40 + n) for n in range(1, 6)]
    return [batch_of(), build(five), build([episode([(4, 1.0), (2, -0.5)], seed=70)])]


def taught(learner):
    """The numbers of three train steps, and the weights after them."""
    numbers = [learner.train_step(batch) for batch in batches()]
    return numbers, {name: tensor.clone() for name, tensor in learner.weights()}


def teach(rank_group, path, changes):
    return taught(opened(rank_group, path, changes))


def alone(path, changes):
    return Learner(flags(**changes), path, num_train_steps=10, device="cpu")


def assert_same(found, expected, tolerance=1e-5):
    (numbers, weights), (numbers_1, weights_1) = found, expected
    for step, step_1 in zip(numbers, numbers_1, strict=True):
        assert step == pytest.approx(step_1, rel=10 * tolerance, abs=tolerance)  # sums of another order
    assert weights.keys() == weights_1.keys()
    for name, weight in weights_1.items():
        torch.testing.assert_close(weights[name], weight, rtol=tolerance, atol=tolerance)


SIZE = {"rollout_batch_size": 3, "n": 2, "actor_learning_rate": 1e-4, "critic_learning_rate": 1e-4}
SETTINGS = {
    "padded": {"micro_train_batch_size": 2},
    "packed by tokens": {"packing_samples": True, "use_dynamic_batch": True, "train_max_tokens_per_gpu": 20},
    "several optimizer steps": {"max_epochs": 2, "train_batch_size": 2, "policy_loss_type": "gspo"},
    "gae": {"advantage_estimator": "gae", "lambd": 0.9},
    "kl in the loss": {"init_kl_coef": 0.1, "use_kl_loss": True, "entropy_loss_coef": 0.05},
    "kl in the reward": {"init_kl_coef": 0.1, "micro_train_batch_size": 1},
    "corrected": {"is_correction": "seq-mask-tis", "is_correction_threshold": (1e-9, 1e9)},
    "adapters": {"lora_rank": 4, "lora_alpha": 8, "init_kl_coef": 0.1, "use_kl_loss": True},
    "no clipping": {"max_norm": 0.0},
}  # fmt: skip


FAST = ("padded", "packed by tokens", "gae", "adapters")


@pytest.mark.long
@pytest.mark.parametrize("setting", [name if name in FAST else pytest.param(name, marks=slow) for name in SETTINGS])
def test_two_ranks_learn_what_one_does(path, tmp_path, setting):
    if setting == "adapters":
        pytest.importorskip("peft")
    changes = SIZE | SETTINGS[setting]
    expected = taught(alone(path, changes))
    assert all(numbers["grad_norm"] > 1e-3 for numbers in expected[0][:2])
    assert_same(on_ranks(tmp_path, teach, path, changes), expected)


@slow
def test_three_ranks_have_sequences_for_two_of_them(path, tmp_path):
    """A batch of one or five sequences among three ranks: some do nothing, none waits for ever."""
    assert_same(on_ranks(tmp_path, teach, path, SIZE, size=3), taught(alone(path, SIZE)))


@slow
def test_tied_weights_and_another_architecture(tmp_path):
    for name in ("qwen2-tied", "gemma2"):
        model = make_model(tmp_path / name, name)
        assert_same(on_ranks(tmp_path, teach, model, SIZE), taught(alone(model, SIZE)))


def shares(rank_group, path):
    learner = opened(rank_group, path, SIZE | SETTINGS["gae"] | {"init_kl_coef": 0.1})
    learner.train_step(batch_of())
    models = (learner.policy.scorer, learner.policy._reference, learner.critic)
    return [sum(p.to_local().numel() for p in model.parameters()) for model in models]


@pytest.mark.long
def test_a_rank_keeps_its_part_of_policy_reference_and_critic(path, tmp_path):
    policy = alone(path, SIZE).policy.model
    total = sum(p.numel() for p in policy.parameters())
    policy_micro_loss, reference_share, critic_micro_loss = on_ranks(tmp_path, shares, path)
    assert policy_micro_loss == reference_share == pytest.approx(total / 2, rel=0.01)
    assert critic_micro_loss < policy_micro_loss, "no output layer"


# --- how micro-batches are dealt ---


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "split", [{"micro_train_batch_size": 2}, {"use_dynamic_batch": True}, SETTINGS["packed by tokens"]]
)
def test_every_sequence_is_one_ranks_and_all_do_as_many_micro_batches(size, split):
    batch, done = batch_of(), []
    for rank in range(size):
        sweep, micros = MicroBatchRunner(flags(**split), torch.device("cpu"), Ranks(rank, size)), []
        assert sweep.run(batch, micros.append) == 0
        done.append(micros)
    assert len({len(micros) for micros in done}) == 1
    assert sorted(each for micros in done for micro in micros for each in micro.sequences) == list(range(6))
    if split == {"micro_train_batch_size": 2}:
        assert {len(micros) for micros in done} == {math.ceil(6 / (2 * size))}
    elif size in (1, 2, 3):
        assert all(micros[0].sequences for micros in done), "no rank has nothing while another has two"


def merge_one(rank, port, out):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    ranks, _ = RankGroup(rank, 2).place([])
    values_RN = torch.tensor([[1.0, math.nan, 3.0, math.nan, -math.inf], [math.nan, 2.0, 3.0, math.nan, math.nan]])
    torch.save(ranks.merge(values_RN[rank]), out / f"{rank}.pt")


def test_numbers_of_ranks_are_merged_and_what_none_has_stays_missing(tmp_path):
    with held_port() as port:
        processes = [_FORK.Process(target=merge_one, args=(rank, port, tmp_path)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
    expected = torch.tensor([1.0, 2.0, 3.0, math.nan, -math.inf])
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, rtol=0, atol=0, equal_nan=True)


# --- going on ---


def state_after(rank_group, path, changes, state, shown):
    """Go on from a state, learn from some of the batches, and give numbers and state."""
    learner = opened(rank_group, path, changes) if rank_group else alone(path, changes)
    if state is not None:
        learner.load_state(state)
    numbers = [learner.train_step(batch) for batch in batches()[shown]]
    return numbers, learner.state(), {name: tensor.clone() for name, tensor in learner.weights()}


@pytest.mark.long
@pytest.mark.parametrize("more", [{"max_epochs": 2, "train_batch_size": 2}, SETTINGS["gae"], SETTINGS["adapters"]])
def test_a_checkpoint_of_two_ranks_continues_with_one_and_then_with_two(path, tmp_path, more):
    changes = SIZE | more
    first, state, _ = on_ranks(tmp_path, state_after, path, changes, None, slice(0, 1))
    torch.save(state, tmp_path / "state.pt")
    second, state, _ = state_after(
        None, path, changes, torch.load(tmp_path / "state.pt", weights_only=True), slice(1, 2)
    )
    third, state, weights = on_ranks(tmp_path, state_after, path, changes, state, slice(2, 3))
    assert_same((first + second + third, weights), taught(alone(path, changes)))
    assert state["num_steps"] == 3


def save_there(rank_group, path, folder):
    from transformers import AutoTokenizer

    learner = opened(rank_group, path, SIZE)
    learner.train_step(batch_of())
    learner.save_model(folder, AutoTokenizer.from_pretrained(tiny_model()))
    return dict(learner.weights())


@pytest.mark.long
def test_the_model_that_two_ranks_save_is_whole(path, tmp_path):
    from transformers import AutoModelForCausalLM

    weights = on_ranks(tmp_path, save_there, path, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)


# --- faults ---


def patch_layer(change):
    """Have the second layer's output changed, in this process."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    forward = Qwen2DecoderLayer.forward

    def changed(self, hidden_states, *args, **kwargs):
        out = forward(self, hidden_states, *args, **kwargs)
        return change(out) if self.self_attn.layer_idx == 1 else out

    Qwen2DecoderLayer.forward = changed


def no_number(rank):
    if rank == 1:
        patch_layer(lambda out: out * float("nan"))


def teach_nothing(rank_group, path):
    learner = opened(rank_group, path, SIZE | {"micro_train_batch_size": 1})
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    with pytest.raises(RunStopped, match="finite"):
        learner.train_step(batch_of())
    after = dict(learner.weights())
    return all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_a_loss_that_is_not_a_number_on_one_rank_stops_all_before_a_weight_changes(path, tmp_path):
    assert on_ranks(tmp_path, teach_nothing, path, prepare=no_number)


def dies(rank):
    if rank == 1:
        patch_layer(lambda out: os._exit(9))


def lack(out):
    """Amid the backward pass: layers above have reduced their gradients by then, those below have not."""

    def fail(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    if out.requires_grad:
        out.register_hook(fail)
    return out


def lacks_memory_here(rank):
    if rank == 0:
        patch_layer(lack)


def lacks_memory_there(rank):
    if rank == 1:
        patch_layer(lack)


def told_of_a_loss(rank_group, path):
    learner = opened(rank_group, path, SIZE)
    with pytest.raises(RankLost) as told:
        learner.train_step(batch_of())
    return str(told.value)


@pytest.mark.long
@pytest.mark.parametrize(
    ("prepare", "code", "message"),
    [
        (dies, 9, "answer from every rank"),
        (lacks_memory_there, 1, "answer from every rank"),
        (lacks_memory_here, 1, "got too little on rank 0. Lower --micro_train_batch_size or"),
    ],
)
def test_a_rank_that_dies_or_lacks_memory_is_reported_on_rank_0_at_once(path, tmp_path, prepare, code, message):
    with started(tmp_path, told_of_a_loss, path, prepare=prepare) as (out, processes):
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, code]
    told = torch.load(out)
    assert message in told
    assert "resume from the last checkpoint" in told


def leave(rank_group):
    os._exit(7)


def raise_error(rank_group, path):
    opened(rank_group, path, SIZE)
    raise ConfigError("a flag is wrong")


@pytest.mark.long
def test_no_rank_outlives_rank_0_however_it_ends(path, tmp_path):
    for lead, args, expected in ((leave, (), (7, 1)), (raise_error, (path,), (1, 0))):
        with started(tmp_path, lead, *args) as (_, processes):
            for process in processes:
                process.join(120)
            assert tuple(process.exitcode for process in processes) == expected


def test_several_nodes_are_others_business(monkeypatch):
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="Use OpenRLHF"):
        run_ranks(lambda rank_group: 0)


# --- the command line ---

TORCHRUN = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def torchrun(place, argv):
    """A training whose rank 0 is aborted where it ends as an interpreter does, beside the threads of torch."""
    with (place / "env.py").open("a") as file:
        file.write('\nimport atexit, os\nif "ABORT_AT_EXIT" in os.environ:\n    atexit.register(os.abort)\n')
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}", "OMP_NUM_THREADS": "1", "ABORT_AT_EXIT": "1"}
    return subprocess.Popen(
        # torchrun takes --n for the beginning of its own --nnodes.
        [*TORCHRUN, "-m", "agentenv.cli", *("--n_samples_per_prompt" if a == "--n" else a for a in overriding(*argv))],
        cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@slow
def test_torchrun_writes_what_one_process_does(tmp_path, monkeypatch):
    place = make_place(tmp_path, monkeypatch)
    argv = command_line("--init_kl_coef", 0.1, "--micro_train_batch_size", 3)
    assert command([*argv, "--out", "one"]) == 0
    process = torchrun(place, [*argv, "--out", "two"])
    _, stderr = process.communicate(timeout=800)
    assert process.returncode == 0, stderr
    assert stderr.count("step 3/3") == 1
    one, two = without_times(place / "one"), without_times(place / "two")
    assert [line["step"] for line in two] == [1, 2, 3]
    assert all(line["train/grad_norm"] > 0 for line in two)
    for line, line_1 in zip(two, one, strict=True):
        assert line == pytest.approx(line_1, rel=1e-4, abs=1e-4)
    assert command([*argv, "--out", "two", "--resume", "--max_train_steps", 4]) == 0, "one goes on"
    assert read_metrics(place / "two")[-1]["step"] == 4


def children(pid):
    """The process's descendants."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


@slow
def test_a_signal_to_torchrun_leaves_a_checkpoint_and_no_process(tmp_path, monkeypatch):
    place = make_place(tmp_path, monkeypatch)
    process = torchrun(place, command_line("--max_train_steps", 10_000, "--save_steps", -1))
    deadline = time.monotonic() + 600
    while not (place / "out/metrics.jsonl").exists() or len(read_metrics(place / "out")) < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    left = children(process.pid)
    assert len(left) >= 2
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=800)
    assert "interrupted after step" in stderr
    last = read_metrics(place / "out")[-1]["step"]
    assert [path.name for path in (place / "out/checkpoints").iterdir()] == [f"step-{int(last):08d}"]
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
