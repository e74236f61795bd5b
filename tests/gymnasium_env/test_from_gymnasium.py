"""from_gymnasium: any environment in words, its actions from answers, and whose an error is."""

import copy
import math
import pickle
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from agentenv.chat.chat import Chat
from agentenv.core.types import Limits, SamplingParams, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.registry import load_env
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, ContractError, EpisodeFailed, MissingDependency
from agentenv.gym.from_gymnasium import FromGymnasium, from_gymnasium
from agentenv.gym.parsing import Illegal, names_of, read_action
from agentenv.gym.rendering import describe, mask_text, plain
from agentenv.gym.spaces import AnyText, Messages
from agentenv.runs.config import RunConfig
from agentenv.runs.prepare import load_source, load_tasks
from agentenv.testing.tokenizers import CharTokenizer

PROMPT = [{"role": "user", "content": "Play."}]
MOVES = ["left", "down", "right", "up"]
LAKE = {"make_kwargs": {"is_slippery": False}, "actions": MOVES, "score": (0.0, 1.0)}
Lake = from_gymnasium("FrozenLake-v1", **LAKE)


class Odd(gymnasium.Env):
    """An environment of these spaces that answers what it is told to."""

    def __init__(self, action_space=None, observation_space=None, observation=0, step=None, fails=None):
        self.action_space = action_space or spaces.Discrete(3)
        self.observation_space = observation_space or spaces.Discrete(5)
        self.observation, self.values, self.fails = observation, step, fails
        self.seeds, self.actions, self.options, self.num_closed = [], [], [], 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fails == "reset":
            raise ZeroDivisionError("made of nothing")
        self.seeds.append(seed)
        self.options.append(options)
        return self.observation, {"action_mask": np.array([1, 0, 1], dtype=np.int8)}

    def step(self, action):
        self.actions.append(action)
        if self.fails == "step":
            raise KeyError("lost")
        return self.values if self.values is not None else (self.observation, 1.0, False, False, {"x": np.float32(2)})

    def close(self):
        self.num_closed += 1


def odd(**options):
    """The class, and the environment that its instances have."""
    made, kwargs = [], options.pop("kwargs", {})

    def make():
        made.append(Odd(**options))
        return made[-1]

    return from_gymnasium(make, **kwargs), made


def begun(cls, *args, seed=3, metadata=None, **kwargs):
    env = cls(*args, **kwargs)
    states = env.reset({"observation": PROMPT, "seed": seed, "metadata": metadata or {}})
    return env, states["observation"][-1]["content"]


def said(result):
    return result.observation and result.observation[-1]["content"]


async def played(cls, *actions, task=None, max_turns=16, **kwargs):
    tokenizer = CharTokenizer()
    return await EnvSource(cls, kwargs).run(
        task or Task(PROMPT, task_id="t"),
        EpisodeSetup(
            engine=ScriptedEngine(list(actions), tokenizer),
            chat=Chat(tokenizer),
            sampling=SamplingParams(),
            limits=Limits(max_length=50_000, max_turns=max_turns),
        ),
        EpisodeKey("t/0", "t", seed=7),
    )


# --- an episode -------------------------------------------------------------------------------------------------------


async def test_an_episode_of_the_loop_goes_to_the_goal_with_the_environments_rewards():
    episode = await played(Lake, "I go down.", "down", "2, no: right", "down", "down or right: right", "RIGHT")
    assert episode.stop_reason is StopReason.TERMINATED
    assert [turn.result.reward for turn in episode.turns] == [0, 0, 0, 0, 0, 1]
    assert (episode.reward, episode.score) == (1.0, 1.0)
    assert episode.turns[-1].result.info == {"prob": 1.0, "steps": 6.0, "illegal": 0.0, "total_reward": 1.0}
    assert "[S]FFF" in episode.prompt[-1]["content"]
    assert "Actions: left, down, right, up." in episode.prompt[-1]["content"]
    assert said(episode.turns[0].result).startswith("  (Down)\nSFFF\n[F]HFH")


async def test_the_time_limit_of_an_environment_truncates():
    episode = await played(Lake, "left", max_steps=3)
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.TRUNCATED_BY_ENV, 3)


def test_the_task_seeds_the_environment_and_its_options_reach_it():
    cls, made = odd()
    begun(cls, seed=11, metadata={"options": {"level": 2}})
    assert (made[0].seeds, made[0].options) == ([11], [{"level": 2}])
    states = np.random.get_state()[1].copy()
    begun(Lake, seed=1)
    assert (np.random.get_state()[1] == states).all()


