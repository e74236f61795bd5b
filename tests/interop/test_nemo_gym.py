"""NeMo Gym's `POST /run`: its schema, what NeMo RL asserts of an answer, failures that are no zero, hostile rows."""

import asyncio
import math

import httpx
import pytest
import torch
from openai.types.responses import EasyInputMessageParam, Response
from pydantic import TypeAdapter

from agentenv._util.http.access import AccessPolicy
from agentenv.chat.chat import Chat, ChatOptions
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Completion, Limits, SamplingParams, StepResult
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.registry import env_source
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, DataError, InfraError
from agentenv.interop.nemo_gym import GymOptions, GymServer
from tests.interop.test_nemo_rl_env import tokenizer

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Guess my number."}], "temperature": 0.5},
    "label": "3",
    "agent_ref": {"name": "agentenv"},
    "_ng_task_index": 7,
    "_ng_rollout_index": 1,
}


class Told(AgentInstance):
    """Does what the label says."""

    async def step(self, states):
        match states["label"]:
            case "env":
                raise ValueError("as told")
            case "infra":
                raise InfraError("as told")
            case "data":
                raise DataError("as told")
            case "contract":
                return 5
            case "hang":
                await asyncio.sleep(60)
        return StepResult("go on", reward=0.5, terminated=states["turn_index"] == 1, info={"a": 0.125, "b": -1.0})


def server(script=("8", "4", "2", "3"), *, source=None, limits=None, **options):
    engine = script if hasattr(script, "generate") else ScriptedEngine(script, tokenizer())
    source = source or env_source("guess_number", {})
    return GymServer(source, engine=engine, chat=Chat(tokenizer()), limits=limits, options=GymOptions(**options))


async def post(served, body=ROW, **kwargs):
    async with httpx.AsyncClient(base_url=served.url, trust_env=False, verify=False, timeout=60) as http:
        return await http.post("/run", **(kwargs or {"json": body}))


def told(what, **row):
    return ROW | {"label": what} | row


def postprocessed(row, result):
    """The message log that NeMo RL makes of an answer, with the assertions on the way."""
    assert isinstance(result["responses_create_params"]["input"], list)
    seen, log = [], []
    for item in result["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        assert seen == item["prompt_token_ids"][: len(seen)], "Non-contiguous messages found!"
        new, generated = item["prompt_token_ids"][len(seen) :], item["generation_token_ids"]
        logprobs = torch.tensor(item["generation_log_probs"])
        assert len(logprobs) == len(generated)
        assert not torch.isnan(logprobs).any()
        log += [("user", torch.tensor(new)), ("assistant", torch.tensor(generated))]
        seen += new + generated
    assert log, "no generation data"
    assert {tokens.dtype for _, tokens in log} == {torch.int64}
    components = result.get("reward_components")
    assert not components or math.isclose(result["reward"], sum(components.values()), rel_tol=1e-5, abs_tol=1e-6)
    return log


@pytest.mark.long
async def test_an_episode_is_answered_in_gyms_schema():
    async with server() as served:
        answer = await post(served)
    assert answer.status_code == 200
    result = answer.json()
    assert {key: result[key] for key in ROW} == ROW
    items = result["response"]["output"]
    actions, said = ([item for item in items if ("prompt_token_ids" in item) is own] for own in (True, False))
    response = Response.model_validate(result["response"] | {"output": actions})  # as Gym's base class
    assert [item.content[0].text for item in response.output] == ["8", "4", "2", "3"]
    TypeAdapter(list[EasyInputMessageParam]).validate_python(said)  # which Gym takes beside them
    assert (result["reward"], result["score"], result["num_turns"], result["truncated"]) == (1.0, 1.0, 4, False)
    assert [item["role"] for item in items] == ["assistant", "user"] * 3 + ["assistant"]


async def test_nemo_rls_postprocessing_takes_it_and_has_every_token_as_it_was_sampled():
    engine = ScriptedEngine(["8", "4", "2", "3"], tokenizer())
    async with server(engine) as served:
        result = (await post(served)).json()
    log = postprocessed(ROW, result)
    generated = [tokens.tolist() for role, tokens in log if role == "assistant"]
    assert generated == [[*tokenizer().encode(text), tokenizer().eos_token_id] for text in "8423"]
    prompts = [item["prompt_token_ids"] for item in result["response"]["output"] if "prompt_token_ids" in item]
    assert prompts == [list(request.prompt_token_ids) for request in engine.requests]


async def test_tokens_that_no_text_encodes_to_come_back_as_they_are():
    odd = Completion(tuple(ord(c) + 3 for c in "3"), logprobs=(-1.0,))
    async with server([odd, "3"], limits=Limits(max_turns=1)) as served:
        result = (await post(served)).json()
    (item,) = result["response"]["output"]
    assert item["generation_token_ids"] == list(odd.token_ids)
    assert item["generation_log_probs"] == [-1.0]


async def test_the_reward_is_the_sum_of_its_components():
    async with server(["x"], source=EnvSource(Told, {}), reward_components=("a", "b")) as served:
        result = (await post(served, told("ok"))).json()
    assert result["reward_components"] == {"a": 0.25, "b": -2.0, "rest": 2.75}
    assert (result["reward"], result["a"]) == (1.0, 0.25)
    postprocessed(ROW, result)


async def test_the_rows_sampling_goes_before_the_servers():
    engine = ScriptedEngine(["3"], tokenizer())
    params = {"input": "Guess.", "temperature": 0.25, "top_p": 0.5, "max_output_tokens": 9}
    served = GymServer(
        env_source("guess_number", {}), engine=engine, chat=Chat(tokenizer()),
        sampling=SamplingParams(temperature=0.9, top_k=5),
    )  # fmt: skip
    async with served:
        await post(served, ROW | {"responses_create_params": params})
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.25, 0.5, 5, 9)


