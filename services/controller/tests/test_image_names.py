"""Image names as a client sees them: a real controller over the fake bus."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from services.controller.tests.fleets import uid
from services.controller.tests.test_images import told
from services.controller.tests.test_owners import Asking
from services.controller.tests.test_unreadable import DAMAGES, damage
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, run, settle, world

from virtbus.bus.client.ports import Endpoint, EntryKind, Request, ServiceInfo
from virtbus.bus.provisioning import permissions
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.unreadable import Unreadable
from virtbus.schemas import subjects
from virtbus.schemas.container import ImagePullPolicy
from virtbus.schemas.image import ImageTarget
from virtbus.schemas.image_name_api import ImageNameView
from virtbus.schemas.node_rpc import PullImage
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode, validate

URL = "https://images.example/a.qcow2"
OTHER = "https://images.example/b.qcow2"
DIGEST = "sha256:" + "5e" * 32
NAME = "debian/12"
KEY = subjects.image_name("default", NAME)
VERBS = ("set", "get", "list", "delete")


async def name(made: World, url: str = URL, **more: Any) -> ImageNameView:
    spec = {"url": url} | {
        key: more.pop(key) for key in ("digest", "transport", "pull_policy") if key in more
    }
    asked = {"name": NAME, "spec": spec} | more
    return validate(ImageNameView, await made.ask("set", "imagename", **asked))


async def vm(made: World, number: int = 1, image: str = NAME, **more: Any) -> VmRecord:
    """Make a VM and return its record."""
    await made.ask("create", name=f"vm-{number}", image=image, uid=uid(number), **more)
    stored = await made.stored(uid(number))
    assert stored is not None
    return stored


async def kinds(made: World, of: str) -> list[str]:
    found = await made.client.history(subjects.events(of))
    return [message.subject.split(".", 4)[4] for message in found]


# --- verbs ---------------------------------------------------------------------------------
@played()
async def test_a_name_is_set_shown_changed_and_deleted(made: World) -> None:
    first = await name(made, digest=DIGEST, transport="corp", pull_policy="Always")
    assert (first.namespace, first.generation, first.spec.digest) == ("default", 1, DIGEST)
    assert validate(ImageNameView, await made.ask("get", "imagename", name=NAME)) == first
    second = await name(made, OTHER)
    assert (second.uid, second.generation, second.spec.digest) == (first.uid, 2, None)
    assert second.changed_ns >= first.changed_ns
    gone = await made.ask("delete", "imagename", name=NAME)
    assert gone == {"namespace": "default", "name": NAME, "uid": first.uid}
    for verb in ("get", "delete"):
        error = await refused(made.ask(verb, "imagename", name=NAME))
        assert (error.code, error.reason) == (404, "image_name_not_found")
    assert await kinds(made, first.uid) == ["imagename.set", "imagename.set", "imagename.deleted"]
    again = await name(made)
    assert (again.generation, again.uid != first.uid) == (1, True)


@played()
async def test_the_same_spec_changes_nothing(made: World) -> None:
    first = await name(made)
    assert await name(made) == first
    assert await kinds(made, first.uid) == ["imagename.set"]


@played()
async def test_a_repeated_request_acts_once(made: World) -> None:
    subject = subjects.api("imagename", "set")
    body = {"name": NAME, "spec": {"url": URL}}
    await made.client.request(subject, body, timeout_s=10, request_id="r1")
    await name(made, OTHER)
    answer = await made.client.request(subject, body, timeout_s=10, request_id="r1")
    assert validate(ImageNameView, answer).spec.url == OTHER


@played()
async def test_a_change_over_another_revision_is_refused(made: World) -> None:
    first = await name(made, revision=0)
    assert (await refused(name(made, OTHER, revision=0))).reason == "stale_revision"
    second = await name(made, OTHER, revision=first.revision)
    assert (await refused(name(made, revision=first.revision))).reason == "stale_revision"
    assert second.generation == 2


@played()
async def test_names_are_listed_in_pages_by_namespace(made: World) -> None:
    names = [("_", "z"), ("a", "a/b"), ("a", "z"), ("a-b", "y"), ("b", "a")]
    for namespace, one in reversed(names):
        await name(made, name=one, namespace=namespace)
    found: list[tuple[str, str]] = []
    more: dict[str, str] = {}
    while True:
        page = await made.ask("list", "imagename", limit=1, **more)
        found += [(item["namespace"], item["name"]) for item in page["items"]]
        if "continue" not in page:
            break
        more = {"continue": page["continue"]}
    assert found == names
    page = await made.ask("list", "imagename", namespace="a")
    assert [item["name"] for item in page["items"]] == ["a/b", "z"]
    assert (await refused(made.ask("list", "imagename", **{"continue": "A"}))).code == 400


@played()
async def test_new_names_stop_at_the_quota_and_changes_do_not(made: World) -> None:
    (controller,) = made.controllers.values()
    controller._image_names._quota = Quota(1, 2)
    await name(made, name="a")
    assert (await refused(name(made, name="b"))).reason == "image_name_quota"
    assert (await name(made, OTHER, name="a")).generation == 2
    await name(made, name="b", namespace="shop")
    assert "the bus" in str(await refused(name(made, name="c", namespace="x")))
    await made.ask("delete", "imagename", name="a")
    await name(made, name="b")


@played()
async def test_new_names_stop_before_creates_of_vms(made: World) -> None:
    (controller,) = made.controllers.values()
    await name(made)
    controller._storage.fill = 0.7
    assert (await refused(name(made, name="other"))).reason == "bus_full"
    assert (await name(made, OTHER)).generation == 2
    assert (await vm(made)).image_targets[NAME].url == OTHER


def test_two_controllers_that_change_a_name_end_with_one_spec() -> None:
    async def body() -> None:
        async with world(controllers=2) as made:
            urls = [f"{URL}-{number}" for number in range(6)]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(name(made, url)) for url in urls]
            last = max((task.result() for task in tasks), key=lambda view: view.revision)
            assert sorted(task.result().generation for task in tasks) == [1, 2, 3, 4, 5, 6]
            assert validate(ImageNameView, await made.ask("get", "imagename", name=NAME)) == last

    run(body)


# --- who may -------------------------------------------------------------------------------
def test_people_change_names_observers_read_them_and_bridges_see_none() -> None:
    subjects_of = {verb: subjects.api("imagename", verb) for verb in VERBS}
    allowed = {
        role.user: {verb for verb in VERBS if subjects_of[verb] in role.publish}
        for role in (permissions.client(), permissions.observer(), permissions.bridge())
    }
    assert allowed == {"client": set(VERBS), "observer": {"get", "list"}, "bridge": set()}


@played()
async def test_only_admins_change_names_of_the_fleet(made: World) -> None:
    client = Asking(made, "CLIENT").bus
    body = {"name": NAME, "namespace": "_"}
    for verb, data in (("set", body | {"spec": {"url": URL}}), ("delete", body)):
        error = await refused(client.request(subjects.api("imagename", verb), data, timeout_s=10))
        assert (error.code, error.reason) == (403, "admin_only")
    await name(made, namespace="_")  # the controllers' own account
    answer = await client.request(subjects.api("imagename", "get"), body, timeout_s=10)
    assert validate(ImageNameView, answer).spec.url == URL


# --- creates -------------------------------------------------------------------------------
@played()
async def test_a_vm_keeps_what_its_name_stood_for(made: World) -> None:
    await name(made, digest=DIGEST, transport="corp", pull_policy="Never")
    first = await vm(made, 1)
    assert first.image_targets == {
        NAME: ImageTarget(
            url=URL,
            digest=DIGEST,
            transport="corp",
            pull_policy=ImagePullPolicy.NEVER,
            namespace="default",
        )
    }
    await name(made, OTHER)
    assert (await vm(made, 2)).image_targets[NAME].url == OTHER
    await made.ask("delete", "imagename", name=NAME)
    assert (await vm(made, 3)).image_targets == {}
    assert await made.stored(uid(1)) == first
    view = await made.ask("get", name="vm-2")
    assert view["image_targets"][NAME] == {"url": OTHER, "namespace": "default", "generation": 2}


@played()
async def test_a_namespaces_own_name_precedes_that_of_the_fleet(made: World) -> None:
    await name(made, namespace="_")
    await name(made, OTHER, namespace="shop")
    assert (await vm(made, 1)).image_targets[NAME].url == URL
    assert (await vm(made, 2, namespace="shop")).image_targets[NAME].url == OTHER
    await made.ask("delete", "imagename", name=NAME, namespace="shop")
    assert (await vm(made, 3, namespace="shop")).image_targets[NAME].namespace == "_"


@played()
async def test_names_that_the_bus_does_not_have_are_left_to_the_node(made: World) -> None:
    await name(made)
    long = "a" * 127 + "/b"
    for number, image in enumerate(("tiny", URL, "debian/12:latest", long)):
        assert (await vm(made, number, image)).image_targets == {}
    pinned = await vm(made, 9, f"{NAME}@{DIGEST}")
    assert set(pinned.image_targets) == {NAME}


def test_a_name_that_was_set_by_one_controller_is_used_by_all() -> None:
    async def body() -> None:
        async with world(controllers=3) as made:
            for number in range(8):
                url = f"{URL}-{number}"
                await name(made, url)
                await settle()
                assert (await vm(made, number)).image_targets[NAME].url == url

    run(body)


@played()
async def test_a_volume_keeps_what_the_name_of_its_image_stood_for(made: World) -> None:
    await name(made)
    spec = {"size": "1GiB", "source": {"image": NAME}}
    await made.ask("create", "volume", name="root-1", uid=uid(50), spec=spec)
    await name(made, OTHER)
    disks = [{"name": "root", "volume": {"name": "root-1"}}]
    await made.ask("create", name="web", uid=uid(1), spec={"volumes": disks})
    stored = await made.stored(uid(1))
    assert stored is not None
    target = stored.volume_refs["root"].target
    assert (target.url if target else "", stored.image_targets) == (URL, {})


@played()
async def test_a_pull_by_name_names_the_target(made: World) -> None:
    seen: list[PullImage] = []

    async def pull(request: Request) -> Any:
        seen.append(validate(PullImage, request.data))
        return {"digest": DIGEST, "format": "raw", "size_bytes": 1, "virtual_size_bytes": 1}

    await name(made, namespace="shop")
    endpoint = Endpoint("pull", subjects.rpc("n1", "imaged", "pull"), pull)
    async with made.host.serve(ServiceInfo("imaged", "1.0.0"), [endpoint]):
        await made.ask("pull", "image", ref=NAME)
        await made.ask("pull", "image", ref=NAME, namespace="shop")
    assert [one.target and one.target.url for one in seen] == [None, URL]


@played(nodes=3)
async def test_a_vm_goes_where_an_image_of_its_name_is(made: World) -> None:
    await name(made)
    await made.host.put(subjects.node_images("n2"), encode(told("n2", NAME)))
    await settle()
    assert (await vm(made)).node == "n2"


@played()
async def test_targets_count_towards_the_size_of_a_record(made: World) -> None:
    volumes = []
    for number in range(24):
        one = f"n{number}"
        await name(made, "https://h/" + "\U0001f600" * 2000, name=one)
        volumes.append({"name": one, "image": {"ref": one}})
    asked = made.ask("create", name="web", uid=uid(1), spec={"volumes": volumes})
    error = await refused(asked)
    assert (error.code, error.reason) == (413, "too_large")
    assert error.body.details[0].path.startswith("image_targets")


# --- unreadable values -------------------------------------------------------------------------
@pytest.mark.parametrize("harm", DAMAGES.values(), ids=list(DAMAGES))
def test_an_unreadable_name_affects_only_creates_by_this_name(harm: Callable[[str], bytes]) -> None:
    """It is not left to the node's files, which might have another image."""

    async def body() -> None:
        async with world(controllers=2) as made:
            await name(made, namespace="_")
            await name(made, name="other")
            damage(made.server, KEY, harm(KEY))
            await settle()
            for number in range(4):
                error = await refused(vm(made, number))
                assert (error.code, error.reason) == (422, "unreadable")
                assert "virtbus imagename set" in str(error)
            assert (await refused(made.ask("get", "imagename", name=NAME))).code == 422
            assert (await vm(made, 8, "other")).image_targets["other"].url == URL
            assert (await vm(made, 9, namespace="shop")).image_targets[NAME].namespace == "_"
            alarms = (await made.ask("status", "bus"))["alarms"]
            assert [one for one in alarms if KEY in one]
            assert (await name(made, OTHER)).spec.url == OTHER
            await settle()
            assert (await vm(made, 10)).image_targets[NAME].url == OTHER
            assert KEY not in str((await made.ask("status", "bus")).get("alarms"))

    run(body)


