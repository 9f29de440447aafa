"""Fifty VM pods at once, and the memory of `virtbus-cri` and its proxy, on a simulated node.

The calls are those of kubelet for each pod, through the proxy. The guests are simulated, so the
figures are those of the two processes and the bus, without QEMU.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from cri_api.v1 import api_pb2
from tests.bench.figures import Figure, median_of
from tests.bench.measures import pss_mib
from tests.chaos.simulated import Simulated, simulated

AT_ONCE, ALL = 50, 100
IMAGE = "virtlet.cloud/tiny"
START_S, CALL_S = 30.0, 60.0
SETTLE_S = 3.0


async def cri_pods() -> list[Figure]:
    """Return the figures; all processes are ended."""
    return await asyncio.to_thread(_on_a_platform)


def _on_a_platform() -> list[Figure]:
    with simulated(Simulated()) as platform, _runtimes(platform) as processes:
        return asyncio.run(_measured(platform, processes))


async def _measured(
    platform: Simulated, processes: dict[str, "subprocess.Popen[bytes]"]
) -> list[Figure]:
    async with _kubelet(platform) as call:
        image = (await call("PullImage", image={"image": IMAGE})).image_ref
        idle = {name: pss_mib(one.pid) for name, one in processes.items()}
        begun = time.perf_counter()
        took = await _started(call, image, range(AT_ONCE))
        whole_s = time.perf_counter() - begun
        await _started(call, image, range(AT_ONCE, ALL))
        await call("ListContainers")
        await asyncio.sleep(SETTLE_S)
        full = {name: pss_mib(one.pid) for name, one in processes.items()}
    figures = [
        Figure(f"{AT_ONCE} VM pods at once, all of them run", round(whole_s, 2), "s"),
        median_of(f"one of {AT_ONCE} VM pods at once", took, "s"),
    ]
    for name in processes:
        note = f"{idle[name]:.1f} MiB without pods"
        text = f"memory of {name}, {ALL} pods"
        figures.append(Figure(text, round(full[name], 1), "MiB PSS", note=note))
    return figures


async def _started(call: Any, image: str, numbers: range) -> list[float]:
    """Run pods at once; return the seconds of each."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_pod(call, image, number)) for number in numbers]
    return [task.result() for task in tasks]


async def _pod(call: Any, image: str, number: int) -> float:
    """Make the calls of kubelet for one pod; return their seconds."""
    begun = time.perf_counter()
    metadata = {"name": f"pod-{number}", "uid": f"uid-{number}", "namespace": "default"}
    config = {"metadata": metadata, "labels": {"io.kubernetes.pod.name": f"pod-{number}"}}
    ran = await call("RunPodSandbox", config=config, runtime_handler="virtbus")
    container = {
        "metadata": {"name": "vm"},
        "image": {"image": image, "user_specified_image": IMAGE},
        "linux": {"resources": {"memory_limit_in_bytes": 64 * 1024**2}},
    }
    made = await call(
        "CreateContainer",
        pod_sandbox_id=ran.pod_sandbox_id,
        config=container,
        sandbox_config=config,
    )
    await call("StartContainer", container_id=made.container_id)
    return time.perf_counter() - begun


@asynccontextmanager
async def _kubelet(platform: Simulated) -> AsyncIterator[Any]:
    """Yield a function that calls the proxy."""
    async with grpc.aio.insecure_channel(f"unix:{platform.run_dir}/criproxy.sock") as channel:

        async def call(name: str, **request: Any) -> Any:
            kind = "ImageService" if "Image" in name else "RuntimeService"
            method = api_pb2.DESCRIPTOR.services_by_name[kind].methods_by_name[name]
            asked = getattr(api_pb2, method.input_type.name)
            answered = getattr(api_pb2, method.output_type.name)
            send: Any = channel.unary_unary(f"/runtime.v1.{kind}/{name}")
            return answered.FromString(
                await send(asked(**request).SerializeToString(), timeout=CALL_S)
            )

        async with asyncio.timeout(START_S):
            while not await _ready(call):
                await asyncio.sleep(0.1)
        yield call


async def _ready(call: Any) -> bool:
    """Return True once the image can be pulled, which needs all parts."""
    try:
        await call("PullImage", image={"image": IMAGE})
    except grpc.aio.AioRpcError:
        return False
    return True


@contextmanager
def _runtimes(platform: Simulated) -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """Run `virtbus-cri`, the proxy, and a fake runtime of containers without pods."""
    fake = platform.base / "containers.sock"
    argvs = {
        "virtbus-cri": ["virtbus.cri", "--log-level", "WARNING"],
        "virtbus-criproxy": ["virtbus.criproxy", "--log-level", "ERROR"],
    }
    environ = {**os.environ, **platform.environ, "VIRTBUS_CONTAINER_RUNTIME": str(fake)}
    nobody = [sys.executable, "-m", "tests.bench.criproxy", str(fake), "0", "0"]
    running = [subprocess.Popen(nobody, env=environ)]
    found = {}
    try:
        for name, argv in argvs.items():
            found[name] = subprocess.Popen([sys.executable, "-m", *argv], env=environ)
            running.append(found[name])
        yield found
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(20)