async def test_input_as_text_parts_and_instructions_are_messages():
    engine = ScriptedEngine(["3"], tokenizer())
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Guess it."}]}]
    async with server(engine) as served:
        await post(served, ROW | {"responses_create_params": {"input": parts, "instructions": "Be brief."}})
    assert engine.requests[0].prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGuess it.")


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "status", "kind"),
    [("infra", 503, "infra"), ("env", 422, "env"), ("data", 422, "data"), ("contract", 422, "contract")],
)
async def test_a_failed_episode_is_an_error_of_its_class_and_no_zero(what, status, kind):
    async with server(["x"], source=EnvSource(Told, {}), max_retries=0) as served:
        answer = await post(served, told(what))
        assert served.counts == {"done": 0, "failed": 1, "refused": 0}
    assert answer.status_code == status
    assert "reward" not in answer.json()
    assert answer.json()["error"]["class"] == kind
    assert answer.json()["error"]["where"] == "step"


async def test_a_row_without_a_label_is_refused_where_one_is_needed():
    async with server() as served:
        answer = await post(served, {key: value for key, value in ROW.items() if key != "label"})
    assert (answer.status_code, answer.json()["error"]["class"]) == (422, "data")
    assert answer.json()["error"]["message"].startswith("row 7: expected a label, got none in the columns ")


async def test_a_step_that_hangs_is_a_timeout_that_may_be_tried_again():
    async with server(["x"], source=EnvSource(Told, {}), limits=Limits(step_timeout_s=0.05)) as served:
        answer = await post(served, told("hang"))
    assert (answer.status_code, answer.json()["error"]["class"]) == (504, "infra")


@pytest.mark.long
async def test_an_episode_that_infrastructure_failed_is_run_again():
    engine = ScriptedEngine(["3"], tokenizer(), crash_at=0)
    async with server(engine, max_retries=1) as served:
        answer = await post(served)
    assert (answer.status_code, answer.json()["reward"]) == (200, 1.0)


async def test_a_missing_logprob_is_an_error_and_no_number():
    async with server(ScriptedEngine(["3"], tokenizer(), logprob=math.nan)) as served:
        answer = await post(served)
    assert (answer.status_code, answer.json()["error"]["class"]) == (503, "infra")


