"""Images that clients upload: resumed, verified, named, bounded; IMG-26, IMG-27 (ADR 0047)."""

import asyncio
import gzip
import os
import time
from collections.abc import Callable

import pytest
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, qcow2_image
from services.imaged.tests.site_under_test import qcow2_with_backing as with_backing
from services.imaged.tests.upload_client import KIB, Client, receiving

from virtbus.imaged import uploads as module
from virtbus.imaged.core.expiry import ExpiryLimits
from virtbus.imaged.core.uploads import UploadLimits
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.store_space import MAX_PART_AGE_S
from virtbus.imaged.edge.uploaded_names import uploaded_names
from virtbus.schemas.container import ImagePullPolicy
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import parse_image_ref

IMAGE = qcow2_image(payload=300 * KIB)
MINE = parse_image_ref("mine/1")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_BYTES", 128 * KIB)


async def refused(client: Client) -> VirtbusError:
    with pytest.raises(VirtbusError) as caught:
        await client.send()
    return caught.value


def stored(node: Node, name: str = "mine/1") -> bytes | None:
    image = node.images.cached(parse_image_ref(name))
    return node.store.path(image.digest).read_bytes() if image is not None else None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_an_uploaded_image_has_its_name_until_it_is_deleted(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        image = await Client(uploads, IMAGE).send()
        assert image is not None
        assert image.digest == Client(uploads, IMAGE).digest
        assert node.parts() == []
    async with make_node() as node:
        assert stored(node) == IMAGE
        for policy in ImagePullPolicy:  # it has no source that could be asked
            assert (await node.images.ensure(MINE, policy=policy)).digest == image.digest
        pinned = parse_image_ref(f"mine/1@{image.digest}")
        assert (await node.images.ensure(pinned)).digest == image.digest
        few = ExpiryLimits(0.0, 1)
        names = uploaded_names(node.store)
        assert await node.disks.expire_names(frozenset(names), few) == ()
        _, _, gone = await node.images.forget("mine/1", node.disks.forget_images)
        assert gone == ("mine/1",)
        assert node.data() == []
        with pytest.raises(VirtbusError) as caught:
            await node.images.ensure(MINE)
        assert caught.value.reason == "image_unknown"


async def test_an_interrupted_upload_continues_after_a_stop(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        await Client(uploads, IMAGE).send(until=192 * KIB)
        assert stored(node) is None
    async with make_node() as node, receiving(node, threads) as uploads:
        client = Client(uploads, IMAGE)
        assert (await client.ask()).offset_bytes == 192 * KIB
        await client.send()
        assert stored(node) == IMAGE
        assert node.parts() == []


async def test_a_piece_at_a_wrong_offset_changes_nothing(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        client = Client(uploads, IMAGE)
        assert (await client.piece(64 * KIB)).offset_bytes == 0, "a gap"
        assert (await client.piece(0)).offset_bytes == 64 * KIB
        assert (await client.piece(0)).offset_bytes == 64 * KIB, "repeated"
        assert (await client.piece(128 * KIB)).offset_bytes == 64 * KIB, "a gap"
        assert (await client.piece(32 * KIB)).offset_bytes == 96 * KIB, "its second half is new"
        assert (await client.ask(len(IMAGE) - 1)).offset_bytes == 96 * KIB
        await client.send()
        assert stored(node) == IMAGE


async def test_pieces_on_the_way_are_written_in_the_order_of_arrival(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        client = Client(uploads, IMAGE, piece_bytes=16 * KIB)
        async with asyncio.TaskGroup() as group:
            for at in range(0, len(IMAGE), client.piece_bytes):
                group.create_task(client.piece(at))
        await client.send()
        assert stored(node) == IMAGE


@pytest.mark.parametrize(
    ("lies", "reason"),
    [
        ({"size_bytes": len(IMAGE) - 1}, "upload_beyond_size"),
        ({"digest": "sha256:" + "0" * 64}, "digest_mismatch"),
        ({"size_bytes": 65 * MIB}, "image_too_large"),
    ],
)
async def test_a_lie_about_the_file_is_refused_and_leaves_nothing(
    make_node: NodeMaker, threads: DiskThreads, lies: dict[str, object], reason: str
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        assert (await refused(Client(uploads, IMAGE, lies=lies))).reason == reason
        assert node.data() == []
        if reason != "upload_beyond_size":  # the client may still send the right piece
            await until(lambda: not uploads._running)
            assert node.parts() == []
        await Client(uploads, IMAGE).send()
        assert stored(node) == IMAGE


async def test_a_file_that_is_said_to_be_shorter_is_not_the_one_of_its_digest(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        short = Client(uploads, IMAGE[: 64 * KIB], lies={"digest": Client(uploads, IMAGE).digest})
        assert (await refused(short)).reason == "digest_mismatch"
        assert node.data() == []


async def test_the_last_requests_of_a_failed_upload_get_its_error_and_a_first_one_begins_again(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        client = Client(uploads, IMAGE, lies={"digest": "sha256:" + "0" * 64})
        state = await client.ask()
        while state.offset_bytes < len(IMAGE):
            state = await client.piece(state.offset_bytes)
        await until(lambda: not uploads._running)
        for late in (client.ask(len(IMAGE)), client.piece(0)):
            with pytest.raises(VirtbusError) as caught:
                await late
            assert caught.value.reason == "digest_mismatch"
        assert not uploads._running
        assert (await client.ask()).offset_bytes == 0


async def test_a_stalled_client_gives_its_place_up_and_continues_later(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, receiving(node, threads, rate_window_s=0.2) as uploads:
        client = Client(uploads, IMAGE)
        await client.send(until=192 * KIB)
        await until(lambda: not uploads._running)
        assert len(node.parts()) == 2, "the bytes and their note"
        assert (await client.ask()).offset_bytes == 192 * KIB


@pytest.mark.parametrize("account", ["CLIENT", "OTHER"])
async def test_two_clients_of_one_file_both_get_the_image(
    make_node: NodeMaker, threads: DiskThreads, account: str
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        first = Client(uploads, IMAGE, piece_bytes=48 * KIB)
        second = Client(uploads, IMAGE, name="mine/2", account=account)
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(one.send()) for one in (first, second)]
        images = [task.result() for task in sent]
        assert images[0] is not None
        assert images[1] is not None
        assert images[0].digest == images[1].digest
        assert stored(node) == stored(node, "mine/2") == IMAGE
        assert len(node.data()) == 1
        await until(lambda: not uploads._running)
        assert node.parts() == []


async def test_a_full_quota_refuses_an_upload_before_its_bytes(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    quota = 3 * len(IMAGE) // 2
    async with make_node(quota_bytes=quota) as node, receiving(node, threads) as uploads:
        await Client(uploads, IMAGE).send()
        other = qcow2_image(payload=300 * KIB)
        error = await refused(Client(uploads, other, name="mine/2"))
        assert (error.reason, error.code) == ("image_quota", Code.UNAVAILABLE)
        assert stored(node) == IMAGE, "an upload is not evicted: nobody could fetch it again"
        assert node.parts() == []
        await node.images.forget("mine/1", node.disks.forget_images)
        await Client(uploads, other, name="mine/2").send()
        assert stored(node, "mine/2") == other


async def test_a_name_keeps_its_meaning(make_node: NodeMaker, threads: DiskThreads) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        rules = "[[image]]\nname = 'ruled'\nurl = 'https://images.example/x'\n"
        (node.names_dir / "a.toml").write_text(rules)
        for name in ("ruled", "tiny"):
            error = await refused(Client(uploads, IMAGE, name=name))
            assert (error.reason, error.code) == ("image_name_taken", Code.CONFLICT)
        await Client(uploads, IMAGE).send()
        other = Client(uploads, qcow2_image(payload=0))
        assert (await refused(other)).reason == "image_name_taken"
        assert stored(node) == IMAGE
        second = Client(uploads, IMAGE, name="mine/2")
        assert (await second.ask()).image is not None, "the bytes are known: no transfer"
        assert stored(node, "mine/2") == IMAGE


async def test_of_two_uploads_of_one_name_one_gets_it(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        clients = [Client(uploads, qcow2_image(payload=KIB * n)) for n in (1, 2)]
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(outcome(client)) for client in clients]
        results = [task.result() for task in sent]
        (winner,) = [client for client, got in zip(clients, results, strict=True) if not got]
        assert sorted(results) == ["", "image_name_taken"]
        assert stored(node) == winner.data


async def outcome(client: Client) -> str:
    try:
        await client.send()
    except VirtbusError as error:
        return error.reason
    return ""


async def test_an_account_has_a_bounded_number_of_uploads(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    limits = UploadLimits(at_once=4, per_account=2)
    async with make_node() as node, receiving(node, threads, limits) as uploads:
        await Client(uploads, IMAGE).send()
        begun = Client(uploads, qcow2_image(payload=200 * KIB), name="mine/2")
        await begun.send(until=128 * KIB)
        third = Client(uploads, qcow2_image(payload=0), name="mine/3")
        error = await refused(third)
        assert (error.reason, error.code) == ("upload_limit", Code.EXHAUSTED)
        third.account = "OTHER"
        assert await third.send()
        await begun.send()
        known = Client(uploads, IMAGE, name="mine/4")
        assert (await refused(known)).reason == "upload_limit"


async def test_few_uploads_run_at_once_and_one_account_leaves_room(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        files = [qcow2_image(payload=100 * KIB) for _ in range(5)]
        many = [Client(uploads, data, name=f"mine/{n}") for n, data in enumerate(files)]
        for client in many[:3]:
            await client.piece(0)
        error = await refused(many[3])
        assert error.reason == "uploads_busy"
        assert error.body.after_ms is not None
        other = Client(uploads, files[4], name="theirs", account="OTHER")
        assert await other.send()
        assert await many[0].send()
        assert await many[3].send()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (with_backing(), "backing_file"),
        (b"\x1f\x8b" + bytes(5000), "compressed_invalid"),
        (b"COWD" + bytes(5000), "foreign_reference"),
    ],
)
async def test_contents_are_judged_as_those_of_a_fetched_file(
    make_node: NodeMaker, threads: DiskThreads, data: bytes, reason: str
) -> None:
    async with make_node() as node, receiving(node, threads) as uploads:
        assert (await refused(Client(uploads, data))).reason == reason
        await until(lambda: not uploads._running)
        assert (node.parts(), node.data()) == ([], [])


async def test_a_compressed_file_is_stored_as_its_content_and_known_by_both_digests(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    packed = gzip.compress(IMAGE)
    async with make_node() as node, receiving(node, threads) as uploads:
        client = Client(uploads, packed)
        image = await client.send()
        assert image is not None
        assert stored(node) == IMAGE
        for digest in (client.digest, image.digest):
            assert await node.images.ensure(parse_image_ref(f"mine/1@{digest}")) == image
        again = Client(uploads, packed, name="mine/2")
        assert (await again.ask()).image is not None


async def test_an_abandoned_upload_expires(make_node: NodeMaker, threads: DiskThreads) -> None:
    async with make_node() as node:
        async with receiving(node, threads) as uploads:
            await Client(uploads, IMAGE).send(until=192 * KIB)
            for path in (node.state / "images/part").iterdir():
                os.utime(path, (60, 60))
            assert node.store.space.drop_old_uploads() == 0, "its client is there"
        for path in (node.state / "images/part").iterdir():
            os.utime(path, (time.time() - MAX_PART_AGE_S - 60,) * 2)
        assert node.store.space.drop_old_uploads() == 1
        assert node.parts() == []
