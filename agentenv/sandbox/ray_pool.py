"""Programs on a Ray cluster: one pool of zygotes on each node, which everybody on that node shares.

    ray.init()
    async with RaySandbox() as sandbox:  # in the driver, or in any actor or task
        result = await sandbox.run("print(6 * 7)")

The pool is an actor that is found by its name, or made; programs run where they are asked for, never across the
network. It outlives who made it, and ends by itself when nobody has asked it for anything for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import uuid
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from agentenv.ray_import import import_ray
from agentenv.sandbox._remote import RemoteSandbox
from agentenv.sandbox._remote_host import Host
from agentenv.sandbox._remote_link import LinkLost, seen, value_of
from agentenv.sandbox._remote_pipe import source_line
from agentenv.sandbox.types import ExecLimits, Isolation, SandboxUnavailable

START_S = 120.0
"""For a new actor to be there, and its pool to be open."""
WEDGED_S = 20.0
CANCEL_S = 15.0
_PING_S = 2.0
_MAX_CALLS = 20_000
"""At a time: what waits in the pool's queue waits in a call."""


class RaySandbox(RemoteSandbox):
    """The pool of the Ray node that this process is on; needs `pip install 'agentenv[ray]'`. Used from one event loop.

    What differs from LocalSandbox: `run_slots` are shared by all who ask with the same options, and a process that
    is killed leaves what it started by `start` and `session` to their limits.
    """

    backend = "ray"

    def __init__(
        self,
        *,
        min_isolation: Isolation = Isolation.LANDLOCK,
        limits: ExecLimits | None = None,
        preimport: Sequence[str] = (),
        run_slots: int | None = None,
        idle_s: float = 600.0,
        namespace: str = "agentenv",
    ) -> None:
        """Nothing is started before the first execution, or `open`.

        Args:
            min_isolation: refuse to run with less.
            limits: of executions that name none.
            preimport: packages of the node that programs may import, and find imported already.
            run_slots: executions at a time, on each node; as many as it has cores when None.
            idle_s: after which a pool ends that nobody asked for anything.
            namespace: Ray's, in which pools are found: everybody with the same options shares one.
        """
        super().__init__(limits=limits)
        self._options = {"min_isolation": str(min_isolation), "preimport": list(preimport), "run_slots": run_slots}
        self._idle_s = idle_s
        self._namespace = namespace
        self._link: ActorLink | None = None
        self._opening = asyncio.Lock()

    def seen(self, isolation: Isolation) -> Isolation:
        """The node's own: it is a machine like this one."""
        return isolation

    async def _acquire(self, tenant: str) -> ActorLink:
        async with self._opening:
            if self._link is not None and self._link.lost:
                await self._link.close()
                self._link = None
            if self._link is None:
                self._link = await self._linked()
            return self._link

    async def _linked(self) -> ActorLink:
        """A link to this node's actor, which is made if it is not there.

        Raises:
            SandboxUnavailable: no Ray runs, or the node gives no isolation.
            LinkLost: the actor did not come up.
        """
        ray = import_ray("RaySandbox")
        if not ray.is_initialized():
            raise SandboxUnavailable("RaySandbox: expected a running Ray, got none. Call ray.init() first")
        node = ray.get_runtime_context().get_node_id()
        try:
            actor = await asyncio.to_thread(self._actor, ray, node)
        except (ray.exceptions.RayError, ValueError, RuntimeError) as error:
            raise LinkLost(f"RaySandbox: {type(error).__name__}: {error}") from error
        link = ActorLink(ray, actor, f"pool of node {node[:8]}")
        try:
            async with asyncio.timeout(START_S):
                found = await link.call("open", options=dict(self._options))
        except BaseException as error:
            await link.close()
            if isinstance(error, TimeoutError):
                raise LinkLost(f"RaySandbox: expected a pool within {START_S:g} s, got none") from error
            raise
        link.opened = True
        self.isolation, self.layers = Isolation(found["isolation"]), tuple(found["layers"])
        return link

    def _actor(self, ray: Any, node: str) -> Any:
        """The actor of that name: Ray sees to it that there is one, whoever asks at the same time."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Another source of ours on this node gets a pool of its own.
        kind = json.dumps([self._options, self._idle_s]).encode() + source_line()
        digest = hashlib.sha256(kind).hexdigest()[:12]
        return (
            ray.remote(NodeHost)
            .options(
                name=f"agentenv-sandbox-{digest}-{node}",
                namespace=self._namespace,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_concurrency=_MAX_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(self._idle_s)
        )

    async def _shut(self) -> None:
        """Leave the pool, which is not ours alone."""
        async with self._opening:
            link, self._link = self._link, None
            if link is not None:
                await link.close()


class NodeHost(Host):
    """The actor: a host that ends when nobody has asked it for anything."""

    def __init__(self, idle_s: float) -> None:
        super().__init__()
        self._idle_s = idle_s
        self._asked = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def answer(self, number: Hashable, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See `Host.answer`."""
        self._asked = asyncio.get_running_loop().time()
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        answer = await super().answer(number, method, arguments)
        self._asked = asyncio.get_running_loop().time()
        return answer

    async def ping(self) -> bool:
        """Answered by an event loop that is not held up."""
        return True

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self.busy or loop.time() - self._asked < self._idle_s:  # noqa: ASYNC110 -- it is time that is waited for
            await asyncio.sleep(min(self._idle_s, 5.0))
        await self.aclose()
        ray = import_ray("RaySandbox")
        ray.kill(ray.get_runtime_context().current_actor)