@played()
async def test_an_unreadable_name_can_be_deleted(made: World) -> None:
    damage(made.server, KEY, b"\xc1 no msgpack")
    await settle()
    assert await made.ask("delete", "imagename", name=NAME) == {
        "namespace": "default",
        "name": NAME,
    }
    entry = await made.client.get(KEY)
    assert entry is not None
    assert entry.kind is EntryKind.PURGE
    await settle()
    assert (await vm(made)).image_targets == {}


def test_an_unreadable_name_is_called_an_image_name() -> None:
    assert Unreadable(KEY, 1, 1, "invalid", "why").kind == "image name"


@played()
async def test_a_rebuild_and_sweeps_leave_names_alone(made: World) -> None:
    await name(made)
    answer = await made.ask("rebuild", "bus", dry_run=True)
    assert "vms" not in answer
    await asyncio.sleep(300)
    assert (await vm(made)).image_targets[NAME].url == URL


@played()
async def test_a_name_that_is_dropped_twice_is_counted_once(made: World) -> None:
    await name(made)
    (controller,) = made.controllers.values()
    names = controller._fleet.images.names
    assert (names.count(), names.count("default")) == (1, 1)
    names.forget(KEY)
    names.forget(KEY)
    assert (names.count(), names.count("default")) == (0, 0)


