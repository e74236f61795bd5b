"""A sandbox on a Ray cluster: one pool of zygotes on each node, shared by all processes of that node.

    ray.init()
    async with RaySandbox() as sandbox:  # in the driver, or in any actor or task
        result = await sandbox.run("print(6 * 7)")

The pool is a named actor, created by its first user. Programs run on the node of the caller, never across the network.
The actor outlives its creator and ends after some time without calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from agentenv._util.ray.cluster import kill_actor
from agentenv._util.ray.library import import_ray
from agentenv.sandbox.remote.host import Host
from agentenv.sandbox.remote.link import LinkLost, retrieve_exception, value_of
from agentenv.sandbox.remote.pipe import source_line
from agentenv.sandbox.remote.sandbox import RemoteSandbox
from agentenv.sandbox.types import ExecLimits, Isolation, SandboxUnavailable

START_S = 120.0
"""Time limit for a new actor to start and open its pool."""
WEDGED_S = 20.0
CANCEL_S = 15.0
_PING_S = 2.0
_MAX_CALLS = 20_000
"""Concurrent calls of an actor. A program that waits in the pool's queue occupies a call."""


class RaySandbox(RemoteSandbox):
    """A sandbox on this process's Ray node; needs `pip install 'agentenv-rl[ray]'`. For use from one event loop.

    Differences from LocalSandbox: `run_slots` is shared by all sandboxes with the same options, and when a process is
    killed, its programs started by `start` and `session` run on until their limits.
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
        """Configure a sandbox; `open` or the first execution connects to the pool.

        Args:
            min_isolation: weakest acceptable isolation.
            limits: default limits of executions.
            preimport: packages of the node that are imported in advance and available to programs.
            run_slots: number of concurrent executions on each node; the number of its cores if None.
            idle_s: seconds without calls after which a pool ends.
            namespace: Ray namespace of the pools; sandboxes with the same options share a pool.
        """
        super().__init__(limits=limits)
        self._options = {"min_isolation": str(min_isolation), "preimport": list(preimport), "run_slots": run_slots}
        self._idle_s = idle_s
        self._namespace = namespace
        self._link: ActorLink | None = None
        self._opening = asyncio.Lock()

    def reported_isolation(self, isolation: Isolation) -> Isolation:
        """Return `isolation`: the node is a machine like this one, not a second wall."""
        return isolation

    async def _acquire(self, tenant: str) -> ActorLink:
        async with self._opening:
            if self._link is not None and self._link.lost:
                await self._link.close()
                self._link = None
            if self._link is not None:
                return self._link
            # Connect to the actor of this node, which is created if it is missing.
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
                    level = await link.call("open", options=dict(self._options))
            except BaseException as error:
                await link.close()
                if isinstance(error, TimeoutError):
                    raise LinkLost(f"RaySandbox: expected a pool within {START_S:g} s, got none") from error
                raise
            link.opened = True
            self.isolation, self.layers = Isolation(level["isolation"]), tuple(level["layers"])
            self._link = link
            return link

    def _actor(self, ray: Any, node: str) -> Any:
        """Return the named actor. Ray creates exactly one, even for concurrent callers."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Another version of agentenv on this node gets its own pool.
        identity = json.dumps([self._options, self._idle_s]).encode() + source_line()
        digest = hashlib.sha256(identity).hexdigest()[:12]
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
        """Disconnect from the pool; other sandboxes may use it."""
        async with self._opening:
            link, self._link = self._link, None
            if link is not None:
                await link.close()


class NodeHost(Host):
    """The actor: a host that ends after `idle_s` seconds without calls."""

    def __init__(self, idle_s: float) -> None:
        super().__init__()
        self._idle_s = idle_s
        self._last_call_at = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def answer(self, number: Hashable, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run a method, as `Host.answer` does, and note the time of the call."""
        self._last_call_at = asyncio.get_running_loop().time()
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        answer = await super().answer(number, method, arguments)
        self._last_call_at = asyncio.get_running_loop().time()
        return answer

    async def ping(self) -> bool:
        """Return True; shows that the event loop is not blocked."""
        return True

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self.busy or loop.time() - self._last_call_at < self._idle_s:  # noqa: ASYNC110 -- waits for time to pass
            await asyncio.sleep(min(self._idle_s, 5.0))
        await self.aclose()
        ray = import_ray("RaySandbox")
        ray.kill(ray.get_runtime_context().current_actor)


class ActorLink:
    """A `Link` to the actor of a node."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self.lost: str | None = None
        """Reason why the link accepts no more calls; None while it does."""
        self.opened = False
        """True once the actor has answered. Pings start then."""
        self._ray = ray
        self._actor = actor
        self._name = name
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._watching = asyncio.ensure_future(self._watch())

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the actor's host, as `Link.call` describes."""
        if self.lost:
            raise LinkLost(self.lost)
        number = uuid.uuid4().hex
        answer = self._calls[number] = self._call_actor("answer", number, method, arguments)
        try:
            return value_of(await asyncio.shield(answer))
        except self._ray.exceptions.RayError as error:
            self.lose(f"{self._name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            raise LinkLost(str(self.lost)) from error
        except asyncio.CancelledError:
            # Let the actor stop the work of the call, and wait until it has.
            if not self.lost and not answer.done():
                self._call_actor("cancel", number)
                await asyncio.wait([answer], timeout=CANCEL_S)
                if not answer.done():
                    self.lose(f"{self._name}: expected it to end a program within {CANCEL_S:g} s, it is still running")
            raise
        finally:
            self._calls.pop(number, None)

    def _call_actor(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the actor. Ray's own future is never cancelled, because its client logs errors then."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(retrieve_exception)

        def copy_result(future: asyncio.Future[Any]) -> None:
            error = None if future.cancelled() else future.exception()
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(future.result())

        asyncio.wrap_future(getattr(self._actor, method).remote(*arguments).future()).add_done_callback(copy_result)
        return answer

    async def _watch(self) -> None:
        """Ping the actor while calls wait; kill an actor that does not answer."""
        while True:
            await asyncio.sleep(_PING_S)
            if not self._calls or not self.opened:
                continue
            pong = self._call_actor("ping")
            await asyncio.wait([pong], timeout=WEDGED_S)
            if not pong.done() or pong.exception():
                reason = type(pong.exception()).__name__ if pong.done() else f"no answer within {WEDGED_S:g} s"
                kill_actor(self._actor)
                self.lose(f"{self._name}: {reason}")
                return

    def lose(self, reason: str) -> None:
        """Accept no more calls and fail those that wait. Repeated calls have no effect."""
        if self.lost:
            return
        self.lost = reason
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(LinkLost(reason))
        self._watching.cancel()

    async def close(self) -> None:
        """Cancel the calls of this link and accept no more."""
        calls = dict(self._calls)
        if not self.lost:
            for number in calls:
                self._call_actor("cancel", number)
            if calls:
                await asyncio.wait(calls.values(), timeout=CANCEL_S)
        self.lose(f"{self._name}: closed")
        await asyncio.gather(self._watching, return_exceptions=True)
