"""rm_chat: conversations that a reward model scores; what it is shown, what fails, and who closes it."""

import asyncio
import gc
import json
import logging
import threading
import time
from pathlib import Path

import pytest

from agentenv._util.http.client import AttemptFailure
from agentenv.chat.chat import PromptText
from agentenv.cli.main import main
from agentenv.core.types import StopReason, Task
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.episode.runner import EpisodeRunner, ErrorPolicy, plan
from agentenv.episode.source import EnvSource
from agentenv.errors import ConfigError, DataError, InfraError, MissingDependency, RunStopped
from agentenv.interop.agent_files import load_agent_func
from agentenv.rewards.judges.asking import JudgeRetry
from agentenv.rewards.judges.protocol import JudgeMisaddressed, JudgeUsage, Price
from agentenv.rewards.models import request_queue as _asking
from agentenv.rewards.models.reward import ModelReward
from agentenv.rewards.models.types import Scored
from agentenv.rewards.types import RewardResult
from agentenv.rewards.workers.threads import Threads
from agentenv.runs.records.directory import read_trajectories
from agentenv.testing.clock import run_virtual
from agentenv_envs.rm_chat import RMChat
from agentenv_envs.rm_chat.env import END
from agentenv_envs.rm_chat.shared import CLOSE_LIMIT_S, Shared, closable
from tests.envs.scripted import play, scripted
from tests.rewards.judges.rule_judges import ScriptedJudge

ROOT = Path(__file__).parents[2]
ENV = "agentenv_envs.rm_chat:RMChat"
DATA = RMChat.datasets["rm_chat_prompts"]
QUESTION = [{"role": "user", "content": "Hi?"}]
TEXT = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"


class Asked:
    """A scorer that notes what it is shown; its value is the length of the last message."""

    def __init__(self, *failures, value=len):
        self.asked, self.failures, self.value = [], list(failures), value

    async def score(self, conversation):
        self.asked.append(conversation)
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        return Scored(float(self.value(conversation[-1]["content"])), 7, "cut" in conversation[-1]["content"])

    async def close(self):
        raise AssertionError("it is the caller's")


class Talk:
    """One conversation with an environment, without a loop around it."""

    def __init__(self, env, prompt=QUESTION, label=None, **columns):
        self.env, self.row = env, {"label": label, "metadata": columns}
        self.prompt = prompt

    async def open(self):
        """What the policy is shown."""
        return (await self.env.reset({"observation": self.prompt, **self.row}))["observation"]

    async def say(self, action, *, finish_reason="stop", before=""):
        """The reply to an answer."""
        states = {"action_text": action, "observation_text": before, "finish_reason": finish_reason, **self.row}
        return await self.env.step(states)


async def talked(env, *actions, prompt=QUESTION, label=None, **columns):
    """The replies to these answers."""
    talk = Talk(env, prompt, label, **columns)
    await talk.open()
    return [await talk.say(action) for action in actions]


def roles(conversation):
    return [message["role"] for message in conversation]


def contents(conversation):
    return [message["content"] for message in conversation]


async def episodes(env, *actions, task=None, tokenizer=None, max_retries=1, **limits):
    """The runner's records of one task."""
    runner = EpisodeRunner(
        EnvSource(RMChat, env),
        scripted(actions, tokenizer, **limits),
        policy=ErrorPolicy(max_retries=max_retries, retry_wait_s=0.0, max_error_share=1.0),
    )
    ended = []
    await runner.run(plan([task or Task(QUESTION, None, "t")], num_samples=1), ended.append)
    return ended


# --- what the reward model is shown ---------------------------------------------------------------------------------


async def test_nemo_rl_854_and_682_the_reward_model_sees_raw_messages_and_the_policy_its_chat_template():
    """There the policy's rendering was one user message, rendered again, and what the user says was bare text."""
    scorer, tokenizer = Asked(), load_tokenizer(resolve_model("tiny-math"))
    task = Task([{"role": "system", "content": "Be kind."}, *QUESTION], None, "t", metadata={"user_turns": ["And?"]})
    (trajectory,) = await episodes({"reward": ModelReward(scorer)}, "Yes.", "No.", task=task, tokenizer=tokenizer)
    text = tokenizer.decode(trajectory.segments[0].token_ids)
    assert "Yes.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nNo." in text
    assert [contents(each) for each in scorer.asked] == [
        ["Be kind.", "Hi?", "Yes."], ["Be kind.", "Hi?", "Yes.", "And?", "No."],
    ]  # fmt: skip
    assert roles(scorer.asked[1]) == ["system", "user", "assistant", "user", "assistant"]
    assert "<|im_" not in repr(scorer.asked)


