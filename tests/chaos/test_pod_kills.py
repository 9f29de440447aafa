"""Pods are created and deleted under kill -9 of each service: nothing of them stays."""

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from cri_api.v1 import api_pb2
from tests.chaos.simulated import Simulated, simulated
from tests.e2e.platform import HALT, Platform

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3600)]

SIMULATED, REAL = 1000, 50
AT_ONCE = {SIMULATED: 20, REAL: 5}
RUNTIME = "cri"
CALL_S, END_S = 30.0, 900.0
PAUSE_S = (1.0, 5.0)
"""The shortest and the longest time between two kills."""
FINAL = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
ENDED = "create its next attempt"
"""The text of a start whose guest did not start, or ended meanwhile."""

SWEEPS = {"VIRTBUS_SWEEP_INTERVAL_S": "2", "VIRTBUS_ORPHAN_GRACE_S": "5"}
"""A controller that is killed between a claim and its record leaves the claim to the sweep."""

Call = Callable[..., Awaitable[Any]]


class Node:
    """The services of a platform and `virtbus-cri`; one of them is killed again and again."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._socket = platform.run_dir / "cri.sock"
        self._runtime: subprocess.Popen[bytes] | None = None
        self.kills: Counter[str] = Counter()
        self._answered = 0

    def start(self) -> None:
        """Start `virtbus-cri`."""
        argv = [sys.executable, "-m", "virtbus.cri", "--log-level", "ERROR"]
        self._runtime = subprocess.Popen(argv, env=self._platform.environ)

    def kill(self, service: str) -> None:
        """Kill a service; it is started again."""
        self.kills[service] += 1
        if service == RUNTIME:
            self.end(signal.SIGKILL)
            self.start()
        elif pid := self._platform.pids().get(service):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End `virtbus-cri`."""
        if self._runtime is not None:
            self._runtime.send_signal(number)
            self._runtime.wait(30)
            self._runtime = None

    @asynccontextmanager
    async def kubelet(self) -> AsyncIterator[Call]:
        """Yield calls that are repeated until they succeed, as kubelet repeats them."""
        options = [("grpc.max_reconnect_backoff_ms", 500)]
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options) as channel:

            async def call(name: str, **request: Any) -> Any:
                kind = "ImageService" if "Image" in name else "RuntimeService"
                method = api_pb2.DESCRIPTOR.services_by_name[kind].methods_by_name[name]
                asked = getattr(api_pb2, method.input_type.name)(**request)
                answered = getattr(api_pb2, method.output_type.name)
                send: Any = channel.unary_unary(f"/runtime.v1.{kind}/{name}")
                said = ""
                try:
                    async with asyncio.timeout(END_S):
                        while True:
                            try:
                                body = await send(asked.SerializeToString(), timeout=CALL_S)
                                self._answered += 1
                                return answered.FromString(body)
                            except grpc.aio.AioRpcError as error:
                                said = f"{error.code().name}: {error.details()}"
                                if error.code() in FINAL or ENDED in said:
                                    raise
                            await asyncio.sleep(0.5)
                except TimeoutError:
                    raise AssertionError(f"{name} still fails: {said}") from None

            yield call

    async def strike(self, rng: random.Random, over: asyncio.Event) -> None:
        """Kill services until it is over; a slow machine gets time for a call between two kills."""
        services = (*sorted(self._platform.pids()), RUNTIME)
        while not over.is_set():
            before = self._answered
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), rng.uniform(*PAUSE_S))
            while self._answered == before and not over.is_set():
                await asyncio.sleep(0.1)
            if not over.is_set():
                await asyncio.to_thread(self.kill, rng.choice(services))


async def _pod(call: Call, number: int, image: str, rng: random.Random) -> None:
    """Run one pod from its sandbox to its removal; some are stopped first, as kubelet does."""
    metadata = {"name": f"pod-{number}", "uid": f"uid-{number}", "namespace": "default"}
    config = {"metadata": metadata, "labels": {"io.kubernetes.pod.name": f"pod-{number}"}}
    ran = await call("RunPodSandbox", config=config)
    starts, stops = rng.random() < 0.8, rng.random() < 0.5  # the others end before they start
    attempts = itertools.count()

    async def created() -> str:
        container = {
            "metadata": {"name": "vm", "attempt": next(attempts)},
            "image": {"image": image},
            "linux": {"resources": {"memory_limit_in_bytes": 64 * 1024**2}},
        }
        whole = {"pod_sandbox_id": ran.pod_sandbox_id, "sandbox_config": config}
        made: str = (await call("CreateContainer", config=container, **whole)).container_id
        return made

    container_id = await created()
    while starts and not await _started(call, container_id):
        container_id = await created()
    await asyncio.sleep(rng.uniform(0, 1))
    if stops:
        await call("StopContainer", container_id=container_id, timeout=0)
        await call("RemoveContainer", container_id=container_id)
    await call("StopPodSandbox", pod_sandbox_id=ran.pod_sandbox_id)
    await call("RemovePodSandbox", pod_sandbox_id=ran.pod_sandbox_id)


async def _started(call: Call, container_id: str) -> bool:
    """Start a container; return False if its guest has ended, as kubelet then sees it."""
    try:
        await call("StartContainer", container_id=container_id)
    except grpc.aio.AioRpcError as error:
        if ENDED in (error.details() or ""):
            return False
        raise
    return True


async def _live(node: Node, count: int, image: str, seed: int) -> None:
    """Run all pods, some at once, under kills."""
    over, numbers = asyncio.Event(), iter(range(count))
    async with node.kubelet() as call, asyncio.TaskGroup() as group:
        ref = (await call("PullImage", image={"image": image})).image_ref
        striking = group.create_task(node.strike(random.Random(seed), over))

        async def slot(own: int) -> None:
            rng = random.Random(f"{seed}/{own}")
            for number in numbers:
                await _pod(call, number, ref, rng)

        async with asyncio.TaskGroup() as slots:
            for own in range(AT_ONCE[count]):
                slots.create_task(slot(own))
        over.set()
        await striking
        for left in (await call("ListPodSandbox")).items:  # their call had no answer
            await call("RemovePodSandbox", pod_sandbox_id=left.id)
        assert not (await call("ListPodSandbox")).items
        assert not (await call("ListContainers")).containers


def _survived(platform: Platform, count: int, image: str, capsys: Any) -> None:
    seed = random.randrange(10**6)
    node = Node(platform)
    node.start()
    try:
        asyncio.run(_live(node, count, image, seed))
    finally:
        node.end()
        with capsys.disabled():
            sys.stdout.write(f"\n{count} pods, seed {seed}, kills: {dict(node.kills)}\n")
    platform.wait_whole()
    platform.learn_uids()
    platform.wait_quiet()
    platform.wait_no_keys()
    assert not list((platform.state_dir / "cri/pods").glob("*.json"))


def test_fifty_pods_under_kills_leave_nothing(
    patient: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    _survived(patient, REAL, f"virtlet.cloud/{HALT}", capsys)


def test_a_thousand_simulated_pods_under_kills_leave_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with simulated(Simulated(SWEEPS)) as platform:
        platform.quiet = platform.census()
        _survived(platform, SIMULATED, "virtlet.cloud/tiny", capsys)
