"""EnginePool: who serves what, and what happens when engines fail, hang, die and come back."""

import asyncio
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core.types import SamplingParams
from agentenv.engines import opening
from agentenv.engines.pool import EngineDead, EnginePool, EngineSlot, PoolPolicy, RequestDispatcher, Restarts
from agentenv.engines.scripted import ScriptedEngine
from agentenv.errors import ConfigError, EngineError, RunStopped
from agentenv.testing.tokenizers import CharTokenizer
from tests.waits import until

TOKENIZER = CharTokenizer()
SAMPLING = SamplingParams(max_tokens=8, seed=7)
QUICK = PoolPolicy(restart_wait_s=0.001, close_timeout_s=0.05)


class Fragile(ScriptedEngine):
    """A scripted engine that dies on demand, and remembers what was asked of it."""

    def __init__(self, script="ok", *, index=0, start=None, **kwargs):
        super().__init__(script if callable(script) else [script], TOKENIZER, **kwargs)
        self.index, self.on_start, self.dead, self.started = index, start, False, False
        self.calls = []

    async def start(self):
        self.started = True
        if self.on_start is not None:
            raise self.on_start

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        if self.dead:
            raise EngineDead("the process is gone.")
        completion = await super().generate(prompt_token_ids, sampling, request_id=request_id)
        if self.dead:
            raise EngineDead("the process is gone.")
        return completion

    async def score(self, token_ids):
        return [0.0] * len(token_ids)

    async def pause(self):
        self.calls.append("pause")

    async def resume(self):
        self.calls.append("resume")

    async def load_offer(self, offer, policy_version):
        await self.update_weights(offer, policy_version)

    async def update_weights(self, named_tensors, policy_version):
        if self.dead:
            raise EngineDead("the process is gone.")
        self.calls.append(list(named_tensors))
        self.policy_version = policy_version


def ask(pool, request_id, sampling=SAMPLING):
    return asyncio.ensure_future(pool.generate([1, 2], sampling, request_id=request_id))


def episodes(engine):
    return [request.request_id for request in engine.requests]


def hang(request):
    return asyncio.Event().wait()


# --- dispatch -------------------------------------------------------------------------------------------------------


async def test_requests_go_to_the_least_loaded_engine():
    engines = [Fragile(hang), Fragile(hang), Fragile(hang)]
    pool = EnginePool(engines, policy=QUICK)
    asked = [ask(pool, f"e{index}/0") for index in range(7)]
    await until(lambda: sum(len(engine.requests) for engine in engines) == 7)
    assert sorted(pool.in_flight) == [2, 2, 3]
    asked[0].cancel()
    await asyncio.wait([asked[0]])
    assert sum(pool.in_flight) == 6
    assert engines[0].num_cancelled == 1
    await pool.close()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_engines_that_answer_at_once_share_the_episodes():
    engines = [Fragile(), Fragile()]
    pool = EnginePool(engines)
    for index in range(10):
        await pool.generate([1], SAMPLING, request_id=f"e{index}/0")
    assert [len(engine.requests) for engine in engines] == [5, 5]


async def test_the_turns_of_an_episode_stay_at_their_engine():
    engines = [Fragile(latency_s=0.001), Fragile(latency_s=0.002), Fragile()]
    pool = EnginePool(engines)

    async def episode(index):
        for turn in range(5):
            await pool.generate([1], SAMPLING, request_id=f"task/{index}/{turn}")

    await asyncio.gather(*(episode(index) for index in range(12)))
    for engine in engines:
        assert set(Counter(request.episode_id for request in engine.requests).values()) == {5}


@pytest.mark.parametrize(("num_other", "stays"), [(2, True), (3, False)])
async def test_a_turn_leaves_its_engine_only_when_that_is_much_more_loaded(num_other, stays):
    def say(request):
        return "ok" if request.episode_id == "mine" else hang(request)

    engines = [Fragile(say), Fragile(say)]
    pool = EnginePool(engines, policy=PoolPolicy(max_skew=2, close_timeout_s=0.05))
    await pool.generate([1], SAMPLING, request_id="mine/0")
    home = engines[0] if engines[0].requests else engines[1]
    pool._dispatch._slots[home.index].in_flight += num_other
    await pool.generate([1], SAMPLING, request_id="mine/1")
    assert len(home.requests) == (2 if stays else 1)