@pytest.mark.parametrize("prompt", [TEXT, [{"role": "user", "content": TEXT}], f"  {TEXT}", "<s>[INST] Hi? [/INST]",
                                    "<｜begin▁of▁sentence｜><｜User｜>Hi?", "<start_of_turn>user\nHi?"])  # fmt: skip
async def test_nemo_rl_854_a_prompt_that_a_template_made_is_refused_before_anything_is_generated(prompt):
    with pytest.raises(DataError, match=r"chat template's text.*raw messages"):
        await Talk(RMChat(ModelReward(Asked())), prompt).open()


@pytest.mark.parametrize("prompt", ["Hi?", [{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}],
                                    PromptText(TEXT, QUESTION), QUESTION])  # fmt: skip
async def test_text_is_what_a_user_says_and_a_rendering_with_its_messages_is_those(prompt):
    scorer = Asked()
    talk = Talk(RMChat(ModelReward(scorer)), prompt)
    assert await talk.open() == QUESTION
    await talk.say("Yes.")
    assert scorer.asked == [[*QUESTION, {"role": "assistant", "content": "Yes."}]]


@pytest.mark.parametrize("as_text", [False, True])
async def test_in_openrlhf_a_label_may_hold_the_raw_messages_of_a_rendered_prompt_and_the_script(as_text):
    scorer, label = Asked(), {"messages": QUESTION, "user_turns": ["And?"], "label": "the reference"}
    talk = Talk(RMChat(ModelReward(scorer)), TEXT, json.dumps(label) if as_text else label)
    assert await talk.open() == TEXT
    assert (await talk.say("Yes.")).observation == [{"role": "user", "content": "And?"}]
    assert contents(scorer.asked[0]) == ["Hi?", "Yes."]


async def test_the_label_inside_of_a_label_is_the_references_and_other_objects_are_labels_themselves():
    noted = Noting()
    await talked(RMChat(noted), "Yes.", label={"user_turns": [], "label": "ref"})
    await talked(RMChat(noted), "Yes.", label={"answer": 3})
    await talked(RMChat(noted), "Yes.", label={"messages": 3}, user_turns=[])
    assert [response.label for response in noted.seen] == ["ref", {"answer": 3}, {"messages": 3}]
    assert noted.seen[0].metadata["user_turns"] == []


class Noting:
    """A reward that notes what it is asked."""

    bounds = (0.0, 1.0)

    def __init__(self):
        self.seen = []

    async def grade(self, response):
        self.seen.append(response)
        return RewardResult(0.5)


async def test_earlier_answers_are_shown_without_their_thinking_unless_all_is_asked_for():
    thought, unended = "<think>hm</think>Yes.<|im_end|>", "<think>for ever"
    for part, kept in (("final", ["Hi?", "Yes.", "a", "", "b", "Z"]), ("all", None)):
        scorer = Asked()
        await talked(RMChat(ModelReward(scorer), part=part), thought, unended, "Z", user_turns=["a", "b"])
        assert contents(scorer.asked[-1]) == (kept or ["Hi?", "<think>hm</think>Yes.", "a", unended, "b", "Z"])


async def test_a_thought_that_the_template_began_is_not_part_of_the_answer():
    scorer = Asked()
    talk = Talk(RMChat(ModelReward(scorer)), user_turns=["a"])
    await talk.open()
    result = await talk.say("hm</think>Yes.", before="…<think>\n")
    assert contents(scorer.asked[0])[-1] == "Yes."
    assert result.info["rm/length_chars"] == 4.0
    cut = await talk.say("still thinking", before="…<think>\n")
    assert (cut.info["rm/no_answer"], cut.info["rm/status"]) == (1.0, "no_answer")


async def test_a_system_message_is_put_before_conversations_that_have_none():
    for prompt, first in ((QUESTION, "Be brief."), ([{"role": "system", "content": "Own."}, *QUESTION], "Own.")):
        scorer = Asked()
        talk = Talk(RMChat(ModelReward(scorer), system="Be brief."), prompt)
        assert contents(await talk.open())[0] == first
        await talk.say("x")
        assert contents(scorer.asked[0])[0] == first
    talk = Talk(RMChat(ModelReward(scorer := Asked()), system="Be brief."), TEXT, messages=QUESTION)
    assert await talk.open() == TEXT
    await talk.say("x")
    assert contents(scorer.asked[0]) == ["Hi?", "x"]  # what the policy is not shown, the reward model is not either