def test_rewards_are_floats_and_numbers_of_the_info_are_metrics():
    cls, _ = odd(
        step=(0, np.float32(0.5), np.bool_(False), False, {"a": np.int64(3), "t": "x", "l": [1], "n": math.nan})
    )
    result = begun(cls)[0].step({"action_text": "1"})
    assert type(result.reward) is float
    assert result.reward == 0.5
    assert result.info == {"a": 3.0, "t": "x", "steps": 1.0, "illegal": 0.0, "total_reward": 0.5}


@pytest.mark.parametrize(
    ("info", "score"),
    [({"is_success": True}, 1.0), ({"score": 0.25}, 0.25), ({"score": 7}, None), ({"success": np.array([1, 0])}, None)],
)
def test_without_a_rule_the_score_is_what_the_info_says(info, score):
    cls, _ = odd(step=(0, 0.0, False, False, info))
    assert begun(cls)[0].step({"action_text": "1"}).score == score


class Talk(gymnasium.Env):
    """Goes on writing into its one list of messages, which it gives every time."""

    observation_space, action_space = Messages(), AnyText()

    def reset(self, *, seed=None, options=None):
        self.talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        return self.talk, {}

    def step(self, action):
        self.talk += [{"role": "assistant", "content": action}, {"role": "user", "content": f"more than {action}"}]
        return self.talk, 0.0, False, False, {}


def test_messages_are_the_prompt_and_only_new_ones_of_a_growing_list_are_added():
    env = from_gymnasium(Talk)()
    assert env.reset({"observation": PROMPT, "seed": 1})["observation"] == [
        {"role": "system", "content": "S"}, {"role": "user", "content": "U"},
    ]  # fmt: skip
    told = [env.step({"action_text": text}).observation for text in (" a ", "b")]
    assert told == [[{"role": "user", "content": f"more than {text}"}] for text in (" a ", "b")]


# --- scores of games that did not end ---------------------------------------------------------------------------------


CLIFF = {"actions": ["up", "right", "down", "left"], "score": (-100.0, -13.0)}


async def test_a_game_that_was_given_up_by_illegal_answers_has_no_score_however_little_it_had_cost():
    episode = await played(from_gymnasium("CliffWalking-v1", **CLIFF), "No idea.")
    assert (episode.stop_reason, len(episode.turns)) == (StopReason.TERMINATED, 3)
    assert (episode.reward, episode.score) == (-3.0, 0.0)


async def test_a_game_that_a_limit_cut_has_no_score_of_the_rewards_so_far():
    cls = from_gymnasium("CliffWalking-v1", **CLIFF)
    cut = await played(cls, "up", max_turns=2)
    assert (cut.stop_reason, cut.reward, cut.score) == (StopReason.MAX_TURNS, -2.0, 0.0)
    won = await played(cls, "up", *["right"] * 11, "down")
    assert (won.reward, won.score) == (-13.0, 1.0)


def test_a_game_that_gymnasium_truncates_is_scored_by_its_rewards():
    env, _ = begun(from_gymnasium("CliffWalking-v1", **(CLIFF | {"score": (-4.0, 0.0)})), max_steps=2)
    scores = [env.step({"action_text": "up"}).score for _ in range(2)]
    assert scores == [0.0, 0.5]


@pytest.mark.parametrize("score", [lambda moment: 1.0, None])
def test_giving_up_costs_the_score_by_any_rule_that_has_one(score):
    cls, _ = odd(kwargs={"score": score}, step=(0, 1.0, False, False, {"is_success": True}))
    env, _ = begun(cls, max_invalid=2)
    scores = [env.step({"action_text": text}).score for text in ("1", "none", "none")]
    assert scores == [1.0, 1.0, 0.0]
    without, _ = begun(odd(kwargs={"score": lambda moment: None})[0], max_invalid=1)
    assert without.step({"action_text": "none"}).score is None


# --- illegal actions --------------------------------------------------------------------------------------------------


def test_an_illegal_action_is_never_played_costs_what_is_set_and_says_what_is_legal():
    cls, made = odd(kwargs={"actions": ["rock", "paper", "scissors"], "score": lambda moment: 0.5})
    env, _ = begun(cls, max_invalid=2, invalid_reward=-0.25)
    first, second = (env.step({"action_text": text}) for text in ("lizard", ""))
    assert made[0].actions == []
    assert (first.reward, first.score, first.terminated, first.info["illegal"]) == (-0.25, 0.5, False, 1.0)
    for part in (
        '"lizard"',
        "rock, paper, scissors",
        "Possible now: rock, scissors.",
        "1 more answer without one ends",
    ):
        assert part in said(first)
    assert (second.reward, second.terminated, second.observation) == (-0.25, True, "")


