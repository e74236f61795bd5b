"""The page's server: who may read what, what it answers, and files that grow, are cut, torn and replaced."""

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys

import httpx
import pytest

from agentenv.core.views import spans_of
from agentenv.errors import ConfigError
from agentenv.runs.records.directory import RunWriter, read_trajectories
from agentenv.runs.records.steps import append_rows, cut_steps
from agentenv.runs.records.token_stats import TOKEN_STATS, TokenStats, hash_actions
from agentenv.view import server as view_server
from agentenv.view import tail
from agentenv.view.page import SERVER_POLICY
from agentenv.view.server import ViewOptions, ViewServer, view_access
from agentenv.view.tail import TailPlace, read_tail
from agentenv.view.viewed import find_runs
from tests.view.viewed_runs import episode, forge_index, tiny_math, write_run

TOKEN = "secret"
NAVIGATION = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@contextlib.asynccontextmanager
async def serving(*folders, token=None, tokenizer=None):
    """A client of a server that shows these runs."""
    runs = find_runs([str(folder) for folder in folders])
    options = ViewOptions(view_access("127.0.0.1", token, ()), tokenizer=tokenizer)
    async with ViewServer(runs, options) as server:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
            yield client


async def lines_of(client, url):
    """The data lines of a stream without follow, parsed, and its controls."""
    lines = (await client.get(url)).text.splitlines()
    data = [json.loads(line) for line in lines if not line.startswith("!")]
    return data, [json.loads(line[1:]) for line in lines if line.startswith("!")]


async def rows_of(client, run=0):
    """The index of a run as dicts."""
    (header, *rows), _ = await lines_of(client, f"/api/index?run={run}")
    return [dict(zip(header["fields"], row, strict=True)) for row in rows]


async def episodes_of(client, rows, run=0):
    """The answer of /api/episodes for rows of the index."""
    at = ",".join(f"{row['offset']}:{row['length']}" for row in rows)
    return (await client.get(f"/api/episodes?run={run}&at={at}")).json()


# --- access -----------------------------------------------------------------------------------------------------------


async def test_the_shell_needs_no_token_and_all_data_does(tmp_path):
    write_run(tmp_path / "run", episode())
    async with serving(tmp_path / "run", token=TOKEN) as client:
        paths = ["runs", "meta?run=0", "index?run=0", "metrics?run=0", "steps?run=0", "episodes?run=0&at=0:1",
                 "heads?run=0&at=0:1", "grep?run=0&q=a"]  # fmt: skip
        for path in paths:
            assert (await client.get(f"/api/{path}")).status_code == 200, path
            for header in ("", "Bearer wrong", "Bearer"):
                refused = await client.get(f"/api/{path}", headers={"authorization": header})
                assert refused.status_code == 401
                assert "apples" not in refused.text
        assert (await client.get("/", headers={"authorization": ""})).status_code == 200


async def test_a_link_on_another_page_opens_the_page(tmp_path):
    write_run(tmp_path / "run", episode())
    async with serving(tmp_path / "run", token=TOKEN) as client:
        assert (await client.get("/", headers=NAVIGATION)).status_code == 200
        for changed in ({"sec-fetch-mode": "no-cors"}, {"sec-fetch-dest": "iframe"}, {"host": "evil.example"}):
            assert (await client.get("/", headers=NAVIGATION | changed)).status_code in (400, 403)
        assert (await client.post("/", headers=NAVIGATION)).status_code in (403, 405)


async def test_every_answer_forbids_foreign_scripts_and_guessed_types(tmp_path):
    write_run(tmp_path / "run", episode())
    async with serving(tmp_path / "run") as client:
        for path in ("/", "/static/viewer.js", "/api/runs", "/api/index?run=0", "/api/meta?run=7", "/no", "/api/grep"):
            headers = (await client.get(path)).headers
            assert headers["content-security-policy"] == SERVER_POLICY
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in headers
    assert "unsafe" not in SERVER_POLICY
    assert SERVER_POLICY.startswith("default-src 'none'")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(tmp_path, method):
    write_run(tmp_path / "run", episode())
    async with serving(tmp_path / "run") as client:
        for path in ("/", "/api/runs", "/api/episodes"):
            assert (await client.request(method, path)).status_code == 405