@pytest.mark.parametrize(
    ("prompt", "columns", "said"),
    [
        ([{"role": "assistant", "content": "Hi"}], {}, "roles in order"),
        ([*QUESTION, {"role": "assistant", "content": "Hi"}], {}, "'assistant' after 'assistant'"),
        ([{"role": "environment", "content": "Hi"}], {}, "role: expected one of"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "content: expected text"),
        (TEXT, {"messages": "Hi?"}, "messages: expected messages"),
        (QUESTION, {"user_turns": "And?"}, "user_turns: expected a list of texts"),
        (QUESTION, {"user_turns": ["And?", " "]}, "user_turns: expected a list of texts"),
    ],
)
async def test_rows_that_cannot_be_scored_are_refused_at_the_reset(prompt, columns, said):
    with pytest.raises(DataError, match=said):
        await Talk(RMChat(ModelReward(Asked())), prompt, **columns).open()


# --- the conversation -----------------------------------------------------------------------------------------------


async def test_a_script_is_played_to_its_end_and_a_row_without_one_is_a_single_turn():
    first, second = await talked(RMChat(ModelReward(Asked())), "a", "bb", user_turns=["And?"])
    assert (first.observation, first.done, first.reward) == ([{"role": "user", "content": "And?"}], False, 1.0)
    assert (second.observation, second.terminated, second.reward) == ("", True, 2.0)
    (only,) = await talked(RMChat(ModelReward(Asked())), "a")
    assert (only.terminated, only.truncated) == (True, False)


async def test_max_turns_and_a_cut_answer_end_it():
    replies = await talked(RMChat(ModelReward(Asked()), max_turns=2), "a", "b", user_turns=["1", "2", "3"])
    assert [reply.terminated for reply in replies] == [False, True]
    talk = Talk(RMChat(ModelReward(Asked())), user_turns=["1"])
    await talk.open()
    cut = await talk.say("abc", finish_reason="length")
    assert (cut.truncated, cut.terminated, cut.reward, cut.observation, cut.info["cut"]) == (True, False, 3.0, "", 1.0)


@pytest.mark.parametrize(
    ("when", "rewards", "num_asked"),
    [("each", [3.0, 1.0, 6.0], 3), ("gain", [3.0, -2.0, 5.0], 3), ("end", [0, 0, 6], 1)],
)
async def test_when_a_conversation_is_paid(when, rewards, num_asked):
    scorer = Asked()
    replies = await talked(RMChat(ModelReward(scorer), when=when), "abc", "d", "efghij", user_turns=["1", "2"])
    assert [reply.reward for reply in replies] == rewards
    assert len(scorer.asked) == num_asked
    assert contents(scorer.asked[-1]) == ["Hi?", "abc", "1", "d", "2", "efghij"]
    if when == "gain":
        assert sum(rewards) == 6.0


@pytest.mark.parametrize("limits", [{"max_turns": 2}, {"max_length": 60}])
@pytest.mark.parametrize("when", ["each", "gain", "end"])
async def test_a_conversation_that_a_limit_of_the_run_ends_is_paid_once(when, limits):
    scorer = Asked()
    task = Task(QUESTION, None, "t", metadata={"user_turns": ["1", "2" * 60, "3"]})
    (trajectory,) = await episodes({"reward": ModelReward(scorer), "when": when}, "ab", "cde", "f", task=task, **limits)
    assert trajectory.stop_reason in (StopReason.MAX_TURNS, StopReason.MAX_LENGTH)
    assert contents(scorer.asked[-1]) == ["Hi?", "ab", "1", "cde"]
    assert (trajectory.reward, len(scorer.asked)) == {"each": (5.0, 2), "gain": (3.0, 2), "end": (3.0, 1)}[when]
    assert trajectory.turns[-1].result.info["rm/value"] == 3.0


# --- figures --------------------------------------------------------------------------------------------------------