def test_a_mask_is_reported():
    cls, made = odd()
    env, prompt = begun(cls)
    assert "Possible now: 0, 2." in prompt
    env.step({"action_text": "1"})
    assert made[0].actions == [1]
    assert mask_text({"action_mask": [1, 1]}, spaces.Discrete(2), {}) == ""


def test_in_tags_only_what_the_last_tag_holds_counts():
    read = partial(read_action, space=spaces.Discrete(4), names=names_of(MOVES, spaces.Discrete(4)), form="tags")
    assert read("<action>up</action> left") == 3
    assert read("<action>left</action><action> Down </action>") == 1
    assert isinstance(read("up"), Illegal)
    assert isinstance(read("<action>go up</action>"), Illegal)
    env, prompt = begun(Lake, form="tags")
    assert "<action>" in prompt
    assert env.step({"action_text": "down"}).info["illegal"] == 1.0


BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
NESTED = spaces.Dict({"go": spaces.Discrete(3), "at": BOX})


@pytest.mark.parametrize(
    ("text", "space", "action"),
    [
        ("first 1 then 2", spaces.Discrete(3), 2),
        ("-1", spaces.Discrete(3, start=-1), -1),
        ("<think>2</think> 1", spaces.Discrete(3), 1),
        ("3", spaces.Discrete(3), None),
        ("1.5", spaces.Discrete(3), None),
        ("x1", spaces.Discrete(3), None),
        ("<think>1", spaces.Discrete(3), None),
        ("9" * 5000, spaces.Discrete(3), None),
        ("[1, 1] or [0.5, -1e-1]", BOX, [0.5, -0.1]),
        ("[0.5, 2]", BOX, None),
        ("0.5", BOX, None),
        ("1 2", spaces.MultiDiscrete([2, 3]), [1, 2]),
        ("1.5 2", spaces.MultiDiscrete([2, 3]), None),
        ("[2, 0]", spaces.MultiDiscrete([2, 3]), None),
        ("0,1,1", spaces.MultiBinary(3), [0, 1, 1]),
        ("300", spaces.Box(0, 255, (1,), np.uint8), None),
        ("é漢 ", AnyText(), "é漢 "),
        ("abcdef", spaces.Text(3), None),
    ],
)  # fmt: skip
def test_actions_are_read_of_every_space_or_are_illegal(text, space, action):
    read = read_action(text, space)
    assert (
        isinstance(read, Illegal) if action is None else np.allclose(read, action) if action != text else read == text
    )
    assert isinstance(read, Illegal) or space.contains(read)


def test_a_thought_that_did_not_end_says_no_action_however_long_it_is_or_where_it_began():
    for text in ("<think>" + "or 1 " * 9000, "<think>" + "x" * 30_000 + "<action>1</action>"):
        assert isinstance(read_action(text, spaces.Discrete(3)), Illegal)
        assert isinstance(read_action(text, AnyText(), form="tags"), Illegal)
    cls, made = odd()
    env, _ = begun(cls)
    for text in ("I could say 1", "1 or 2? </think> 0"):
        env.step({"action_text": text, "observation_text": "assistant\n<think>\n"})
    assert made[0].actions == [0]


def test_actions_of_several_parts_need_a_parse():
    cls, _ = odd(action_space=NESTED)
    with pytest.raises(ConfigError, match=r"expected actions that can be read from text, got Dict.*Pass `parse`"):
        begun(cls)


def test_if_actions_have_names_a_number_in_prose_is_not_an_action():
    read = partial(read_action, space=spaces.Discrete(4), names=names_of(MOVES, spaces.Discrete(4)))
    assert isinstance(read("The answer is 1"), Illegal)
    assert (read("1"), read("upward, up")) == (1, 3)


@given(st.text(max_size=60), st.sampled_from([spaces.Discrete(4), BOX, spaces.MultiDiscrete([3, 3])]))
def test_any_text_is_an_action_of_the_space_or_illegal(text, space):
    read = read_action(text, space)
    assert isinstance(read, Illegal) or space.contains(read)


# --- words ------------------------------------------------------------------------------------------------------------