async def test_a_request_names_no_path(tmp_path):
    write_run(tmp_path / "run", episode())
    (tmp_path / "private.txt").write_text("private")
    async with serving(tmp_path / "run") as client:
        for path in ("/static/../viewed.py", "/static/%2e%2e/viewed.py", "/static//etc/passwd", "/private.txt"):
            assert (await client.get(path)).status_code == 404
        for query in ("run=1", "run=-1", "run=../run", "run=0x0", "run=٠", "run="):
            assert (await client.get(f"/api/meta?{query}")).status_code in (400, 404)


async def test_a_link_below_a_run_is_not_followed(tmp_path):
    write_run(tmp_path / "run", episode())
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"private": 1}\n')
    (tmp_path / "run" / "metrics.jsonl").symlink_to(secret)
    (tmp_path / "run" / "trajectories.jsonl").rename(tmp_path / "elsewhere.jsonl")
    (tmp_path / "run" / "trajectories.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    async with serving(tmp_path / "run") as client:
        rows, controls = await lines_of(client, "/api/metrics?run=0")
        assert not rows
        assert "not followed" in controls[-1]["error"]
        assert (await client.get("/api/episodes?run=0&at=0:9")).status_code == 422


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("at=" + ",".join(["0:1"] * 65), 413), ("at=0:999999999", 413), ("at=0", 400), ("at=-1:5", 400), ("", 400),
        ("at=0:1,", 400), ("at=٣:1", 400), ("at=0:" + "9" * 99, 400), ("at=999999:12", 200),
    ],
)  # fmt: skip
async def test_what_a_request_may_ask_for_is_bounded(tmp_path, query, status):
    write_run(tmp_path / "run", episode())
    async with serving(tmp_path / "run") as client:
        assert (await client.get(f"/api/episodes?run=0&{query}")).status_code == status


async def test_the_token_is_in_the_fragment_of_the_address_only(tmp_path):
    write_run(tmp_path / "run", episode())
    server = ViewServer(find_runs([str(tmp_path / "run")]), ViewOptions(view_access("127.0.0.1", TOKEN, ())))
    async with server:
        address = server.address("/0/episode/a%2F0")
    assert address == f"http://127.0.0.1:{server.port}/#token={TOKEN}&go=%2F0%2Fepisode%2Fa%252F0"


# --- what it answers --------------------------------------------------------------------------------------------------


async def test_episodes_are_the_records_lines_with_spans_and_the_texts_of_their_tokens(tmp_path):
    texts = "12 apples é 日本 🙂 left", "Your answer is wrong.\nAgain"
    tokenizer = tiny_math()
    write_run(tmp_path / "run", episode("a/0", "How many?", *texts, tokenizer=tokenizer), episode("b/0"))
    async with serving(tmp_path / "run") as client:
        rows = await rows_of(client)
        answer = await episodes_of(client, rows)
    assert [row["episode_id"] for row in rows] == ["a/0", "b/0"]
    found, _ = answer["episodes"]
    line = (tmp_path / "run" / "trajectories.jsonl").read_bytes().splitlines()[0]
    assert found["record"] == json.loads(line)["episode"]
    trajectory = next(iter(read_trajectories(tmp_path / "run")))
    table, segment = dict(answer["texts"]), found["view"]["segments"][0]
    special = dict(segment["texts"])
    shown = [special.get(at, table[token]) for at, token in enumerate(trajectory.token_ids)]
    assert "".join(shown) == tokenizer.decode(trajectory.token_ids, skip_special_tokens=False)
    assert [each[:4] for each in segment["spans"]] == [
        [span.start, span.end, span.kind, span.turn] for span in spans_of(trajectory)
    ]
    prompt, action, feedback = segment["spans"]
    assert "".join("".join(shown[a:b]) for a, b in prompt[4]) == "How many?"
    assert action[4] == []
    assert "".join("".join(shown[a:b]) for a, b in feedback[4]) == texts[1]
    assert {table[token] for token in answer["special"]} == {"<|im_start|>", "<|im_end|>"}


