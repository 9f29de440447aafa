"""The volumes of a fleet from its watch, and readers of VMs that meet volumes' keys."""

import asyncio

import pytest
from services.controller.tests.fleets import uid
from services.controller.tests.test_vm_api import played
from services.controller.tests.virtual import World, settle
from services.controller.tests.volumes import volume

from virtbus.controller.core.unreadable import Unreadable
from virtbus.controller.core.vm_keys import StoredVolume, read_vm_key
from virtbus.controller.core.volumes import Volumes
from virtbus.schemas import subjects
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.wire import encode

DATA = subjects.volume_record("default", "data")


def put(cache: Volumes, one: VolumeRecord, revision: int) -> None:
    cache.put(subjects.volume_record(one.namespace, one.name), encode(one), revision)


def cached(made: World) -> Volumes:
    (controller,) = made.controllers.values()
    return controller._fleet.volumes


def test_a_volume_is_known_by_name_and_counted_by_namespace() -> None:
    cache = Volumes()
    put(cache, volume(1), 5)
    put(cache, volume(2, namespace="shop"), 6)
    assert cache.get("default", "data") == StoredVolume(volume(1), 5)
    assert (cache.count("default"), cache.count("shop"), cache.count()) == (1, 1, 2)
    assert [held.record.uid for held in cache.listed(None, {})] == [uid(1), uid(2)]


def test_a_volume_is_listed_by_namespace_and_labels() -> None:
    cache = Volumes()
    put(cache, volume(1, labels={"tier": "db"}), 5)
    put(cache, volume(2, "logs"), 6)
    put(cache, volume(3, "data", namespace="shop", labels={"tier": "db"}), 7)
    assert [held.record.uid for held in cache.listed("default", {"tier": "db"})] == [uid(1)]


def test_an_older_volume_never_replaces_a_newer_one() -> None:
    cache = Volumes()
    put(cache, volume(1, generation=2), 6)
    put(cache, volume(1, generation=1), 5)
    cache.purge(DATA, 4)
    held = cache.get("default", "data")
    assert held is not None
    assert held.record.generation == 2
    assert cache.count("default") == 1


def test_our_own_write_does_not_bring_back_a_purged_volume() -> None:
    cache = Volumes()
    put(cache, volume(1), 5)
    cache.purge(DATA, 7)
    cache.apply(StoredVolume(volume(1), 5))
    assert cache.get("default", "data") is None
    assert cache.count("default") == 0
    cache.apply(StoredVolume(volume(2), 8))
    assert cache.count("default") == 1


def test_the_uid_of_a_replaced_volume_is_forgotten() -> None:
    cache = Volumes()
    put(cache, volume(1, deleting=True), 5)
    put(cache, volume(2), 6)  # a list after an outage contains no purge marker
    assert cache.of_uid(uid(1)) is None
    assert cache.of_uid(uid(2)) == cache.get("default", "data")
    assert (cache.count("default"), cache.deleting) == (1, set())


@pytest.mark.parametrize("name", ["web", "a", "0", "x" * 63])
def test_a_volumes_key_is_never_read_as_a_claim(name: str) -> None:
    one = volume(1, name)
    assert read_vm_key(subjects.volume_record("default", name), encode(one)) == one


def test_an_unreadable_volume_is_called_a_volume() -> None:
    assert Unreadable(DATA, 1, 1, "invalid", "why").kind == "volume"


@played()
async def test_the_watch_delivers_volumes_and_their_ends(made: World) -> None:
    revision = await made.host.put(DATA, encode(volume(1)), expect=0)
    await settle()
    assert cached(made).get("default", "data") == StoredVolume(volume(1), revision)
    await made.host.purge(DATA, expect=revision, marker_ttl_s=60)
    await settle()
    assert cached(made).get("default", "data") is None


@played()
async def test_a_volume_named_like_a_vm_is_no_claim_of_its_name(made: World) -> None:
    """Neither the sweep nor a create of a VM meets the volume."""
    await made.host.put(subjects.volume_record("default", "web"), encode(volume(9, "web")))
    await settle()
    assert (await made.ask("create", name="web", image="tiny", uid=uid(1)))["created"]
    await asyncio.sleep(300)  # sweeps of orphans
    entry = await made.client.get(subjects.volume_record("default", "web"))
    assert entry is not None
    assert entry.value == encode(volume(9, "web"))
    listed = await made.ask("list")
    assert [vm["uid"] for vm in listed["items"]] == [uid(1)]


@played()
async def test_an_unreadable_volume_stops_nobody_and_is_an_alarm(made: World) -> None:
    await made.host.put(DATA, b"\xc1 no msgpack")
    await settle()
    assert (await made.ask("create", name="web", image="tiny", uid=uid(1)))["created"]
    (alarm,) = [one for one in (await made.ask("status", "bus"))["alarms"] if DATA in one]
    assert "cannot be read" in alarm
    await made.host.put(DATA, encode(volume(1)))
    await settle()
    assert cached(made).get("default", "data") is not None
    assert DATA not in str((await made.ask("status", "bus")).get("alarms"))


@played()
async def test_a_rebuild_reads_past_volumes(made: World) -> None:
    await made.host.put(DATA, encode(volume(1)))
    await settle()
    answer = await made.ask("rebuild", "bus", dry_run=True)
    assert "vms" not in answer