async def test_an_engine_gets_no_more_than_its_share_at_once_and_the_rest_comes_in_order():
    engines, most = [Fragile(latency_s=0.001), Fragile(latency_s=0.001)], 0
    pool = EnginePool(engines, policy=PoolPolicy(max_in_flight=3))
    asked = [ask(pool, f"e{index}/0") for index in range(20)]
    while not all(task.done() for task in asked):
        most = max(most, *pool.in_flight)
        await asyncio.sleep(0)
    assert most == 3
    order = sorted(
        (request.request_id for engine in engines for request in engine.requests), key=lambda i: int(i[1:-2])
    )
    assert order == [f"e{index}/0" for index in range(20)]
    for engine in engines:
        assert episodes(engine) == sorted(episodes(engine), key=lambda i: int(i[1:-2]))


async def test_a_place_that_comes_together_with_the_cancellation_is_given_back():
    slot = EngineSlot(0, object())
    dispatch = RequestDispatcher([slot], max_in_flight=1, max_skew=0)
    await dispatch.enter("a")
    second = asyncio.ensure_future(dispatch.enter("b"))
    await asyncio.sleep(0)
    dispatch.leave(slot)
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled()
    assert slot.in_flight == 0


# --- failures -------------------------------------------------------------------------------------------------------


async def test_a_request_that_fails_on_one_engine_is_served_by_another_with_the_same_seed():
    engines = [Fragile(crash_at=0), Fragile()]
    pool = EnginePool(engines)
    completion = await pool.generate([1], SAMPLING, request_id="e/0")
    assert completion.token_ids
    assert engines[1].requests[0].sampling == SAMPLING
    assert pool.num_alive == 2


async def test_a_request_that_fails_on_two_engines_is_at_fault():
    engines = [Fragile(crash_at=range(100)), Fragile(crash_at=range(100)), Fragile()]
    pool = EnginePool(engines, make=lambda _: pytest.fail("nothing died"))
    for _ in range(5):
        with pytest.raises(EngineError, match="got a crash at call"):
            await pool.generate([1], SAMPLING, request_id="e/0")
        pool._dispatch._homes.clear()
        for slot in pool._slots:
            slot.num_served = slot.index
    assert pool.num_alive == 3


async def test_a_request_that_failed_over_goes_back_to_the_engine_that_is_left():
    first, second = Fragile(crash_at=0), Fragile(hang)
    pool = EnginePool([first, second], policy=PoolPolicy(max_in_flight=1))
    pool._slots[0].num_served = 1  # so that the first to come goes to the second engine
    hanging = ask(pool, "x/0")
    await until(lambda: second.requests)
    work = ask(pool, "y/0")
    await until(lambda: first.requests and pool._dispatch._waiting)
    second.dead = True
    pool._lose(pool._slots[1], second, "gone. ")
    assert (await asyncio.wait_for(work, 60)).token_ids
    assert (await asyncio.wait_for(hanging, 60)).token_ids
    assert Counter(episodes(first)) == {"y/0": 2, "x/0": 1}
    await pool.close()


async def test_a_single_living_engine_is_asked_once():
    engine = Fragile(crash_at=0)
    with pytest.raises(EngineError, match="a crash at call 0"):
        await EnginePool([engine]).generate([1], SAMPLING, request_id="e/0")
    assert len(engine.requests) == 1


async def test_an_engine_that_fails_where_others_do_not_is_replaced():
    bad, good, new = Fragile(crash_at=range(100)), Fragile(), Fragile()
    pool = EnginePool([bad, good], make=lambda _: new, policy=QUICK)
    for index in range(20):
        await pool.generate([1], SAMPLING, request_id=f"e{index}/0")
    await until(lambda: pool.num_alive == 2)
    assert len(bad.requests) == 3
    assert bad.closed
    assert new.started


async def test_an_answer_clears_the_record_of_failures():
    bad, good = Fragile(crash_at=[0, 1, 3, 4, 6, 7]), Fragile()
    pool = EnginePool([bad, good], policy=QUICK)
    for index in range(30):
        await pool.generate([1], SAMPLING, request_id=f"e{index}/0")
    assert pool.num_alive == 2


async def test_a_bug_in_an_engine_is_not_an_engine_failure():
    engines = [Fragile(lambda _: ZeroDivisionError("a bug")), Fragile()]
    with pytest.raises(ZeroDivisionError):
        await EnginePool(engines).generate([1], SAMPLING, request_id="e/0")
    with pytest.raises(ConfigError, match="no"):
        await EnginePool([Fragile(lambda _: ConfigError("no"))]).generate([1], SAMPLING, request_id="e/0")