def test_observations_become_words():
    space = spaces.Dict(
        {"pos": spaces.Box(-9, 9, (2,), np.float32), "card": spaces.Discrete(9), "note": spaces.Text(9)}
    )
    value = {"pos": np.array([0.12345678, -2], np.float32), "card": np.int64(4), "note": "hi"}
    assert describe(value, space).splitlines() == ["card: 4", "note: hi", "pos: [0.1235, -2]"]
    assert describe((1, 2), spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3)))) == "1, 2"
    assert plain("\n\x1b[41mS\x1b[0mF\x1b[34;1mB\x1b[0m\x1b]0;title\x07") == "[S]FB"


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (
            spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
            spaces.GraphInstance(np.zeros((2, 2), np.float32), np.array([1]), np.array([[0, 1]])),
        ),
        (spaces.Box(0, 1, (2,)), [[1.0], [1.0, 2.0]]),
        (spaces.Box(0, 255, (64, 64, 3), np.uint8), np.zeros((64, 64, 3), np.uint8)),
    ],
)
def test_observations_without_words_need_a_render(space, observation):
    with pytest.raises(ConfigError, match=r"expected an observation of .*, got .*Pass `render`"):
        describe(observation, space)


def test_own_render_parse_rules_and_gold_are_used():
    cls, made = odd(
        kwargs={
            "render": lambda moment: f"step {moment.num_steps}",
            "parse": lambda text, space: 2 if "two" in text else Illegal("Say two."),
            "rules": lambda moment: "Be kind.",
            "gold": lambda moment: "two",
        }
    )
    env, prompt = begun(cls)
    assert prompt == "Play.\nBe kind.\nstep 0\nPossible now: 0, 2."
    assert "Say two." in said(env.step({"action_text": "1"}))
    assert env.gold({}) == "two"
    assert said(env.step({"action_text": "two"})) == "step 1"
    assert made[0].actions == [2]


# --- errors, threads, copies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "match"),
    [
        ((0, 1.0, True, {}), r"make.step: expected \(observation, reward, terminated, truncated, info\)"),
        ((0, math.nan, True, False, {}), "reward: expected a finite number, got nan"),
        ((0, "1", True, False, {}), "reward: expected a finite number, got '1'"),
        ((0, 1.0, "False", False, {}), "make.step: terminated: expected True or False, got 'False'"),
        ((0, 1.0, False, "False", {}), "truncated: expected True or False, got 'False'"),
        *(
            ((0, 1.0, flag, False, {}), "terminated: expected True or False, got")
            for flag in (None, 2, math.nan, [True], np.array([True, False]))
        ),
    ],
)
def test_an_invalid_result_of_step_is_named(step, match):
    cls, _ = odd(step=step)
    with pytest.raises(ContractError, match=match):
        begun(cls)[0].step({"action_text": "1"})


@pytest.mark.parametrize("kind", [bool, np.bool_, np.array, int, lambda flag: np.array([flag]), torch.tensor])
@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False), (True, True)])
def test_flags_of_step_may_be_of_any_kind_that_is_one_truth(kind, flags):
    cls, _ = odd(step=(0, 1.0, *map(kind, flags), {}))
    result = begun(cls)[0].step({"action_text": "1"})
    terminated, truncated = flags
    assert (result.terminated, result.truncated) == (terminated, truncated and not terminated)


async def test_an_exception_of_a_foreign_environment_names_it_and_it_is_closed():
    for fails, where in (
        ("reset", r"make.reset: .* ZeroDivisionError: made of nothing"),
        ("step", "make.step.1.: .*KeyError"),
    ):
        cls, made = odd(fails=fails)
        episode = await played(cls, "1")
        assert (episode.error.kind, episode.error.type, made[0].num_closed) == ("env", "EpisodeFailed", 1)
        assert __file__ in episode.error.place
        with pytest.raises(EpisodeFailed, match=where):
            raise EpisodeFailed(episode.error.message)


def test_an_unregistered_id_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match=r"FrozenLak-v1: expected a registered Gymnasium environment.*FrozenLake"):
        from_gymnasium("FrozenLak-v1")()
    with pytest.raises(ConfigError, match=r"expected its own arguments, got .*'depth': 3"):
        begun(Lake, make_kwargs={"depth": 3})


def test_a_missing_package_is_named_with_gymnasiums_hint(monkeypatch):
    def creator(**kwargs):
        raise gymnasium.error.DependencyNotInstalled('Box2D is not installed, run `pip install "gymnasium[box2d]"`')

    monkeypatch.setitem(gymnasium.registry, "Needs-v0", gymnasium.envs.registration.EnvSpec("Needs-v0", creator))
    with pytest.raises(MissingDependency, match=r'Needs-v0: .*pip install "gymnasium\[box2d\]"'):
        begun(from_gymnasium("Needs-v0"))


