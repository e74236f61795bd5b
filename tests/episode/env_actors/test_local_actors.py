"""Local actors: what only processes of this machine have, and that nothing of them is left behind."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentenv._util.loop_thread import run_sync
from agentenv.episode.env_actors.actors import EnvActorConfig, made_agent
from agentenv.episode.env_actors.host import EnvSpec
from agentenv.episode.env_actors.local import LocalEnv, open_local_actors
from agentenv.episode.env_actors.process import Frames
from agentenv.errors import ContractError, InfraError
from tests.waits import is_alive, until

SCENE = Path(__file__).parent / "scene.py"
CONFIG = EnvActorConfig(restart_wait_s=0.01)


def scene(name="Scene"):
    return EnvSpec(f"{SCENE}:{name}")


async def test_frames_of_one_tick_arrive_in_order_whatever_the_pieces():
    received = []
    frames = Frames(lambda number, data: received.append((number, data)), lambda: None)
    sent = [(1, b""), (2, b"two"), (3, bytes(100_000))]

    class Wire:
        data = b""

        def is_closing(self):
            return False

        def write(self, data):
            self.data += data

    other = Frames(lambda number, data: None, lambda: None)
    wire = Wire()
    other.connection_made(wire)
    for number, data in sent:
        other.send(number, data)
    assert wire.data == b""
    await asyncio.sleep(0)
    for start in range(0, len(wire.data), 7):
        frames.data_received(wire.data[start : start + 7])
    assert received == sent


@pytest.mark.long
async def test_log_records_reach_the_loggers_of_this_process_and_prints_its_standard_error(caplog, capfd):
    async with open_local_actors(scene("Computes"), 1, CONFIG) as actors:
        agent = await made_agent(actors, {})
        with caplog.at_level(logging.WARNING):
            await agent.step({"label": "warn"})
        await agent.close()
    assert [(each.name, each.getMessage(), each.process) for each in caplog.records if each.name == "scene"] == [
        ("scene", "seen from warn", caplog.records[0].process)
    ]
    assert caplog.records[0].process != os.getpid()
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "printed\n")


@pytest.mark.long
async def test_no_process_is_left_when_the_actors_are_closed(tmp_path):
    async with open_local_actors(scene(), 2, CONFIG) as actors:
        pids = actors.pids
        agent = await made_agent(actors, {"marks": str(tmp_path)})
        blocked = asyncio.ensure_future(agent.step({"label": "block 600"}))
        await until((tmp_path / "blocked").exists)
    assert not any(map(is_alive, pids))
    with pytest.raises(InfraError, match=r"Scene\.step: expected a living process of --env_actors"):
        await blocked
    await agent.close()


@pytest.mark.long
async def test_what_cannot_be_sent_fails_its_own_call_only(tmp_path):
    async with open_local_actors(scene(), 1, CONFIG) as actors:
        agent = await made_agent(actors, {})
        with pytest.raises(ContractError, match=r"Scene\.step: expected data that can be pickled, got"):
            await agent.step({"label": lambda: 1})
        assert (await agent.step({"label": "play"})).reward == 1.0
        await agent.close()
        assert actors.num_restarts == 0


@pytest.mark.long
async def test_the_death_of_a_process_is_told_with_its_signal(tmp_path):
    async with open_local_actors(scene(), 1, CONFIG) as actors:
        agent = await made_agent(actors, {"marks": str(tmp_path)})
        with pytest.raises(InfraError, match=r"got a dead one: process \d+ ended with SIGKILL"):
            await agent.step({"label": "die"})
        await agent.close()


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "interrupted"])
async def test_processes_end_with_their_parent_also_if_an_agent_blocks(how, tmp_path):
    program = textwrap.dedent(f"""
        import asyncio, sys
        from agentenv.episode.env_actors.actors import EnvActorConfig, made_agent
        from agentenv.episode.env_actors.host import EnvSpec
        from agentenv.episode.env_actors.local import open_local_actors

        async def main():
            async with open_local_actors(EnvSpec({str(SCENE)!r} + ":Scene"), 1, EnvActorConfig()) as actors:
                agent = await made_agent(actors, {{"marks": {str(tmp_path)!r}}})
                print(*actors.pids, flush=True)
                await agent.step({{"label": "block 600"}})

        asyncio.run(main())  # without `if __name__ == "__main__"`: the processes do not run this file
    """)
    (tmp_path / "program.py").write_text(program)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as parent:
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        await until((tmp_path / "blocked").exists)
        assert os.getpgid(pid) == pid  # Ctrl-C in a terminal does not reach it
        os.kill(parent.pid, signal.SIGKILL if how == "killed" else signal.SIGINT)
        await asyncio.to_thread(parent.wait)
    await until(lambda: not is_alive(pid))


@pytest.mark.long
def test_local_actors_start_with_the_first_agent_and_again_after_they_were_closed():
    env = LocalEnv(scene("Computes"), {}, 1, CONFIG)

    async def step():
        agent = await env.make()
        result = await agent.step({"label": "play"})
        await agent.close()
        return int(result.info["pid"])

    first = run_sync(step())
    assert run_sync(step()) == first
    run_sync(env.close())
    assert not is_alive(first)
    second = run_sync(step())
    assert second != first
    run_sync(env.close())
    run_sync(env.close())
    assert not is_alive(second)


@pytest.mark.long
async def test_plain_methods_of_a_class_that_computes_take_turns_and_one_that_is_given_up_blocks_no_other(
    tmp_path,
):
    async with open_local_actors(scene("Computes"), 1, CONFIG) as actors:
        agents = [await made_agent(actors, {}) for _ in range(5)]
        hanging = asyncio.ensure_future(agents[0].step({"label": f"hang {tmp_path}"}))
        await until((tmp_path / "hangs").exists)
        hanging.cancel()
        results = await asyncio.gather(*(agent.step({"label": "overlap"}) for agent in agents[1:]))
        assert [result.reward for result in results] == [0.0] * 4
        for agent in agents:
            await agent.close()
