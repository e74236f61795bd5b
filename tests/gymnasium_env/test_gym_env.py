"""An agent environment as Gymnasium's: what reset and step give, and what becomes of failures."""

import concurrent.futures
import gc
import random
from pathlib import Path

import numpy as np
import pytest

from agentenv._util.loop_thread import run_sync
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, StopReason, Task
from agentenv.episode.registry import load_env
from agentenv.errors import ConfigError, ContractError, EpisodeFailed
from agentenv.gym import AgentEnv, EpisodeMaker, GymConfig
from agentenv.gym.config import conversation
from agentenv.testing.tokenizers import CharTokenizer
from tests.waits import wait_until

GAMES = f"{Path(__file__).parent / 'games.py'}"
YES, NO, NOTHING = range(3)


def game(name="Echo", **kwargs):
    return AgentEnv(f"{GAMES}:{name}", **kwargs)


def test_reset_returns_the_prompt_and_step_five_values_of_the_right_types():
    env = game()
    assert env.reset(options={"task": "yes"}) == ("Say yes.", {"task_id": "yes"})
    observation, *rest = env.step("maybe")
    assert observation.startswith("I heard 'maybe' é😀")
    assert rest == [0.0, False, False, {"turn": 1.0, "score": 0.0}]
    assert env.step("yes") == ("", 1.0, True, False, {"turn": 2.0, "score": 0.75, "stop_reason": "terminated"})
    assert [type(value) for value in rest] == [float, bool, bool, dict]


def test_messages_are_the_whole_conversation_of_this_episode_only():
    env = game(obs_mode="messages")
    first, _ = env.reset(options={"task": NO})
    assert [message["role"] for message in first] == ["system", "user"]
    assert game().reset(options={"task": NO})[0] == "System: Be brief. é日本😀\n\nUser: Say no."
    first[0]["content"] = "changed"
    conversation = env.step("maybe")[0]
    assert [message["role"] for message in conversation] == ["system", "user", "assistant", "user"]
    assert conversation[0]["content"] == "Be brief. é日本😀"
    assert conversation[2]["content"] == "maybe"
    assert conversation in env.observation_space


def test_a_conversation_shares_nothing_with_the_record_however_deep_it_is():
    prompt = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    trajectory = Trajectory(Task("a"), 100, prompt=prompt)
    conversation(trajectory)[0]["content"][0]["text"] = "changed"
    assert conversation(trajectory) == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_an_action_that_nothing_followed_continues_with_the_next_in_one_message():
    env = game("Silent", obs_mode="messages")
    env.reset(options={"task": YES})
    env.step("on")
    assert env.step("ly")[0] == [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "only"}]


def test_tasks_and_seeds_come_from_np_random_alone():
    states = random.getstate(), np.random.get_state()[1].tolist()
    env, other = game(), game()
    runs = []
    for each in (env, other):
        first = each.reset(seed=3)
        runs.append([first, each.step("a"), each.reset(), each.step("b"), each.reset(), each.step("c")])
    assert runs[0] == runs[1]
    assert len({info["task_id"] for _, info in (env.reset() for _ in range(20))}) == 3
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_a_tasks_own_seed_is_its_episodes_and_other_tasks_draw_theirs():
    env = game()
    env.reset(options={"task": NOTHING})
    assert env.trajectory.seed == 7
    seeds = {(env.reset(options={"task": YES}), env.trajectory.seed)[1] for _ in range(5)}
    assert len(seeds) == 5


def test_naming_the_task_leaves_the_generator_where_drawing_it_does():
    env, other = game(), game()
    env.reset(seed=1, options={"task": YES})
    other.reset(seed=1)
    assert env.reset() == other.reset()


