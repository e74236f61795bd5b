"""SkyRL's trainer, data and client on the CPU, for skyrl_rollout.py: without its models, over a server of tiny-math."""

import contextlib
from collections import Counter
from types import SimpleNamespace

import typed_dict  # noqa: F401
from aiohttp import web
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim
from skyrl.train.trainer import RayPPOTrainer
from transformers import AutoTokenizer

from tests.peers.rollout_parts import MODEL, Sampler

TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


class TinyServer:
    """What a vLLM server answers SkyRL's client, from tiny-math on the CPU."""

    def __init__(self):
        self.sampler = Sampler()
        self.sessions, self.finished, self.salts = Counter(), [], set()

    async def generate(self, request):
        asked = await request.json()
        ids, params = asked["token_ids"], asked["sampling_params"]
        self.sessions[request.headers["X-Session-ID"]] += 1
        self.salts.add(asked.get("cache_salt"))
        made = await self.sampler.sample(ids, temperature=params["temperature"], max_tokens=params["max_tokens"])
        content = [{"logprob": value} for value in made.logprobs]
        choice = {"token_ids": made.token_ids, "finish_reason": made.finish_reason, "logprobs": {"content": content}}
        return web.json_response({"choices": [choice]})

    async def finish(self, request):
        self.finished.append(request.query["session_id"])
        return web.json_response({})


async def done(request):
    return web.json_response({})


PAUSES = {"/pause": done, "/resume": done}


@contextlib.asynccontextmanager
async def served():
    """Yield a server and SkyRL's client of it."""
    tiny, app = TinyServer(), web.Application()
    routes = {"/inference/v1/generate": tiny.generate, "/finish_session": tiny.finish}
    app.add_routes([web.post(path, answer) for path, answer in (routes | PAUSES).items()])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = RemoteInferenceClient(url, [url], 1, model_name="tiny-math", tokenizer=TOKENIZER)
    try:
        yield tiny, client
    finally:
        await (await client._get_session()).close()
        await runner.cleanup()


class Trainer(RayPPOTrainer):
    """SkyRL's trainer, whole but for what needs its models; `batches` has what it would learn from."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = []

    def init_weight_sync_state(self):
        async def synced():
            self.inference_engine_client.increment_weight_version()

        self.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1, save_weights_for_sampler=synced)

    def fwd_logprobs_values_reward(self, training_input):
        training_input["values"] = None
        return training_input

    def compute_advantages_and_returns(self, data):
        made = super().compute_advantages_and_returns(data)
        self.batches.append({key: made[key] for key in made} | {"uids": list(made.metadata["uids"])})
        return made

    def train_critic_and_policy(self, data):
        return {}


class AsyncTrainer(FullyAsyncTrainerSim):
    """SkyRL's fully asynchronous trainer, whose update it simulates."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = []

    async def _run_training(self, training_input):
        training_input["values"] = None
        made = self.compute_advantages_and_returns(training_input)
        self.batches.append({key: made[key] for key in made} | {"uids": list(made.metadata["uids"])})
        return {}


class Log:
    """What the trainer logs."""

    def __init__(self):
        self.metrics = {}

    def log(self, metrics, step, commit=True):
        self.metrics |= metrics

    def finish(self):
        pass


def config_of(num_tasks, group, **settings):
    cfg = SkyRLTrainConfig()
    trainer, generator = cfg.trainer, cfg.generator
    trainer.policy.model.path, trainer.placement.colocate_all, trainer.resume_mode = MODEL, False, "none"
    trainer.train_batch_size = trainer.policy_mini_batch_size = num_tasks
    trainer.epochs = trainer.max_training_steps = 1
    trainer.eval_interval = trainer.ckpt_interval = trainer.hf_save_interval = trainer.print_example_interval = 0
    cfg.data.dataloader.num_workers = 0
    generator.n_samples_per_prompt, generator.max_input_length, generator.max_turns = group, 400, 3
    generator.sampling_params.max_generate_length = 48
    generator.inference_engine.enable_ray_prometheus_stats = False
    for name, value in settings.items():
        setattr(generator, name, value)
    return cfg


def asynchronous(cfg):
    """Set up the asynchronous trainer: two groups at a time, whose weights are at most one step old."""
    cfg.trainer.algorithm.policy_loss_type, options = "rollout_is", cfg.trainer.fully_async
    options.enabled = options.simulate_training = True
    options.max_staleness_steps, options.num_parallel_generation_workers = 1, 2


async def trained(cfg, file, client, generator):
    """Run SkyRL's `train` for a step on a parquet file; return the batch that it would learn from, and its log."""
    data = PromptDataset(file, TOKENIZER, cfg.trainer.max_prompt_length, num_workers=1)
    log = Log()
    kind = AsyncTrainer if cfg.trainer.fully_async.enabled else Trainer
    trainer = kind(cfg, log, TOKENIZER, data, client, generator)
    await trainer.train()
    (batch,) = trainer.batches
    return batch, log.metrics


async def evaluated(cfg, file, client, generator):
    """Return the metrics of SkyRL's evaluation on a parquet file, with as many samples as in training."""
    cfg.trainer.dump_eval_results, cfg.generator.eval_n_samples_per_prompt = False, cfg.generator.n_samples_per_prompt
    data = PromptDataset(file, TOKENIZER, cfg.trainer.max_prompt_length, num_workers=1)
    return await Trainer(cfg, Log(), TOKENIZER, data, client, generator, eval_dataset=data).eval()
