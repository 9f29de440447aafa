"""Pull slots are fair: a slow or frequent user cannot hold them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from services.imaged.tests.records import record, uid, volume
from services.imaged.tests.registry_under_test import Registry, gz, tar
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_pulls import refused

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.core.pull_schedule import Pull, gives_way, least_rate_bytes_s, next_of
from virtbus.imaged.single_flight import Asker
from virtbus.schemas.image import parse_image_ref

LIMITS = TransferLimits()
KIB = 1024


def pull(order: int, host: str = "", namespace: str = "", yields: int = 0) -> Pull:
    return Pull(order, host or f"h{order}", frozenset({namespace or f"n{order}"}), yields)


def held(pull: Pull, held_s: float, moved_bytes: int = 0) -> Pull:
    return replace(pull, held_s=held_s, moved_bytes=moved_bytes)


# --- rules -------------------------------------------------------------------------------------
def test_half_of_the_slots_are_the_most_for_a_source_or_a_namespace() -> None:
    for first, second, third in (
        [pull(n, host="x") for n in range(3)],
        [pull(n, namespace="x") for n in range(3)],
    ):
        assert next_of([third], [first, second], 4) is None
        assert next_of([third, pull(3)], [first, second], 4) == pull(3)
        assert next_of([third], [first], 4) == third
    files = [Pull(n, "", frozenset({f"n{n}"})) for n in range(4)]
    assert next_of(files[3:], files[:3], 4) == files[3], "files of the node have no source"


def test_a_shared_pull_waits_for_the_best_of_its_namespaces() -> None:
    """The first request for a shared image must not delay the later ones."""
    running = [pull(n, namespace="many") for n in (0, 1)]
    shared = Pull(2, "h", frozenset({"many", "other"}))
    assert next_of([shared], running, 4) == shared


def test_the_minimum_rate_grows_with_the_queue() -> None:
    rates = [least_rate_bytes_s(n, LIMITS) for n in (1, 2, 4, 100)]
    assert rates == [512 * KIB, 1024 * KIB, 4096 * KIB, 4096 * KIB]


@pytest.mark.parametrize(
    ("held_s", "moved_bytes", "ends"),
    [(4, 0, False), (5, 0, True), (5, 5 * 512 * KIB - 1, True), (5, 5 * 512 * KIB, False),
     (59, 59 * MIB, False), (60, 60 * MIB, True)],
)  # fmt: skip
def test_a_slow_turn_ends_early_and_a_fast_one_later(
    held_s: float, moved_bytes: int, ends: bool
) -> None:
    slow = held(pull(0), held_s, moved_bytes)
    others = [held(pull(n), held_s, 1 << 40) for n in (1, 2, 3)]
    found = gives_way([pull(4)], [slow, *others], 4, LIMITS)
    assert (found == slow) == ends
    assert gives_way([], [slow, *others], 4, LIMITS) is None, "nobody waits"
    settled = replace(slow, settled=True)
    assert gives_way([pull(4)], [settled, *others], 4, LIMITS) in {None, *others}


def test_no_pull_yields_to_one_that_cannot_use_the_slot() -> None:
    running = [*(held(pull(n, namespace="a"), 999) for n in (0, 1)), pull(2), pull(3)]
    assert gives_way([pull(4, namespace="b")], running, 4, LIMITS) in running[:2]
    running = [held(pull(0), 999), pull(1), *(pull(n, namespace="a") for n in (2, 3))]
    assert gives_way([pull(4, namespace="a")], running, 4, LIMITS) is None


def test_a_pull_that_lost_its_slot_gets_a_longer_turn_but_not_against_newcomers() -> None:
    slow = held(pull(0, yields=3), 6)
    full = [slow, *(held(pull(n), 0, 1 << 40) for n in (1, 2, 3))]
    assert gives_way([pull(4, yields=3)], full, 4, LIMITS) is None
    assert gives_way([pull(4)], full, 4, LIMITS) == slow
    late = replace(slow, held_s=40)
    assert gives_way([pull(4, yields=3)], [late, *full[1:]], 4, LIMITS) == late
    assert next_of([pull(4, yields=1), pull(5)], [], 4) == pull(5)


PULLS = st.builds(
    Pull,
    st.integers(0, 1 << 20),
    st.sampled_from(["", "a", "b", "c"]),
    st.frozensets(st.sampled_from("xyz"), max_size=2),
    st.integers(0, 9),
    st.floats(0, 1e6),
    st.integers(0, 1 << 40),
    st.booleans(),
)


@given(st.lists(PULLS, max_size=8), st.lists(PULLS, max_size=8), st.integers(1, 6))
def test_slots_are_never_overbooked_and_never_idle_for_a_stranger(
    waiting: list[Pull], running: list[Pull], most: int
) -> None:
    found = next_of(waiting, running, most)
    if len(running) >= most:
        assert found is None
    elif any(one.host == "" and not one.namespaces for one in waiting):
        assert found is not None
    last = gives_way(waiting, running, most, LIMITS)
    if last is not None:
        assert not last.settled
        others = list(running)
        others.remove(last)
        assert next_of(waiting, others, most) is not None


# --- real transfers ----------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def trickling(host: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that is forever just fast enough for an empty queue; its requests."""
    asked: list[bytes] = []
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b'HTTP/1.1 200 OK\r\nETag: "v"\r\nContent-Length: 60000000\r\n\r\n')
            while not gone.is_set():
                writer.write(bytes(400))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await gone.wait()

    listener = await asyncio.start_server(answer, host, 0)
    try:
        yield f"http://{host}:{listener.sockets[0].getsockname()[1]}/", asked
    finally:
        gone.set()
        listener.close()