@played()
async def test_the_medium_of_a_drive_changes_to_a_pinned_image(made: World) -> None:
    drive = {"name": "cd", "bus": "sata", "device": "cdrom"}
    disks = [{"name": "root"}, drive]
    volumes = [{"name": one, "image": {"ref": NAME}} for one in ("root", "cd")]
    spec = {"domain": {"devices": {"disks": disks}}, "volumes": volumes}
    first = await name(made)
    view = await made.ask("create", name="vm-1", uid=uid(1), spec=spec)
    assert view["vm"]["image_targets"][NAME]["url"] == URL
    other = {"name": "drivers", "spec": {"url": OTHER}}
    await made.ask("set", "imagename", **other)

    async def update(**refs: str) -> dict[str, Any]:
        now = await made.ask("get", uid=uid(1))
        for volume in now["spec"]["volumes"]:
            if volume["name"] in refs:
                volume["image"] = {"ref": refs[volume["name"]]}
        asked = {"uid": uid(1), "revision": now["revision"], "spec": now["spec"]}
        return dict(await made.ask("update", **asked))

    error = await refused(update(cd="drivers"))
    assert (error.code, error.reason) == (422, "medium_unpinned")
    assert error.body.details[0].path == "spec.volumes[1].image.ref"
    assert (await refused(update(root=f"drivers@{DIGEST}"))).reason == "immutable"
    assert (await refused(update(cd=f"docker://quay.io/x@{DIGEST}"))).reason == "medium_unpinned"
    assert (await refused(update(cd=f"{URL}?x=1@{DIGEST}"))).reason == "immutable"
    changed = await update(cd=f"drivers@{DIGEST}")
    assert changed["generation"] == view["vm"]["generation"] + 1
    assert {key: one["url"] for key, one in changed["image_targets"].items()} == {
        NAME: URL, "drivers": OTHER
    }  # fmt: skip
    await name(made, OTHER)
    changed = await update(cd=f"{NAME}@{DIGEST}")
    assert {key: one["url"] for key, one in changed["image_targets"].items()} == {NAME: URL}, (
        "the root disk keeps the meaning"
    )
    assert first.generation == 1