async def test_a_call_that_its_engine_cancels_fails_over():
    async def cancel(request):
        raise asyncio.CancelledError

    engines = [Fragile(cancel), Fragile()]
    assert (await EnginePool(engines).generate([1], SAMPLING, request_id="e/0")).token_ids


# --- death ----------------------------------------------------------------------------------------------------------


async def test_one_death_more_than_allowed_stops_the_run():
    def make(index):
        engine = Fragile(index=index)
        engine.dead = True
        return engine

    pool = EnginePool(
        [make(0), Fragile(hang)], make=make, policy=PoolPolicy(max_restarts=2, restart_wait_s=0, close_timeout_s=0.05)
    )
    asked = [ask(pool, f"e{index}/0") for index in range(4)]
    async with asyncio.timeout(60):
        while pool._lost is None:
            asked.append(ask(pool, f"f{len(asked)}/0"))
            await asyncio.sleep(0.005)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert any(isinstance(outcome, RunStopped) for outcome in outcomes)
    assert all(isinstance(outcome, RunStopped | EngineError) for outcome in outcomes)
    with pytest.raises(RunStopped, match=r"at most 2 restarts of engines in an hour, got one more death \(engine 0\)"):
        await pool.generate([1], SAMPLING, request_id="late/0")
    await pool.close()


def test_restarts_of_long_ago_count_neither_against_the_run_nor_for_the_wait(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("agentenv.engines.pool.time", SimpleNamespace(monotonic=lambda: now_s))
    restarts = Restarts(2, wait_s=1.0, window_s=3600.0)
    assert [restarts.spend(0), restarts.spend(0), restarts.spend(0)] == [1.0, 2.0, None]
    now_s += 3601.0
    assert [restarts.spend(1), restarts.spend(0), restarts.spend(1)] == [1.0, 1.0, None]
    assert restarts.num == 4


async def test_without_a_factory_the_death_of_the_last_engine_stops_the_run():
    engines = [Fragile(), Fragile()]
    for engine in engines:
        engine.dead = True
    pool = EnginePool(engines, policy=QUICK)
    with pytest.raises(EngineDead):
        await pool.generate([1], SAMPLING, request_id="e/0")
    await until(lambda: pool._lost is not None)
    with pytest.raises(RunStopped, match="the death of the last one"):
        await pool.generate([1], SAMPLING, request_id="e/0")


async def test_a_factory_that_is_wrong_stops_the_run_with_its_message():
    engine = Fragile()
    engine.dead = True
    pool = EnginePool([engine], make=lambda _: Fragile(start=ConfigError("no such model")), policy=QUICK)
    with pytest.raises(RunStopped, match="no such model"):
        await pool.generate([1], SAMPLING, request_id="e/0")


async def test_an_engine_without_an_answer_for_too_long_counts_as_dead():
    stuck, new = Fragile(hang), Fragile()
    pool = EnginePool([stuck], make=lambda _: new, policy=PoolPolicy(stall_s=0.02, restart_wait_s=0.001))
    other = ask(pool, "other/0")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.generate([1], SAMPLING, request_id="e/0"), 0.05)
    async with asyncio.timeout(60):
        await other
    assert episodes(new) == ["other/0"]


async def test_a_long_request_at_an_engine_that_answers_others_is_not_a_stall():
    engine = Fragile(lambda r: hang(r) if r.episode_id == "long" else "ok")
    pool = EnginePool([engine], make=lambda _: pytest.fail("it lives"), policy=PoolPolicy(stall_s=0.01))
    long = ask(pool, "long/0")
    await until(lambda: engine.requests)
    await asyncio.sleep(0.02)
    await pool.generate([1], SAMPLING, request_id="short/0")
    long.cancel()
    await asyncio.wait([long])
    assert pool.num_alive == 1


# --- start, close, weights ------------------------------------------------------------------------------------------


async def test_an_engine_that_cannot_start_fails_the_start_and_closes_the_others():
    engines = [Fragile(), Fragile(start=ConfigError("no such model"))]
    with pytest.raises(ConfigError, match="no such model"):
        await EnginePool(engines).start()
    assert [engine.closed for engine in engines] == [True, True]


async def test_a_start_that_takes_too_long_is_an_error():
    class Slow(Fragile):
        async def start(self):
            await asyncio.Event().wait()

    with pytest.raises(EngineError, match=r"expected 1 engines within 0.01 s"):
        await EnginePool([Slow()], policy=PoolPolicy(start_timeout_s=0.01)).start()