@contextlib.asynccontextmanager
async def pulled_slowly(node: Node, askers: dict[str, Asker]) -> AsyncIterator[None]:
    """Pulls by URL, in progress while the context is open."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(node.images.ensure(parse_image_ref(url), asker))
            for url, asker in askers.items()
        ]
        try:
            yield
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()


async def test_four_slow_servers_do_not_delay_a_healthy_one(
    make_node: NodeMaker, server: Web
) -> None:
    server.files["a"] = qcow2_image()
    async with contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(trickling(f"127.0.0.{n}")) for n in range(2, 6)]
        node = await stack.enter_async_context(make_node(rate_window_s=2, total_timeout_s=1000))
        askers = {url: Asker(namespace=f"evil{n}") for n, (url, _) in enumerate(slow)}
        await stack.enter_async_context(pulled_slowly(node, askers))
        while not all(asked for _, asked in slow):
            await asyncio.sleep(0.01)
        await node.disks.ensure(record(volume(server.url("a")), uid=uid(7)))


@pytest.mark.parametrize("shared", ["namespace", "host"])
async def test_the_many_pulls_of_one_leave_slots_to_others_at_once(
    make_node: NodeMaker, server: Web, shared: str
) -> None:
    server.files["a"] = qcow2_image()
    async with contextlib.AsyncExitStack() as stack:
        hosts = [f"127.0.0.{2 + n * (shared == 'namespace')}" for n in range(4)]
        slow = [await stack.enter_async_context(trickling(host)) for host in hosts]
        node = await stack.enter_async_context(make_node(rate_window_s=2, slow_turn_s=1000))
        askers = {
            url: Asker(namespace="evil" if shared == "namespace" else f"evil{n}")
            for n, (url, _) in enumerate(slow)
        }
        await stack.enter_async_context(pulled_slowly(node, askers))
        while sum(len(asked) for _, asked in slow) < 2:
            await asyncio.sleep(0.01)
        await node.images.ensure(parse_image_ref(server.url("a")), Asker(namespace="good"))
        assert sum(len(asked) for _, asked in slow) == 2


async def test_a_pull_that_lost_its_slot_resumes_its_partial_file(
    make_node: NodeMaker, server: Web
) -> None:
    data, resumed = qcow2_image(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        if "Range" in request.headers:
            resumed.set()
            return server.sent(request, data, {})
        response = web.StreamResponse(headers={"Content-Length": str(len(data)), "ETag": '"v1"'})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(data), 400):
                await response.write(data[at : at + 400])
                await asyncio.sleep(0.05)
        return response

    server.handlers["a"] = slow
    async with contextlib.AsyncExitStack() as stack:
        others = [await stack.enter_async_context(trickling(f"127.0.0.{n}")) for n in range(2, 6)]
        node = await stack.enter_async_context(make_node(rate_window_s=2, total_timeout_s=1000))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        source = parse_image_ref(server.url("a"))
        whole = group.create_task(node.images.ensure(source, Asker(namespace="good")))
        while not server.requests:
            await asyncio.sleep(0.01)
        askers = {url: Asker(namespace=f"evil{n}") for n, (url, _) in enumerate(others)}
        await stack.enter_async_context(pulled_slowly(node, askers))
        image = await whole
        assert resumed.is_set()
        assert node.store.path(image.digest).read_bytes() == data


# --- cost of reading an image ------------------------------------------------------------------
async def test_layers_that_take_long_for_their_size_are_refused(
    make_node: NodeMaker, server: Web
) -> None:
    registry = Registry(server)
    entries = [(f"etc/{n}", b"x") for n in range(2000)]
    registry.push("a", "1", gz(tar(*entries, ("disk/a", qcow2_image()))))
    limits = {"free_decode_s": 0.0, "least_decode_bytes_s": 1 << 40}
    async with make_node(registries=registry.known, **limits) as node:
        error = await refused(node.images, registry.ref("a:1"))
        assert error.reason == "layer_invalid"
        assert "CPU time" in str(error)
        assert node.tree() == []
    async with make_node(registries=registry.known) as node:
        await node.images.ensure(parse_image_ref(registry.ref("a:1")))


async def test_all_layers_together_expand_to_no_more_than_the_largest_image(
    make_node: NodeMaker, server: Web
) -> None:
    registry = Registry(server)
    zeros = gz(tar(("etc/zeros", bytes(40 * MIB))))
    other = gz(tar(("etc/more", bytes(40 * MIB))))
    registry.push("a", "1", gz(tar(("disk/a", qcow2_image()))), other, zeros)
    async with make_node(registries=registry.known) as node:
        error = await refused(node.images, registry.ref("a:1"))
        assert error.reason == "layer_invalid"
        assert "in all" in str(error)
