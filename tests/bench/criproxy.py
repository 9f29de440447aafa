"""The time that the proxy of the container runtimes adds to a call, against a direct call.

Both runtimes are fakes in processes of their own, and answer at once. So the difference is the
proxy's alone. A direct list has as many containers as both runtimes together.
"""

import asyncio
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from cri_api.v1 import api_pb2
from tests.bench.figures import Figure

from virtbus.criproxy.core.entries import framed

PODS = 100
"""Containers of each runtime."""
BOUND_MS = 1.0
CALLS = ("Version", "ContainerStatus", "ListContainers")
OTHER_ORDER = "ListContainers in another order"
"""Runtimes in Go write a list, and the maps in it, in another order each time."""
ORDERS = 16
_ORDER = (("order", "another"),)
"""The metadata that asks the fake for another order; the proxy passes it on."""
EMPTY = ("ListPodSandbox", "ListImages", "ListContainerStats", "ListPodSandboxStats")
"""Lists of the fake that have nothing."""
_START_S = 30.0


async def criproxy(runs: int) -> list[Figure]:
    """Return the median of the paired differences of each call, in milliseconds."""
    return await asyncio.to_thread(_measure, runs * 25)


def _measure(pairs: int) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="virtbus-bench-") as name, _node(Path(name)) as sockets:
        channels = {kind: grpc.insecure_channel(f"unix:{path}") for kind, path in sockets.items()}
        try:
            # kubelet lists before all else, and the proxy then knows where each container is.
            first: Any = channels["proxy"].unary_unary(_path("ListContainers"))
            first(b"", timeout=10)
            time.sleep(1)
            return [_figure(call, channels, pairs) for call in (*CALLS, OTHER_ORDER)]
        finally:
            for channel in channels.values():
                channel.close()


def _figure(call: str, channels: dict[str, grpc.Channel], pairs: int) -> Figure:
    path = _path(call.partition(" ")[0])
    metadata = _ORDER if call == OTHER_ORDER else ()
    about = api_pb2.ContainerStatusRequest(container_id=f"{7:064x}").SerializeToString()
    body = about if call == "ContainerStatus" else b""
    direct: Any = channels["direct"].unary_unary(path)
    proxied: Any = channels["proxy"].unary_unary(path)
    took: list[tuple[float, float]] = []
    for _ in range(pairs):
        begun = time.perf_counter()
        direct(body, timeout=10, metadata=metadata)
        between = time.perf_counter()
        proxied(body, timeout=10, metadata=metadata)
        took.append((between - begun, time.perf_counter() - between))
    added = [(through - past) * 1000 for past, through in took]
    quarters = statistics.quantiles(added, n=4)
    past_ms = statistics.median(past for past, _ in took) * 1000
    return Figure(
        f"criproxy adds to {call}",
        round(statistics.median(added), 3),
        "ms",
        BOUND_MS,
        pairs,
        round(quarters[0], 3),
        round(quarters[2], 3),
        f"a direct call takes {past_ms:.2f} ms; {PODS} containers in each runtime",
    )


def _path(call: str) -> str:
    return f"/runtime.v1.RuntimeService/{call}"


@contextmanager
def _node(folder: Path) -> Iterator[dict[str, Path]]:
    """Run three fake runtimes and the proxy; yield the sockets `direct` and `proxy`."""
    fakes = {"containers": (0, PODS), "vms": (PODS, PODS), "direct": (0, 2 * PODS)}
    environ = {
        **os.environ,
        "VIRTBUS_STATE_DIR": str(folder / "state"),
        "VIRTBUS_RUN_DIR": str(folder),
        "VIRTBUS_CONTAINER_RUNTIME": str(folder / "containers"),
        "VIRTBUS_VM_RUNTIME": str(folder / "vms"),
    }
    argvs = [
        [sys.executable, "-m", "tests.bench.criproxy", str(folder / name), str(first), str(count)]
        for name, (first, count) in fakes.items()
    ]
    argvs.append([sys.executable, "-m", "virtbus.criproxy", "--log-level", "ERROR"])
    running = [subprocess.Popen(argv, env=environ) for argv in argvs]
    sockets = {name: folder / name for name in fakes} | {"proxy": folder / "criproxy.sock"}
    try:
        deadline = time.monotonic() + _START_S
        while not all(path.is_socket() for path in sockets.values()):
            assert time.monotonic() < deadline, "the processes did not start"
            time.sleep(0.05)
        yield {"direct": sockets["direct"], "proxy": sockets["proxy"]}
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(20)


class _Fake(grpc.GenericRpcHandler):
    """A runtime whose answers are made before the first call."""

    def __init__(self, first: int, count: int) -> None:
        listed = [_container(number) for number in range(first, first + count)]
        status = api_pb2.ContainerStatus(id=f"{7:064x}", state=api_pb2.CONTAINER_RUNNING)
        answers = (
            api_pb2.VersionResponse(runtime_name="fake"),
            api_pb2.ContainerStatusResponse(status=status),
            api_pb2.ListContainersResponse(containers=listed),
        )
        self._answers = dict(zip(CALLS, (one.SerializeToString() for one in answers), strict=True))
        self._answers |= dict.fromkeys(EMPTY, b"")
        rng = random.Random(1)
        self._orders = itertools.cycle([_shuffled(listed, rng) for _ in range(ORDERS)])

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        answer = self._answers.get(str(handler_call_details.method).rpartition("/")[2])
        if answer is None:
            return None
        if set(_ORDER) & set(handler_call_details.invocation_metadata or ()):
            answer = next(self._orders)

        async def single(_: bytes, __: Any) -> bytes:
            return answer

        return grpc.unary_unary_rpc_method_handler(single)


def _container(number: int) -> api_pb2.Container:
    """Return a container as kubelet makes it."""
    kept = {f"io.kubernetes.container.property-{one}": "value" * 8 for one in range(5)}
    return api_pb2.Container(
        id=f"{number:064x}",
        pod_sandbox_id=f"{number + 10_000:064x}",
        metadata=api_pb2.ContainerMetadata(name="main"),
        image=api_pb2.ImageSpec(image="registry.example/web:1"),
        image_ref=f"sha256:{number:064x}",
        state=api_pb2.CONTAINER_RUNNING,
        created_at=1,
        labels=kept,
        annotations=kept,
    )


def _shuffled(listed: list[api_pb2.Container], rng: random.Random) -> bytes:
    """Return a list as a runtime in Go may write it: elements and their maps in any order."""
    answer = b""
    for one in rng.sample(listed, len(listed)):
        rest = api_pb2.Container()
        rest.CopyFrom(one)
        for name in ("labels", "annotations"):
            rest.ClearField(name)
        raw = rest.SerializeToString()
        for name in ("labels", "annotations"):
            entries = list(getattr(one, name).items())
            for key, text in rng.sample(entries, len(entries)):
                alone: Any = {name: {key: text}}
                raw += api_pb2.Container(**alone).SerializeToString()
        answer += framed(raw)
    return answer


async def _serve(path: str, first: int, count: int) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([_Fake(first, count)])
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