async def test_heads_and_search_find_the_texts_of_an_episode(tmp_path):
    first = episode("a/0", "How many pears?", '3 "é"\n', "No.", label={"answer": 3}, info={"outcome": "wrong", "n": 1})
    first.prompt = [{"role": "system", "content": "Count."}, *first.prompt]
    write_run(tmp_path / "run", first, episode("b/0", action="Äpfel"))
    async with serving(tmp_path / "run") as client:
        rows = await rows_of(client)
        places = [[row["offset"], row["length"]] for row in rows]
        head = (await client.get(f"/api/heads?run=0&at={places[0][0]}:{places[0][1]}")).json()["heads"][0]
        assert head == {
            "at": places[0], "prompt": "How many pears?", "label": "{'answer': 3}", "last_action": '3 "é"\n',
            "info": {"outcome": "wrong", "n": 1},
        }  # fmt: skip

        async def hits(text, **more):
            found, controls = await lines_of(client, str(httpx.URL("/api/grep", params={"run": 0, "q": text, **more})))
            assert controls == [{"end": True}]
            return [places.index(each) for each in found]

        assert await hits('3 "é"\n') == [0]
        assert await hits("How many") == [0, 1]
        assert await hits("how many") == []
        assert await hits("HOW MANY", fold=1) == [0, 1]
        assert await hits("äPFEL", fold=1) == [1]
        assert await hits("outcome") == []  # neither in prompt nor action nor observation
        assert await hits("How many", **{"from": places[1][0]}) == [1]
        assert (await client.get("/api/grep?run=0&q=")).status_code == 400


async def test_a_long_search_answers_in_slices(tmp_path, monkeypatch):
    write_run(tmp_path / "run", *(episode(f"a/{number}") for number in range(5)))
    monkeypatch.setattr("agentenv.view.episodes.SLICE_S", -1.0)
    async with serving(tmp_path / "run") as client:
        rows = await rows_of(client)
        found, controls = await lines_of(client, "/api/grep?run=0&q=apples")
    assert not found
    assert controls == [{"next": rows[0]["offset"]}]


async def test_a_damaged_episode_costs_itself_only(tmp_path):
    write_run(tmp_path / "run", *(episode(f"a/{number}") for number in range(3)))
    async with serving(tmp_path / "run") as client:
        rows = await rows_of(client)
        record = tmp_path / "run" / "trajectories.jsonl"
        content = bytearray(record.read_bytes())
        content[rows[1]["offset"] + 60] ^= 1
        record.write_bytes(content)
        answer = await episodes_of(client, rows)
    assert [sorted(each) for each in answer["episodes"]] == [["at", "record", "view"], ["at", "error"],
                                                             ["at", "record", "view"]]  # fmt: skip


async def test_without_a_tokenizer_the_page_says_why_and_shows_spans(tmp_path):
    write_run(tmp_path / "run", episode(), flags={"model": "some/where"})
    async with serving(tmp_path / "run") as client:
        meta = (await client.get("/api/meta?run=0")).json()
        assert "--tokenizer" in meta["tokenizer"]["error"]
        answer = await episodes_of(client, await rows_of(client))
    assert answer["texts"] == []
    assert [span[2] for span in answer["episodes"][0]["view"]["segments"][0]["spans"]] == ["prompt", "action"]


async def test_the_tokenizer_in_the_runs_folder_comes_first(tmp_path):
    write_run(tmp_path / "run", episode(), flags={"model": "some/where"})
    tiny_math().save_pretrained(tmp_path / "run" / "tokenizer")
    async with serving(tmp_path / "run") as client:
        tokenizer = (await client.get("/api/meta?run=0")).json()["tokenizer"]
    assert tokenizer["source"] == str(tmp_path / "run" / "tokenizer" / "tokenizer.json")


async def test_a_run_says_whether_it_is_being_written(tmp_path):
    write_run(tmp_path / "run", episode())
    async with serving(tmp_path / "run") as client:
        assert (await client.get("/api/meta?run=0")).json()["is_writing"] is False
        with RunWriter.open(tmp_path / "run", {"flags": {}}, resume=True, may_differ=["flags"]):
            assert (await client.get("/api/meta?run=0")).json()["is_writing"] is True
            with pytest.raises(ConfigError):  # looking at it did not take its lock
                RunWriter.open(tmp_path / "run", {"flags": {}}, resume=True, may_differ=["flags"])