@pytest.mark.parametrize(
    "arguments", [{"render": "rgb"}, {"parse": 1}, {"score": (1.0, 0.0)}, {"rules": 3}, {"gold": "up"}]
)
def test_arguments_that_cannot_be_used_are_refused(arguments):
    with pytest.raises(ConfigError, match=f"from_gymnasium.{next(iter(arguments))}: expected"):
        from_gymnasium("FrozenLake-v1", **arguments)
    for name, value in (("max_invalid", 0), ("max_steps", 1.5), ("invalid_reward", 10**400), ("form", "xml")):
        with pytest.raises(ConfigError, match=f"{name}: expected"):
            Lake(**{name: value})


def test_close_closes_once_and_also_what_is_made_after_it():
    cls, made = odd()
    env, _ = begun(cls)
    env.close()
    env.close()
    late = cls()
    late.close()  # the episode was given up while its reset was on the way in a thread
    with pytest.raises((AttributeError, EpisodeFailed)):
        late.reset({"observation": PROMPT, "seed": 1})
    assert [one.num_closed for one in made] == [1, 1]


def test_classes_and_instances_survive_pickle_and_deepcopy():
    assert pickle.loads(pickle.dumps(FromGymnasium)) is FromGymnasium
    again = pickle.loads(pickle.dumps(Lake))
    assert (again.__name__, again.game) == (Lake.__name__, Lake.game)
    env, _ = begun(Lake)
    twin = copy.deepcopy(env)
    env.step({"action_text": "down"})
    assert twin.step({"action_text": "right"}).info["steps"] == 1.0
    assert pickle.loads(pickle.dumps(Lake(max_invalid=7))).max_invalid == 7


def test_a_file_names_it(tmp_path):
    path = tmp_path / "lake.py"
    path.write_text(
        "from agentenv.gym.from_gymnasium import from_gymnasium\n"
        "Lake = from_gymnasium('FrozenLake-v1', actions='abcd')\n"
    )
    assert load_env(f"{path}:Lake") is load_env(str(path))
    assert "Actions: a, b, c, d." in begun(load_env(str(path)))[1]
    config = RunConfig.from_flags(env=str(path))
    assert [task.seed for task in load_tasks(config, load_source(config))] == list(range(100))
    with pytest.raises(ConfigError, match="expected a class that from_gymnasium made"):
        FromGymnasium()


@pytest.mark.parametrize("names", [["left"], ["left", "LEFT", "right", "up"], {"left": 0, "jump": 9}, [*MOVES, "jump"]])
def test_a_list_of_names_that_has_not_one_for_each_action_is_refused(names):
    with pytest.raises(ConfigError, match=r"actions: expected .*of Discrete\(4\), got"):
        names_of(names, spaces.Discrete(4))
    assert names_of({"left": 0, "west": 0}, spaces.Discrete(4)) == {"left": 0, "west": 0}  # a mapping may name some
    if names == ["left"]:
        with pytest.raises(ConfigError, match=r"got 1 .*\{\"left\": 0\}"):
            names_of(names, spaces.Discrete(4))


@pytest.mark.parametrize(
    ("name", "rule", "match"),
    [
        ("render", lambda moment: 7, "make: render: expected a text, got 7"),
        ("rules", lambda moment: ["a"], r"make: rules: expected a text, got \['a'\]"),
        ("gold", lambda moment: object(), r"gold: expected an action of Discrete\(3\), a text or None, got <object"),
        ("gold", lambda moment: moment.nothing, "make: gold: .*AttributeError.*nothing"),
        ("parse", lambda text, space: "left", r"make: parse: expected an action of Discrete\(3\), got 'left'"),
        ("parse", lambda text, space: None, r"make: parse: expected an action of Discrete\(3\), got None"),
        ("score", lambda moment: "high", r"make: score: expected a number in \[0, 1\], got 'high'"),
        ("score", lambda moment: moment.nothing, "make: score: .*AttributeError.*nothing"),
    ],
)
def test_an_invalid_result_or_exception_of_a_rule_is_named_with_the_rule(name, rule, match):
    cls, _ = odd(kwargs={name: rule})

    def play():
        env, _ = begun(cls)
        env.gold({})
        env.step({"action_text": "1"})

    with pytest.raises((ContractError, EpisodeFailed), match=match) as caught:
        play()
    assert ".." not in str(caught.value)


def test_the_registered_step_limit_sets_the_turns_of_an_episode():
    assert from_gymnasium("CartPole-v1").max_turns == 502
    assert from_gymnasium(lambda **kwargs: None).max_turns is None