def test_a_history_that_is_rendered_again_is_refused_at_once():
    chat = Chat(tokenizer(), options=ChatOptions(history="rerender"))
    with pytest.raises(ConfigError, match="extend the last"):
        GymServer(env_source("guess_number", {}), engine=ScriptedEngine(["3"], tokenizer()), chat=chat)


async def test_an_episode_that_was_cut_says_so():
    async with server(["8"], limits=Limits(max_turns=1)) as served:
        result = (await post(served)).json()
    assert (result["truncated"], result["reward"]) == (True, 0.0)


# --- the server -------------------------------------------------------------------------------------------------------


PARAMS = {"input": "x"}
NO_ROWS = [
    5, [], {}, {"responses_create_params": []}, {"responses_create_params": {}},
    {"responses_create_params": {"input": []}}, {"responses_create_params": {"input": [5]}},
    {"responses_create_params": {"input": [{"role": "user"}]}},
    {"responses_create_params": {"input": [{"role": 5, "content": "x"}]}},
    {"responses_create_params": {"input": [{"type": "function_call_output", "output": "x"}]}},
    {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}},
    {"responses_create_params": {"input": [{"type": "reasoning", "content": [{"text": "x"}]}]}},
    {"responses_create_params": {"input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": "x"}]}},
    {"responses_create_params": {"input": [{"role": "user", "content": "x"}]}, "label": "77"},
    {"responses_create_params": PARAMS | {"temperature": "hot"}},
    {"responses_create_params": PARAMS | {"temperature": True}},
    {"responses_create_params": PARAMS | {"temperature": -1}},
    {"responses_create_params": PARAMS | {"max_output_tokens": 1.5}},
    {"responses_create_params": PARAMS, "seed": "x"},
]  # fmt: skip


@pytest.mark.long
async def test_input_that_is_not_a_row_is_the_requests_fault():
    async with server(["3"]) as served:
        for body in NO_ROWS:
            answer = await post(served, body)
            assert (answer.status_code, answer.json()["error"]["class"]) == (422, "data"), body


async def test_others_than_this_machine_need_a_token_which_gyms_address_may_hold():
    access = AccessPolicy(
        "0.0.0.0", token="secret", hosts=("127.0.0.1",), without_token=GymOptions().access.without_token
    )
    async with server(["3"], access=access) as served:
        assert (await post(served)).status_code == 401
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{served.url}/health")).status_code == 200
            answer = await http.post(f"http://x:secret@127.0.0.1:{served.port}/run", json=ROW)
            assert (answer.status_code, answer.json()["reward"]) == (200, 1.0)


async def test_one_episode_too_many_is_answered_with_retry_later():
    started, end = asyncio.Event(), asyncio.Event()

    async def script(request):
        started.set()
        await end.wait()
        return "3"

    async with server(script, max_in_flight=1) as served:
        first = asyncio.create_task(post(served))
        await started.wait()
        second = await post(served)
        end.set()
        assert (await first).status_code == 200
    assert (second.status_code, second.headers["retry-after"]) == (429, "2")


async def test_an_episode_whose_client_went_away_is_cancelled():
    started = asyncio.Event()

    async def script(request):
        started.set()
        await asyncio.sleep(600)

    engine = ScriptedEngine(script, tokenizer())
    async with server(engine) as served:
        asking = asyncio.create_task(post(served))
        await started.wait()
        asking.cancel()
        async with asyncio.timeout(30):
            while not engine.num_cancelled:
                await asyncio.sleep(0.01)


async def test_health_is_reported_and_other_paths_are_not():
    async with server(["3"]) as served, httpx.AsyncClient(base_url=served.url, trust_env=False) as http:
        assert (await http.get("/")).status_code == 200
        counts = {"in_flight": 0, "done": 0, "failed": 0, "refused": 0}
        assert (await http.get("/health")).json() == {"status": "ok", **counts}
        assert (await http.get("/run")).status_code == 405
        assert (await http.post("/v1/responses", json={})).status_code == 404