async def test_two_runs_are_compared(tmp_path):
    for name, reward in (("a", 0.0), ("b", 1.0)):
        write_run(tmp_path / name, *(episode(f"{task}/0", reward=reward + task % 2) for task in range(6)))
    async with serving(tmp_path / "a", tmp_path / "b") as client:
        found = (await client.get("/api/diff?a=0&b=1&by=reward")).json()
        assert found["verdict"] == "better"
        assert found["difference"]["mean"] == 1.0
        assert (await client.get("/api/diff?a=0&b=1&by=luck")).status_code == 400
        assert (await client.get("/api/diff?a=0&b=2")).status_code == 404


# --- files that grow --------------------------------------------------------------------------------------------------


class Follower:
    """The lines of a stream that is followed."""

    def __init__(self, answer):
        self._lines = answer.aiter_lines()
        self.place = ""

    async def until(self, condition):
        """Lines up to the first for which the condition holds; controls are dicts in a tuple."""
        found = []
        async with asyncio.timeout(60):
            async for line in self._lines:
                value = (json.loads(line[1:]),) if line.startswith("!") else json.loads(line)
                if isinstance(value, tuple):
                    self.place = value[0].get("next", self.place)
                found.append(value)
                if condition(value):
                    return found
        raise AssertionError("expected more lines")

    async def data(self, num):
        """So many data lines, and the place behind them."""
        found = []
        while len(found) < num:
            lines = await self.until(lambda value: isinstance(value, tuple) and "next" in value[0])
            found += [each for each in lines if not isinstance(each, tuple)]
        return found


@contextlib.asynccontextmanager
async def following(client, path):
    async with client.stream("GET", path) as answer:
        assert answer.status_code == 200
        yield Follower(answer)


async def test_lines_come_as_they_are_written_and_a_torn_one_when_it_is_whole(tmp_path):
    write_run(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    async with serving(tmp_path / "run") as client, following(client, "/api/metrics?run=0&follow=1") as stream:
        assert await stream.data(1) == [{"step": 1}]
        with file.open("a") as out:
            out.write('{"step": 2}\n{"st')
            out.flush()
            assert await stream.data(1) == [{"step": 2}]
            out.write('ep": 3}\n')
            out.flush()
            assert await stream.data(1) == [{"step": 3}]
        async with following(client, f"/api/metrics?run=0&follow=1&from={stream.place}") as again:
            with file.open("a") as out:
                out.write('{"step": 4}\n')
            assert await again.data(1) == [{"step": 4}]


def _cut(file):
    file.write_text('{"step": 1}\n{"step": 9}\n')  # shorter, and another line at the place


def _cut_and_longer(file):
    with file.open("r+") as out:  # a resumed training cuts steps and goes past them before the next look
        out.truncate(12)
        out.seek(12)
        out.write("".join(f'{{"step": {step}, "again": 1}}\n' for step in range(2, 9)))


def _replaced(file):
    new = file.with_name("new")
    new.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "amended": 1}\n{"step": 4}\n')
    new.replace(file)


def _removed(file):
    file.unlink()