@pytest.mark.parametrize("options", [{"task": task} for task in (3, "maybe", True)] + [{"tsak": 1}], ids=repr)
def test_options_that_name_nothing_are_refused(options):
    with pytest.raises(ConfigError, match="expected"):
        game().reset(options=options)


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"obs_mode": "pixels"}, "obs_mode"),
        ({"obs_mode": "tokens"}, "model"),
        ({"max_episode_steps": 0}, "max_episode_steps"),
        ({"max_length": 1}, "max_length"),
        ({"step_timeout_s": 0}, "step_timeout_s"),
        ({"limit": 0}, "AgentEnv.limit"),
        ({"max_lenght": 10}, "Did you mean 'max_length'"),
        ({"env_kwargs": {"nmae": 1}}, "^env_kwargs: expected arguments of .*nmae"),
        ({"env_kwargs": 3}, "env_kwargs"),
        ({"render_mode": "rgb_array"}, "render_mode"),
        ({"data": "nothing.jsonl"}, "nothing.jsonl"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_when_the_environment_is_made(kwargs, told):
    with pytest.raises(ConfigError, match=told):
        game(**kwargs)


def test_an_agent_with_its_own_loop_cannot_be_stepped():
    with pytest.raises(ConfigError, match="its own loop"):
        game("OwnLoop")


def test_step_before_reset_and_after_the_end_is_refused_and_reset_continues():
    env = game()
    for call in (lambda: env.step("a"), lambda: env.trajectory):
        with pytest.raises(ContractError, match="Call reset"):
            call()
    env.reset(options={"task": YES})
    env.step("yes")
    with pytest.raises(ContractError, match="is over"):
        env.step("yes")
    assert env.trajectory.stop_reason is StopReason.TERMINATED
    env.reset()
    assert env.step("maybe")[2:4] == (False, False)


@pytest.mark.parametrize("action", [None, 3, b"yes", ["yes"], {"role": "assistant", "content": "yes"}])
def test_an_action_that_is_not_text_is_refused_and_the_episode_continues(action):
    env = game()
    env.reset(options={"task": YES})
    with pytest.raises(ContractError, match="expected a text"):
        env.step(action)
    assert env.step("yes")[1] == 1.0


@pytest.mark.parametrize(
    ("name", "told"), [("Breaks", "broken"), ("Hangs", "an answer within 0.05 s"), ("BreaksAtReset", "no world")]
)
def test_a_failure_raises_and_is_never_a_reward(name, told):
    env = game(name, step_timeout_s=0.05 if name == "Hangs" else 60.0)
    with pytest.raises(EpisodeFailed, match=told):
        env.step((env.reset(options={"task": YES}), "break")[1])
    assert env.trajectory.reward is None
    if name == "Breaks":
        env.reset(options={"task": YES})
        assert env.step("yes")[1] == 1.0


def test_the_environment_is_closed_once_by_close_by_reset_and_by_being_forgotten():
    closed = load_env(f"{GAMES}:Echo").closed
    env = game(env_kwargs={"name": "counted"})
    env.close()
    env.reset()
    env.reset()
    assert closed.count("counted") == 1
    env.close()
    env.close()
    assert closed.count("counted") == 2
    env.reset()
    del env
    gc.collect()
    wait_until(lambda: closed.count("counted") == 3)


def test_an_interrupted_call_ends_the_episode_and_reset_continues(monkeypatch):
    cls = load_env(f"{GAMES}:Hangs")
    env = game("Hangs", env_kwargs={"name": "interrupted"})
    env.reset(options={"task": YES})

    def interrupted(future, timeout=None):
        assert cls.begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.step("a")
    monkeypatch.undo()
    wait_until(lambda: env._episode.over)
    assert cls.closed.count("interrupted") == 1
    with pytest.raises(ContractError, match="is over"):
        env.step("a")
    assert env.reset(options={"task": YES})[0] == "Say yes."


def test_max_episode_steps_truncates_and_the_environment_has_its_last_word():
    env = game("LastWord", max_episode_steps=2)
    env.reset(options={"task": YES})
    assert env.step("a")[1:4] == (0.0, False, False)
    observation, reward, terminated, truncated, info = env.step("b")
    assert (reward, terminated, truncated) == (0.5, False, True)
    assert (info["late"], info["score"], info["stop_reason"]) == ("yes", 0.5, "max_turns")
    assert observation.startswith("I heard 'b'")


def test_max_length_truncates_and_cuts_what_is_longer():
    env = game(max_length=60)
    env.reset(options={"task": YES})
    *_, truncated, info = env.step("b" * 100)
    assert truncated is True
    assert info["stop_reason"] == "max_length"
    assert len(env.trajectory.turns[0].action) < 60


def test_render_shows_the_episode_and_human_writes_it_as_it_goes(capsys):
    env = game(render_mode="ansi")
    env.reset(options={"task": YES})
    env.step("maybe")
    shown = env.render()
    assert shown.startswith("[yes]\nuser: Say yes.\nassistant: maybe\n(reward 0, score 0)\nuser: I heard 'maybe'")
    assert capsys.readouterr().out == ""
    human = game(render_mode="human")
    human.reset(options={"task": YES})
    human.step("maybe")
    human.step("yes")
    assert human.render() is None
    written = capsys.readouterr().out
    assert written.startswith("[yes]\nuser: Say yes.\nassistant: maybe\n")
    assert written.endswith("assistant: yes\n(reward 1, score 0.75)\n[terminated]\n")
    assert written.count("Say yes.") == 1


def test_rendering_without_a_mode_says_how_to_get_one():
    env = game()
    env.reset()
    with pytest.warns(UserWarning, match="render_mode='ansi'"):
        assert env.render() is None


def test_an_environment_that_steps_another_raises_instead_of_waiting_forever():
    env = game()

    async def inside():
        env.reset()

    with pytest.raises(ContractError, match="background loop"):
        run_sync(inside())


def test_tools_are_offered_in_text_and_their_calls_are_read():
    env = game("Tools")
    observation, info = env.reset(options={"task": YES})
    assert '"name": "add"' in observation
    assert observation.endswith("Say yes.")
    assert "<tool_call>" in info["tools"]
    said, reward, *_ = env.step('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>')
    assert (said, reward) == ("Tool: [('add', {'a': 1, 'b': 2})]", 1.0)
    assert env.step("no call")[0] == "Tool: []"


def test_token_actions_may_be_arrays_or_completions_whose_logprobs_are_kept():
    tokenizer = CharTokenizer()
    env = game(obs_mode="tokens", tokenizer=tokenizer)
    env.reset(options={"task": YES})
    env.step(np.array([*tokenizer.encode("a"), 0]))
    env.step(Completion((*tokenizer.encode("yes"), 0), logprobs=(-0.5, -0.25, -0.125, -1.0)))
    assert env.trajectory.logprobs.tolist()[-4:] == [-0.5, -0.25, -0.125, -1.0]
    assert env.trajectory.terminated
    env.reset()
    for action in ("text", [], [0.5], None):
        with pytest.raises(ContractError, match="expected token ids"):
            env.step(action)


async def test_async_code_has_no_need_of_the_thread():
    maker = EpisodeMaker(GymConfig(env=f"{GAMES}:Echo"))
    async with maker.episode(maker.draw(np.random.default_rng(0), "yes")) as episode:
        assert await maker.begin(episode) == ("Say yes.", {"task_id": "yes"})
        assert (await maker.act(episode, "yes"))[1:4] == (1.0, True, False)