async def test_info_has_the_same_names_for_every_reward():
    (reply,) = await talked(RMChat(ModelReward(Asked())), "<think>hm</think>two wörds, cut")
    assert reply.info == {
        "turns": 1.0, "cut": 0.0, "rm/length_chars": 14.0, "rm/length_words": 3.0, "rm/reward": 14.0, "rm/value": 14.0,
        "rm/truncated": 1.0, "rm/clipped": 0.0, "rm/no_answer": 0.0, "rm/status": "ok", "rm/num_retried": 0.0,
    }  # fmt: skip
    spec = {"sum": {"rm": {"model": {"scorer": Asked(), "clip": [0, 2]}}, "brief": {"length": {"max_length": 10}}}}
    (summed,) = await talked(RMChat(spec), "cut " * 4)
    expected = {"turns", "cut", *(f"rm/{name}" for name in (
        "length_chars", "length_words", "reward", "value", "truncated", "clipped", "no_answer", "status",
        "num_retried", "failed_terms", "rm", "brief", "rm/value", "rm/truncated", "rm/clipped"))}  # fmt: skip
    assert set(summed.info) - {"rm/brief/length"} == expected
    known = [summed.info[f"rm/{name}"] for name in ("value", "truncated", "clipped", "rm")]
    assert known == [15.0, 1.0, 1.0, 2.0]
    assert summed.reward == summed.info["rm/reward"] == 2.0 + summed.info["rm/brief"]


class Failing:
    """A server that fails the first time that it is asked about a text, or says 2.0 of each."""

    def __init__(self, *, times):
        self.left = dict.fromkeys(times, 1)
        self.asker = _asking.RequestQueue("it", self.send, _asking.QueueOptions(retries=2, max_batch=4))

    async def send(self, texts):
        fails = [text for text in texts if self.left.pop(text, 0)]
        return [AttemptFailure(InfraError("500"), retryable=True) if text in fails else 2.0 for text in texts]

    async def score(self, conversation):
        return Scored(await self.asker.ask(contents(conversation)[-1]))


async def test_retries_of_a_reward_model_are_counted_at_the_turn_that_took_them(monkeypatch):
    monkeypatch.setattr(_asking, "FIRST_PAUSE_S", 0.001)
    reward = ModelReward(Failing(times=["b"]))
    both = await asyncio.gather(*(talked(RMChat(reward), *said, user_turns=["1"]) for said in ("ab", "ac")))
    assert [[reply.info["rm/num_retried"] for reply in replies] for replies in both] == [[0.0, 1.0], [0.0, 0.0]]


class Counting(ScriptedJudge):
    """A language model whose requests cost something."""

    def __init__(self, *replies, retries=0):
        super().__init__(*replies)
        self.usage, self.retries = JudgeUsage(Price(prompt=1e6, completion=2e6)), retries

    async def complete(self, messages):
        self.usage.add(requests=1 + self.retries, retries=self.retries)
        reply = await super().complete(messages)
        self.usage.add(replies=1, prompt_tokens=3, completion_tokens=4)
        return reply


async def test_what_judges_and_the_user_are_asked_and_cost_is_that_of_the_turn_apart_from_each_other():
    judge, player = Counting("yes", "no", retries=1), Counting("And?", END)
    env = RMChat({"judge": {"judge": judge}}, user={"judge": player})
    first, second = await talked(env, "a", "b", label="42")
    asked = {"judge/requests": 2.0, "judge/retries": 1.0, "judge/replies": 1.0, "judge/prompt_tokens": 3.0,
             "judge/completion_tokens": 4.0, "judge/cost": 11.0,
             "user/requests": 1.0, "user/retries": 0.0, "user/replies": 1.0, "user/prompt_tokens": 3.0,
             "user/completion_tokens": 4.0, "user/cost": 11.0}  # fmt: skip
    for reply in (first, second):
        assert {name: fact for name, fact in reply.info.items() if name.startswith(("judge/", "user/"))} == asked
    assert (judge.usage["requests"], judge.usage.cost, player.usage.cost) == (4, 22.0, 22.0)


# --- failures -------------------------------------------------------------------------------------------------------