class ActorLink:
    """Calls of the actor of a node."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self.lost: str | None = None
        """Why it takes no more calls."""
        self.opened = False
        """It has answered once: from then on it is expected to."""
        self._ray = ray
        self._actor = actor
        self._name = name
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._watching = asyncio.ensure_future(self._watch())

    async def call(self, method: str, **arguments: Any) -> Any:
        """See `Link.call`."""
        if self.lost:
            raise LinkLost(self.lost)
        number = uuid.uuid4().hex
        answer = self._calls[number] = self._asked("answer", number, method, arguments)
        try:
            return value_of(await asyncio.shield(answer))
        except self._ray.exceptions.RayError as error:
            self.lose(f"{self._name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            raise LinkLost(str(self.lost)) from error
        except asyncio.CancelledError:
            await self._cancel(number, answer)
            raise
        finally:
            self._calls.pop(number, None)

    async def _cancel(self, number: str, answer: asyncio.Future[Any]) -> None:
        """Have the actor end what it does for a call, and wait for it to say so."""
        if not self.lost and not answer.done():
            self._asked("cancel", number)
            await asyncio.wait([answer], timeout=CANCEL_S)
            if not answer.done():
                self.lose(f"{self._name}: expected it to end a program within {CANCEL_S:g} s, it did not")

    def _asked(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """What a method of the actor gives. Ray's own future is never cancelled: its client complains about it."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(seen)

        def hand_over(given: asyncio.Future[Any]) -> None:
            """From Ray's future to ours, if anybody still asks."""
            error = None if given.cancelled() else given.exception()
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(given.result())

        asyncio.wrap_future(getattr(self._actor, method).remote(*arguments).future()).add_done_callback(hand_over)
        return answer

    async def _watch(self) -> None:
        """Ask after it while it has something to do; one that does not answer is ended."""
        while True:
            await asyncio.sleep(_PING_S)
            if not self._calls or not self.opened:
                continue
            pong = self._asked("ping")
            await asyncio.wait([pong], timeout=WEDGED_S)
            if not pong.done() or pong.exception():
                said = type(pong.exception()).__name__ if pong.done() else f"no answer within {WEDGED_S:g} s"
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.kill(self._actor)
                self.lose(f"{self._name}: {said}")
                return

    def lose(self, reason: str) -> None:
        """Take no more calls, and tell who waits; again is harmless."""
        if self.lost:
            return
        self.lost = reason
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(LinkLost(reason))
        self._watching.cancel()

    async def close(self) -> None:
        """End what was asked for here, and take no more calls."""
        calls = dict(self._calls)
        if not self.lost:
            for number in calls:
                self._asked("cancel", number)
            if calls:
                await asyncio.wait(calls.values(), timeout=CANCEL_S)
        self.lose(f"{self._name}: closed")
        await asyncio.gather(self._watching, return_exceptions=True)