@pytest.mark.parametrize("change", [_cut, _cut_and_longer, _replaced, _removed])
async def test_a_file_that_is_cut_or_replaced_is_sent_again_from_its_beginning(tmp_path, change):
    write_run(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    async with serving(tmp_path / "run") as client, following(client, "/api/metrics?run=0&follow=1") as stream:
        assert len(await stream.data(3)) == 3
        place = stream.place
        change(file)
        now = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        await stream.until(lambda value: value == ({"reset": True},))
        assert await stream.data(len(now)) == now
        rows, controls = await lines_of(client, f"/api/metrics?run=0&from={place}")
        assert rows == now
        assert controls[0] == {"reset": True}


@pytest.mark.parametrize("change", [_cut, _cut_and_longer, _replaced])
@pytest.mark.parametrize("moment", range(4))
def test_a_file_that_is_changed_while_it_is_read_is_read_again(tmp_path, monkeypatch, moment, change):
    write_run(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    run = find_runs([str(tmp_path / "run")])[0]
    first = read_tail(run, "metrics.jsonl", TailPlace())
    calls, read = iter(range(100)), os.pread

    def changed_before(*args):
        if next(calls) == moment:
            change(file)
        return read(*args)

    monkeypatch.setattr(tail.os, "pread", changed_before)
    place, lines = first.place, first.lines
    for _ in range(4):
        found = read_tail(run, "metrics.jsonl", place)
        place, lines = found.place, found.lines if found.was_reset else lines + found.lines
    assert next(calls) > moment
    assert lines.decode() == file.read_text()


async def test_a_file_cannot_speak_as_the_server(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('!{"reset": true}\n{"step": 1}\nnonsense\n\n[2]\n')
    async with serving(tmp_path / "run") as client:
        rows, controls = await lines_of(client, "/api/metrics?run=0")
    assert rows == [{"step": 1}, [2]]
    assert [sorted(each) for each in controls] == [["next"], ["end"]]


async def test_streams_end_with_the_server_and_are_bounded(tmp_path, monkeypatch):
    write_run(tmp_path / "run", episode())
    monkeypatch.setattr(view_server, "_MAX_FOLLOWED", 1)
    async with contextlib.AsyncExitStack() as stack:
        async with serving(tmp_path / "run") as client:
            stream = await stack.enter_async_context(following(client, "/api/steps?run=0&follow=1"))
            await stream.until(lambda value: True)
            refused = await client.get("/api/steps?run=0&follow=1")
            assert refused.status_code == 503
        with contextlib.suppress(httpx.HTTPError):  # the server closes before the client
            await stream.until(lambda value: False)


# --- the command ------------------------------------------------------------------------------------------------------

LIGHT = """
import asyncio, sys
from agentenv.cli.view import view
async def asleep(*_): raise KeyboardInterrupt
asyncio.Event.wait = asleep
view([sys.argv[1], "--no_open"])
import agentenv.view.single_file, agentenv.view.excerpts
print([name for name in ("torch", "transformers", "numpy", "pandas", "openai", "ray", "vllm") if name in sys.modules])
"""


def test_the_command_prints_an_address_and_imports_neither_torch_nor_transformers(tmp_path):
    write_run(tmp_path / "run", episode())
    done = subprocess.run([sys.executable, "-c", LIGHT, tmp_path / "run"], capture_output=True, text=True, check=False)
    address, heavy = done.stdout.splitlines()
    assert address.startswith("http://127.0.0.1:")
    assert "/#token=" in address
    assert heavy == "[]"


async def test_a_mixture_is_named_by_its_environments_and_shows_the_options_of_each(tmp_path):
    mixture = [{"env": "a.py", "name": "first", "weight": 2}, {"env": "b.py:Second", "name": "Second"}]
    async with serving(write_run(tmp_path / "run", episode(), flags={"env": mixture})) as client:
        meta = (await client.get("/api/meta?run=0")).json()
        assert meta["env"] == "first+Second"
        changed = [["env.first.env", "a.py"], ["env.first.weight", "2"], ["env.Second.env", "b.py:Second"]]
        assert [each for each in meta["changed_flags"] if each[0].startswith("env")] == changed


async def test_a_run_that_was_graded_again_names_its_source_and_its_reward(tmp_path):
    folder = write_run(tmp_path / "run", episode())
    document = json.loads((folder / "config.json").read_text())
    document["config"]["rescored"] = {"run": "runs/old", "reward": "strict.py:exact"}
    (folder / "config.json").write_text(json.dumps(document))
    async with serving(folder) as client:
        meta = (await client.get("/api/meta?run=0")).json()
        assert meta["env"] == "math_retry, old graded again"
        assert ["reward", "strict.py:exact"] in meta["changed_flags"]


# --- run directories of others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        {"env": 5}, {"env": {"a": 1}}, {"model": "~no_such_user/x"}, {"model": "a" * 5000}, {"model": "a\0b"},
        {"model": ["a"]}, {"temperature": float("nan")}, {"temperature": 10**400},
    ],
)  # fmt: skip
async def test_flags_that_no_command_wrote_cost_no_answer(tmp_path, flags):
    folder = write_run(tmp_path / "run", episode())
    config = json.loads((folder / "config.json").read_text())
    config["config"]["flags"] |= flags
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.json").write_text('{"reward": NaN, "score": 1e999}')
    async with serving(folder) as client:
        answer = await client.get("/api/meta?run=0")
        assert answer.status_code == 200
        assert answer.json()["metrics"] == {"reward": None, "score": None}
        (row,) = await rows_of(client)
        assert (await episodes_of(client, [row]))["episodes"][0]["record"]["episode_id"] == "a/0"


async def test_offsets_beyond_every_file_are_refused(tmp_path):
    async with serving(write_run(tmp_path / "run", episode())) as client:
        for path in ("episodes?at=999999999999999:1", "heads?at=999999999999999:1", "grep?q=a&from=999999999999999"):
            assert (await client.get(f"/api/{path}")).status_code == 400, path
        assert (await client.get("/api/episodes?at=9999999999999:1")).status_code == 200


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
async def test_a_record_that_is_no_file_is_told(tmp_path, make):
    folder = write_run(tmp_path / "run", episode())
    (folder / "trajectories.jsonl").unlink()
    (folder / "index.jsonl").unlink()
    for name in ("trajectories.jsonl", "metrics.jsonl"):
        make(folder / name)
    async with serving(folder) as client:
        assert (await client.get("/api/episodes?at=0:1")).status_code == 422
        for path in ("index", "metrics", "grep?q=a"):
            _, (*_, last) = await lines_of(client, f"/api/{path}")
            assert "expected" in last["error"], path


@pytest.mark.parametrize("row", ["a pipe", ["x"], [-5, 1], [10**30, 1], [0, None], [0, 1], {"a": 1}])
async def test_an_index_that_is_forged_or_a_pipe_is_computed_again(tmp_path, row):
    folder = write_run(tmp_path / "run", episode())
    if row == "a pipe":
        (folder / "index.jsonl").unlink()
        os.mkfifo(folder / "index.jsonl")
    else:
        forge_index(folder, row)
    async with serving(folder) as client:
        assert [row["episode_id"] for row in await rows_of(client)] == ["a/0"]


async def test_the_evaluations_of_a_training_are_a_run_of_their_own_under_either_name(tmp_path):
    folder = write_run(tmp_path / "run", episode("a/0"), flags={"max_train_steps": 2})
    (folder / "metrics.jsonl").touch()
    async with serving(folder) as client:
        assert [run["kind"] for run in (await client.get("/api/runs")).json()["runs"]] == ["train"]
        write_run(folder / "eval", episode("a@0/0"), episode("a@2/0"))
        runs = (await client.get("/api/runs")).json()["runs"]
        assert [(run["run"], run["name"], run["kind"]) for run in runs] == [
            (0, "run", "train"),
            (1, "run/eval", "eval"),
        ]
        assert [row["group_id"] for row in await rows_of(client, 1)] == ["a@0", "a@2"]
    async with serving(folder / "eval") as client:
        (run,) = (await client.get("/api/runs")).json()["runs"]
        assert (run["name"], run["kind"]) == ("run/eval", "eval")
        flags = (await client.get("/api/meta?run=0")).json()["config"]["config"]["flags"]
        assert flags["max_train_steps"] == 2
    assert len(find_runs([str(folder), str(folder / "eval")])) == 2


async def test_an_episode_has_what_the_learner_computed_for_its_tokens_and_not_for_tokens_sampled_again(tmp_path):
    first, second = episode("a/0"), episode("b/0")
    folder = write_run(tmp_path / "run", first, second, flags={"max_train_steps": 2})

    def stats(step, each, token_ids, *logprobs):
        return TokenStats(step, each, hash_actions(token_ids), logprobs, (0.5,) * len(logprobs)).to_dict()

    async with serving(folder) as client:

        async def learned():
            return [each["view"]["learned"] for each in (await episodes_of(client, await rows_of(client)))["episodes"]]

        assert await learned() == [None, None]
        append_rows(
            folder / TOKEN_STATS, [stats(1, "a/0", [3, 4], -0.25, math.nan), stats(1, "b/0", [3, 5], -1.0, -2.0)]
        )
        noted = {"step": 1, "logprobs": [-0.25, None], "advantages": [0.5, 0.5]}
        assert await learned() == [noted, None]
        with (folder / TOKEN_STATS).open("ab") as file:
            file.write(b'{"v":1,"broken\n[]\n{"v":1,"episode_id":"a/0","logprobs":"%%"}\n')
        assert await learned() == [None, None]
        append_rows(folder / TOKEN_STATS, [stats(2, "a/0", [3, 4], -0.5, -1.0)])
        assert await learned() == [{**noted, "step": 2, "logprobs": [-0.5, -1.0]}, None]
        cut_steps(folder / TOKEN_STATS, 0)
        assert await learned() == [None, None]