async def test_close_fails_what_is_in_flight_and_what_waits_and_leaves_no_task():
    engines = [Fragile(hang), Fragile(hang)]
    pool = EnginePool(engines, policy=PoolPolicy(max_in_flight=1))
    asked = [ask(pool, f"e{index}/0") for index in range(5)]
    await until(lambda: all(engine.requests for engine in engines))
    await pool.close()
    await pool.close()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {EngineError}
    with pytest.raises(EngineError, match="got a closed one"):
        await pool.generate([1], SAMPLING, request_id="e/0")
    assert [engine.num_cancelled for engine in engines] == [1, 1]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_weights_go_to_all_engines_and_a_successor_must_have_them():
    engines = [Fragile(), Fragile()]
    versions = iter([0, 3])
    pool = EnginePool(engines, make=lambda _: Fragile(policy_version=next(versions)), policy=QUICK)
    await pool.update_weights(iter([("w", 1)]), 3)
    await pool.pause()
    assert [engine.calls for engine in engines] == [[[("w", 1)], "pause"]] * 2
    assert pool.policy_version == 3
    engines[0].dead = True
    await pool.update_weights([("w", 2)], 3)  # it dies of it, and is replaced
    await until(lambda: pool.num_alive == 2)
    assert pool.num_restarts == 2  # the first one had old weights
    successor = pool._slots[0].engine
    assert successor.calls == ["pause"]
    await pool.resume()
    assert successor.calls == ["pause", "resume"]
    await pool.close()


def test_a_pool_of_no_engines_is_refused():
    with pytest.raises(ValueError, match="at least one engine"):
        EnginePool([])


# --- invariants -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["ok", "ok", "ok", "fail", "die"]), max_size=12), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 3),
)
async def test_with_any_engine_behavior_every_request_has_one_outcome_and_nothing_is_left(
    plans, num_turns, max_in_flight, max_skew
):
    served = defaultdict(list)  # by which engines; an answer of one that died meanwhile is asked for again
    dead = set()
    running = Counter()

    def engine_of(plan, index):
        async def say(request):
            running[index] += 1
            assert running[index] <= max_in_flight
            try:
                await asyncio.sleep(0)
                doing = plan[request.call_index] if request.call_index < len(plan) else "ok"
                if doing == "fail":
                    raise EngineError("no.")
                if doing == "die":
                    dead.add(index)
                    raise EngineDead("gone.")
            finally:
                running[index] -= 1
            served[request.request_id].append(index)
            return request.request_id

        return Fragile(say, index=index)

    made = [engine_of(plan, index) for index, plan in enumerate(plans)]

    def make(_index):
        made.append(engine_of([], len(made)))
        return made[-1]

    policy = PoolPolicy(
        max_in_flight=max_in_flight, max_skew=max_skew, restart_wait_s=0, max_restarts=1000, close_timeout_s=1
    )
    pool = EnginePool(list(made), make=make, policy=policy)
    answers = failures = 0

    async def episode(index, turns):
        nonlocal answers, failures
        for turn in range(turns):
            request_id = f"e{index}/{turn}"
            try:
                completion = await pool.generate([1], SamplingParams(), request_id=request_id)
                assert TOKENIZER.decode(completion.token_ids).startswith(request_id)
                answers += 1
                assert served[request_id]
                assert dead.issuperset(served[request_id][:-1])
            except EngineError:
                failures += 1
                assert dead.issuperset(served[request_id])

    async with asyncio.timeout(60):
        await asyncio.gather(*(episode(index, turns) for index, turns in enumerate(num_turns)))
        assert answers + failures == sum(num_turns)
        assert sum(pool.in_flight) == 0
        await until(lambda: pool.num_alive == len(plans))
        await pool.close()
    assert not any(running.values())
    assert all(engine.closed for engine in made)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_an_engine_that_cannot_be_closed_holds_nobody_up(monkeypatch, caplog, how):
    class Stuck(Fragile):
        async def close(self):
            if how == "fails":
                raise EngineError("vllm: expected to close, got a dead process.")
            await asyncio.Event().wait()

    monkeypatch.setattr(opening, "make_engine", lambda *_, **__: Stuck())
    monkeypatch.setattr("agentenv.core.engine.CLOSE_S", 0.05)
    async with asyncio.timeout(60):
        async with opening.open_engine("scripted", "none", TOKENIZER):
            pass
    assert "Stuck: expected to close, got" in caplog.text