async def test_a_scorer_that_fails_raises_and_the_runner_tries_again():
    with pytest.raises(InfraError, match=r"RMChat.step: no score \(infra\): .*down"):
        await talked(RMChat(ModelReward(Asked(InfraError("down")))), "x")
    (trajectory,) = await episodes({"reward": ModelReward(Asked(InfraError("500")))}, "abc")
    assert (trajectory.reward, trajectory.attempt, trajectory.error) == (3.0, 1, None)
    scorer = Asked(*[InfraError("down")] * 9)
    (failed,) = await episodes({"reward": ModelReward(scorer)}, "a", "b", "c", max_retries=2)
    assert (failed.reward, failed.error.kind, failed.attempt, len(scorer.asked)) == (None, "infra", 2, 3)


async def test_a_reward_model_that_cannot_be_loaded_is_reported_before_anything_is_generated_and_not_tried_again():
    class Missing(Asked):
        async def load(self):
            raise ConfigError("no such folder")

    with pytest.raises(RunStopped, match="no such folder"):
        await episodes({"reward": ModelReward(Missing())}, "a", "b")


@pytest.mark.parametrize("error", [ConfigError("404"), MissingDependency("no vLLM")])
async def test_a_setting_that_shows_to_be_wrong_when_a_model_is_asked_ends_the_run_and_not_one_episode(error):
    models = {"a": {"model": {"scorer": Asked()}}, "b": {"model": {"scorer": Asked(error)}}}
    for spec in ({"sum": models}, {"model": {"scorer": Asked(error)}}):
        with pytest.raises(RunStopped, match=str(error)):
            await episodes({"reward": spec}, "a", "b", "c", max_retries=3)


@pytest.mark.parametrize("kind", [ConfigError, JudgeMisaddressed])
async def test_a_judge_or_a_user_at_a_wrong_address_ends_the_run(kind):
    judge = {"judge": {"judge": ScriptedJudge(kind("404"))}}
    with pytest.raises(RunStopped, match="404"):
        await talked(RMChat(judge), "x", label="y")
    talk = Talk(RMChat(ModelReward(Asked()), user={"judge": ScriptedJudge(kind("404"))}), user_turns=[])
    await talk.open()
    with pytest.raises(RunStopped, match="404"):
        await talk.say("x")


async def test_pending_waits_at_the_end_of_a_run_are_not_unhandled_errors():
    def refuse():
        raise ConfigError("no such folder")

    unheard, threads = [], Threads(1)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    task = asyncio.create_task(threads.run(refuse, limit_s=60.0))
    await asyncio.sleep(0)
    time.sleep(0.2)  # the loop is held up until the thread has done it all
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await threads.run(int, limit_s=60.0)  # the thread forgets the call before
    gc.collect()
    assert unheard == []


async def test_a_conversation_that_cannot_be_scored_is_the_datas_fault_and_not_tried_again():
    (trajectory,) = await episodes({"reward": ModelReward(Asked(DataError("too long")))}, "a", "b")
    assert (trajectory.reward, trajectory.error.type, trajectory.attempt) == (None, "DataError", 0)
    judge = {"judge": {"judge": ScriptedJudge("Verdict: YES")}}
    with pytest.raises(DataError, match=r"no score \(label\)"):
        await talked(RMChat(judge), "x", label=None)


# --- a played user --------------------------------------------------------------------------------------------------


async def test_a_language_model_plays_the_user_and_ends_the_conversation():
    player, scorer = ScriptedJudge("<think>hm</think>And why?", f"Thanks. {END}"), Asked()
    env = RMChat(ModelReward(scorer), user={"judge": player, "persona": "A {curious} child."})
    prompt = [{"role": "system", "content": "S"}, *QUESTION]
    first, second = await talked(env, "<think>t</think>Yes.", "So.", prompt=prompt)
    assert first.observation == [{"role": "user", "content": "And why?"}]
    assert (second.observation, second.terminated) == ("", True)
    assert contents(scorer.asked[1]) == ["S", "Hi?", "Yes.", "And why?", "So."]
    head, *talk = player.asked[1]
    assert (head["role"], "A {curious} child." in head["content"], END in head["content"]) == ("system", True, True)
    assert roles(talk) == ["user", "assistant", "user", "assistant", "user"]  # turned around
    assert contents(talk)[1:] == ["Hi?", "Yes.", "And why?", "So."]


async def test_a_user_who_says_what_no_tokenizer_takes_is_asked_again(monkeypatch):
    monkeypatch.setattr("agentenv_envs.rm_chat.env.JudgeRetry", lambda limit_s: JudgeRetry(2, limit_s, 0.0))
    player = ScriptedJudge("half a pair: \ud800", "Well?")  # which JSON can say
    (reply,) = await talked(RMChat(ModelReward(Asked()), user={"judge": player}), "a")
    assert (reply.observation[0]["content"], len(player.asked)) == ("Well?", 2)


