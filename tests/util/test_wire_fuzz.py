"""Damaged messages to readers of what others write: a typed error or a 4xx that says why, and the next is served."""

import asyncio
import contextlib
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.episode.endpoint.server import Endpoint
from agentenv.errors import DataError, InfraError
from agentenv.rewards.judges import templates as verdicts
from agentenv.rewards.judges.openai import read_chat_reply
from agentenv.runs.records.directory import read_trajectories
from agentenv.runs.records.lines import decode_episode, encode_line, trajectory_to_dict
from agentenv.runs.records.scan import ReadReport
from agentenv.sandbox import ExecLimits, ExecResult, ExecStatus, Isolation
from agentenv.sandbox.fusion.server import FusionServer
from agentenv.sandbox.fusion.wire import BadAnswer, GradeRequest, encode_grade_request, read_result, result_body
from agentenv.sandbox.grading import AssertSuite, AssertTest, FunctionSuite, FunctionTest, PytestSuite
from agentenv.sandbox.grading.codec import CodecError, decode, dump_line, encode, parse_line
from tests.damage import check_message, damaged, damaged_bytes, dump
from tests.episode.endpoint.scenes import session_of, user

CONTENT_TYPE = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def run():
    """Run coroutines on one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


def dumped(right):
    """Bodies: a right one with damaged values, or with damaged bytes."""
    others = [each for each in right if isinstance(each, dict)]
    bodies = st.sampled_from(right)
    values = bodies.flatmap(lambda body: damaged(body, others=others)).map(dump).map(str.encode)
    return values | bodies.flatmap(lambda body: damaged_bytes(json.dumps(body).encode()))


async def answered(server, path, content):
    """The answer of a server in this process; an exception that its handlers do not answer is raised."""
    transport = httpx.ASGITransport(server._application())
    async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{server.port}") as http:
        return await http.post(path, content=content, headers=CONTENT_TYPE)


# --- servers ----------------------------------------------------------------------------------------------------------


class Instant:
    """A sandbox whose programs end at once."""

    isolation, backend, limits, run_slots = Isolation.NONE, "instant", ExecLimits(), 2

    async def run(self, program, **given):
        return ExecResult(ExecStatus.OK, exit_code=0, stdout="4\n", stdout_bytes=2)

    async def start(self, program, **given):
        raise InfraError("no room")


HELLO = {"code": "print(6 * 7)", "language": "python", "run_timeout": 5, "stdin": "", "files": {"a.txt": "eA=="},
         "fetch_files": ["b"], "memory_limit_MB": 256, "compile_timeout": 10}  # fmt: skip
PROGRAM = {"program": "print(6 * 7)", "stdin": "", "files": {"a.txt": "eA=="}, "fetch": ["b"], "policy": "pure",
           "limits": {"cpu_s": 1.0, "stdout_kb": 64}, "channel": False}  # fmt: skip
SUITES = [
    FunctionSuite("f", visible=(FunctionTest((1, "a"), {2}),), hidden=(FunctionTest((), None, {"k": b"x"}),)),
    AssertSuite(("f",), hidden=(AssertTest("assert f() == 1"),), prelude="import math"),
    PytestSuite({"test_a.py": b"def test_a(): pass"}, hidden=("test_a.py::test_a",)),
]
GRADES = [json.loads(encode_grade_request(GradeRequest("x = 1", suite, ExecLimits(), False, 60.0))) for suite in SUITES]
BODIES = {"/run_code": [HELLO], "/run": [PROGRAM], "/grade": GRADES}


def is_served_or_refused(run, path, content):
    server = FusionServer(Instant())
    answer = run(answered(server, path, content))
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        check_message(answer.json()["detail"])
    again = run(answered(server, "/run_code", json.dumps(HELLO)))
    assert (again.status_code, again.json()["status"]) == (200, "Success")
    return answer.status_code


@given(sent=st.one_of(st.tuples(st.just(path), dumped(bodies)) for path, bodies in BODIES.items()))
@settings(max_examples=60)
def test_a_damaged_request_of_a_program_is_served_or_refused_with_a_reason(run, sent):
    is_served_or_refused(run, *sent)


def test_a_file_name_of_any_length_is_refused_in_few_words(run):
    is_served_or_refused(run, "/run_code", json.dumps({**HELLO, "files": {"x" * 9000: "eA=="}}))
    is_served_or_refused(run, "/run", json.dumps({**PROGRAM, "files": {"x" * 9000: "eA=="}}))


OK = json.loads(json.dumps(result_body(ExecResult(ExecStatus.OK, exit_code=0, files={"a": b"x"}, stdout_data=b""))))


@given(damaged(OK))
@settings(max_examples=100)
def test_a_damaged_result_of_a_program_is_a_result_or_none(found):
    try:
        result = read_result(found)
    except BadAnswer as error:
        check_message(str(error), 600)
    else:
        assert result.status == found["status"]
        assert result.status is not ExecStatus.INFRA
        assert isinstance(result.stdout + result.stderr, str)


TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"query": {}}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"query": "x"}'}}
CHATS = [
    {"model": "m", "messages": [{"role": "system", "content": "Be kind."}, user("Q")], "temperature": 0.5,
     "max_tokens": 5, "stop": ["x"], "logprobs": True, "n": 1, "seed": 3},
    {"messages": [user("Q"), {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
                  {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]}],
     "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}, "tool_choice": "auto"},
]  # fmt: skip
CHAT = dumped(CHATS)
RESPONSES = [
    {"model": "m", "input": "Q", "instructions": "Be brief.", "max_output_tokens": 5, "stream": True},
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Q"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c", "name": "lookup", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "42"},
        ],
        "tools": [{"type": "function", "name": "lookup", "parameters": {"type": "object"}, "strict": False}],
        "tool_choice": "auto", "text": {"format": {"type": "text"}}, "reasoning": {"effort": None}, "include": [],
    },
]  # fmt: skip
RESPONSE = dumped(RESPONSES)


def is_completed_or_refused(run, content, path="chat/completions"):
    session, _ = session_of(["4", "4"])
    endpoint = Endpoint()
    endpoint._sessions["s"] = session
    answer = run(answered(endpoint, f"/s/s/v1/{path}", content))
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        check_message(answer.json()["error"]["message"])
    again = run(answered(endpoint, "/s/s/v1/chat/completions", json.dumps({"messages": [user("Q")]})))
    assert again.status_code == 200, again.text
    session.close()


def test_right_requests_are_answered(run):
    for body in CHATS:
        is_completed_or_refused(run, json.dumps(body).encode())
    for body in RESPONSES:
        is_completed_or_refused(run, json.dumps(body).encode(), "responses")
    for path, bodies in BODIES.items():
        assert [is_served_or_refused(run, path, json.dumps(body)) for body in bodies] == [200] * len(bodies)


@given(CHAT)
@settings(max_examples=60)
def test_a_damaged_chat_request_is_answered_or_refused_with_a_reason(run, content):
    is_completed_or_refused(run, content)


@given(RESPONSE)
@settings(max_examples=60)
def test_a_damaged_response_request_is_answered_or_refused_with_a_reason(run, content):
    is_completed_or_refused(run, content, "responses")


# --- replies and records ------------------------------------------------------------------------------------------

SAID = (
    "Verdict: YES", '{"1": "yes", "2": 4}', "1. yes\n2: 4/5", "Ranking: [2] > [1]", [{"type": "text", "text": "[[A]]"}],
)  # fmt: skip
USED = {"prompt_tokens": 3, "completion_tokens": 4}
REPLIES = [
    {"choices": [{"message": {"content": text, "reasoning_content": "r"}, "finish_reason": "stop"}], "usage": USED}
    for text in SAID
]


@given(dumped(REPLIES))
@settings(max_examples=100)
def test_a_damaged_reply_of_a_judge_has_a_verdict_or_none_and_says_why(content):
    reply = read_chat_reply(content, "judge")
    if reply.failure is not None:
        assert isinstance(reply.failure, InfraError)
        check_message(str(reply.failure))
    assert verdicts.read_yes_or_no(reply.text) in (True, False, None)
    assert verdicts.read_preference(reply.text) in (0.0, 0.5, 1.0, None)
    score, ranking, marks = (
        verdicts.read_score(reply.text, 0, 10), verdicts.read_ranking(reply.text, 2), verdicts.read_list(reply.text, 2),
    )  # fmt: skip
    assert score is None or 0 <= score <= 10
    assert ranking is None or sorted(ranking) == [1, 2]
    assert marks is None or marks.keys() == {1, 2}


def recorded(name):
    trajectory = Trajectory(Task([user("Q")], label={"a": 1}, task_id=name), 100, name, name)
    trajectory.append_observation([1, 2])
    trajectory.append_turn(Completion((3, 4), "stop", logprobs=(-0.5, -1.0), policy_version=1), "hi", 0.1)
    trajectory.append_observation([5])
    trajectory.set_result(StepResult([user("ok")], reward=1.0, score=1.0, info={"n": 1.0}), 0.1)
    trajectory.finish(StopReason.ERROR, EpisodeError("env", "ValueError", "x", "y"))
    return trajectory


EPISODE = trajectory_to_dict(recorded("a"))
LINES = [encode_line(recorded(name)) for name in "abc"]


@given(dumped([EPISODE]))
@settings(max_examples=100)
def test_damaged_values_of_an_episode_are_a_trajectory_or_a_data_error(content):
    is_decoded_or_refused(content)


def is_decoded_or_refused(content):
    try:
        encode_line(decode_episode(content))
    except DataError as error:
        check_message(str(error), 600)


@pytest.mark.parametrize("found", ["x" * 3000, "\ud800", "\u2028"], ids=["long", "surrogate", "end of line"])
def test_a_value_of_any_length_is_refused_in_few_words_on_one_line(found):
    is_decoded_or_refused(json.dumps({**EPISODE, "stop_reason": found}))
    is_decoded_or_refused(json.dumps({**EPISODE, "task": {**EPISODE["task"], found: 1}}))


@given(st.integers(0, 2), st.data())
@settings(max_examples=60)
def test_a_damaged_line_of_a_record_is_counted_and_said_and_costs_nothing_else(tmp_path_factory, place, data):
    line = data.draw(damaged_bytes(LINES[place][:-1])).replace(b"\n", b" ") + b"\n"
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(b"".join([*LINES[:place], line, *LINES[place + 1 :]]))
    report = ReadReport()
    found = [each.episode_id for each in read_trajectories(path, report=report)]
    same = line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n") == LINES[place].rstrip(b"\n")
    kept = [name for at, name in enumerate("abc") if at != place or same]
    assert found == kept
    assert report.corrupt_lines == ([] if len(kept) == 3 or not line.strip() else [place + 1])
    assert (str(place + 1) in report.damage) == bool(report.corrupt_lines)


# --- the far side of a sandbox ------------------------------------------------------------------------------------

VALUE = {"a": [1, 1 << 70, 0.5, float("inf"), 2j, b"x", {1, 2}, frozenset("a"), (None, True)], 3: {"$x": "y"}}
MESSAGES = [{"id": 1, "value": encode(VALUE)}, {"id": 2, "ok": True, "value": encode([VALUE, "text"])}]


@given(dumped(MESSAGES))
@settings(max_examples=200)
def test_a_damaged_line_of_the_channel_is_a_value_or_a_codec_error(line):
    with contextlib.suppress(CodecError):
        message = parse_line(line)
        value = decode(message.get("value"))
        dump_line({"value": encode(value)})