async def test_a_user_who_fails_raises_and_is_not_a_bad_answer(monkeypatch):
    monkeypatch.setattr("agentenv_envs.rm_chat.env.JudgeRetry", lambda limit_s: JudgeRetry(2, limit_s, 0.0))
    env = {"reward": ModelReward(Asked()), "user": {"judge": ScriptedJudge(*[InfraError("down")] * 2, "Go on.", END)}}
    (trajectory,) = await episodes(env, "a", "b", max_retries=1)
    assert (trajectory.attempt, trajectory.reward, trajectory.error) == (1, 2.0, None)
    env = {"reward": ModelReward(Asked()), "user": {"judge": ScriptedJudge("")}}
    (failed,) = await episodes(env, "a", "b", max_retries=1)
    assert (failed.reward, failed.error.kind, failed.attempt) == (None, "infra", 1)


# --- settings, and what is shared -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reward": "maths"}, "Did you mean 'math'"),
        ({"reward": "length", "rm": "hf:x"}, "RMChat.rm: expected None besides reward"),
        ({"rm_args": {"max_length": 3}}, "RMChat.rm_args: expected it together with rm"),
        ({"rm": "hf:x", "clip": [-5, 5]}, r'{"reward": {"model": {"rm": "hf:x", "clip": \[-5, 5\]}}}'),
        ({"scale": 2}, r'{"reward": {"model": {"rm": "hf:PATH", "scale": 2}}}'),
        ({"rm": "hf:x", "rm_args": {"label": 1}, "max_length": 9}, r'"rm_args": {"label": 1, "max_length": 9}'),
        ({"max_turn": 3}, "Did you mean 'max_turns'"),
        ({"reward": {"model": {"rm": "hf:x", "shfit": 1}}}, "Did you mean 'shift'"),
        ({"when": "always"}, "RMChat.when"),
        ({"max_turns": 0}, "RMChat.max_turns"),
        ({"system": " "}, "RMChat.system"),
        ({"user": {}}, r"RMChat.user: .*'script': column.*'base_url': …, 'model': ….*'persona': text"),
        ({"user": {"judge": 3}}, "RMChat.user.judge: expected settings"),
        ({"user": {"judge": {"base_url": "http://x", "model": "m", "sampling": {"heat": 1}}}}, "judge.sampling"),
    ],
)
def test_wrong_settings_are_refused_by_the_constructor(options, said):
    with pytest.raises(ConfigError, match=said):
        RMChat(**options)


def test_a_model_that_is_loaded_here_sees_the_end_of_what_is_too_long_and_a_server_decides_itself():
    assert RMChat(rm="hf:some/model").reward["model"]["rm_args"] == {"overflow": "left"}
    own = {"model": {"rm": "hf:some/model"}}
    assert RMChat(own).reward == own


async def test_without_settings_length_and_repetition_stand_in_and_that_is_reported(caplog):
    (empty,) = await talked(RMChat(), "")
    (short,) = await talked(RMChat(), "Yes.")
    (circles,) = await talked(RMChat(), "the same thing again and " * 30)
    (good,) = await talked(RMChat(), " ".join(f"word{index}" for index in range(40)))
    assert empty.reward < short.reward < 0.0
    assert (good.reward, good.score) == (0.0, None)
    assert -2.0 <= circles.reward < -0.5
    assert (empty.info["rm/no_answer"], empty.info["rm/length"], good.info["rm/no_answer"]) == (1.0, -1.0, 0.0)


class Resource:
    """A reward that holds something."""

    bounds = (0.0, 1.0)

    def __init__(self, wait_s=0.0, error=None):
        self.closed, self.wait_s, self.error = 0, wait_s, error

    async def grade(self, response):
        return RewardResult(1.0)

    def metrics(self):
        return {"rm/num_scored": 3.0}

    async def close(self):
        self.closed += 1
        await asyncio.sleep(self.wait_s)
        if self.error:
            raise self.error


def test_what_is_shared_is_made_once_and_closed_when_the_last_loop_that_used_it_ends(caplog):
    made = []
    shared = Shared(lambda settings: made.append(Resource()) or made[-1])
    inner_used, outer_done = threading.Event(), threading.Event()

    async def use():
        """As an episode does."""
        assert await shared.open({"b": 1, "a": 2}) is await shared.open({"a": 2, "b": 1}) is made[-1]

    def elsewhere():
        """A loop in another thread, that lasts longer."""

        async def both():
            await use()
            inner_used.set()
            await asyncio.to_thread(outer_done.wait, 60)

        asyncio.run(both())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    inner_used.wait(60)
    asyncio.run(use())
    assert [each.closed for each in made] == [0]  # the other loop still uses it
    with caplog.at_level(logging.INFO):
        outer_done.set()
        thread.join(60)
    assert [each.closed for each in made] == [1]
    assert "Resource closed: rm/num_scored 3" in caplog.text
    asyncio.run(use())
    assert [each.closed for each in made] == [1, 1]  # a later loop has one of its own


def test_closing_what_hangs_or_fails_holds_nothing_up(caplog):
    things = {"hangs": Resource(wait_s=600.0), "fails": Resource(error=OSError("gone")), "good": Resource()}
    shared = Shared(things.get)

    async def use():
        """All of them."""
        for name in things:
            await shared.open(name)

    run_virtual(use())
    assert [each.closed for each in things.values()] == [1, 1, 1]
    assert f"TimeoutError: not closed within {CLOSE_LIMIT_S:g} s" in caplog.text
    assert "OSError: gone" in caplog.text


def test_scorers_and_judges_are_found_in_sums_and_routes_and_what_is_normalized():
    scorer, judge, own = Asked(), Resource(), Resource()
    scored = {"normalized": {"reward": {"model": {"scorer": scorer}}}}
    env = RMChat({"sum": {"rm": scored, "other": {"route": {"a": "math", "b": own}},
                          "says": {"judge": {"judge": with_complete(judge)}}}})  # fmt: skip
    from agentenv.rewards.registry import reward_from

    assert list(closable(reward_from(env.reward))) == [scorer, own, judge]


def with_complete(judge):
    judge.complete = ScriptedJudge().complete
    return judge


HELD = """
from agentenv.rewards.types import RewardResult

def note(word):
    with open("log.txt", "a") as log:
        log.write(word)

class Held:
    bounds = (0.0, 1000.0)
    def __init__(self):
        note("made ")
    async def grade(self, response):
        return RewardResult(float(len(response.prompt)))
    async def close(self):
        note("closed ")
"""


def test_the_scorer_of_a_run_is_shared_and_closed_before_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(HELD)
    rows = [{"prompt": f"Q{index}", "label": None, "user_turns": ["And?"]} for index in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kwargs = json.dumps({"reward": "reward.py:Held"})
    assert main(["run", "--env", ENV, "--env_kwargs", kwargs, "--data", "rows.jsonl", "--engine", "scripted",
                 "--out", "out", "--progress", "none"]) == 0  # fmt: skip
    assert [each.reward for each in read_trajectories("out")] == [4.0] * 6
    assert (tmp_path / "log.txt").read_text() == "made closed "


# --- the rows that ship, the command line, the agent file -----------------------------------------------------------


async def test_the_agent_func_runs_it_with_the_settings_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTENV_RM_CHAT", '{"reward": {"length": {"min_length": 4}}, "when": "gain", "max_turns": 3}')
    path = tmp_path / "rm_chat.py"  # another path: a module is loaded once
    path.write_text((ROOT / "agent_funcs/rm_chat.py").read_text())
    tokenizer = load_tokenizer(resolve_model("tiny-math"))
    task = Task(QUESTION, {"user_turns": ["And?"], "label": None})
    trajectory = await play(load_agent_func(path), task, ["Yes", "Well"], tokenizer=tokenizer)
    assert (trajectory.error, len(trajectory.turns)) == (None, 2)
    assert [turn.result.reward for turn in trajectory.turns] == pytest.approx([-0.01, 0.01])
    monkeypatch.setenv("AGENTENV_RM_CHAT", "hf:x")
    (other := tmp_path / "wrong.py").write_text(path.read_text())
    with pytest.raises(ConfigError, match="AGENTENV_RM_CHAT: expected a JSON object"):
        load_agent_func(other)
    monkeypatch.setenv("AGENTENV_RM_CHAT", '{"rm": "hf:./nothere"}')
    with pytest.raises(ConfigError, match="expected a reward model's folder"):
        load_agent_func(other)
