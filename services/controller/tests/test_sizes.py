"""A request whose record or secrets are too large to store is refused by its largest field."""

import json
from typing import Any

import pytest
from services.controller.tests.fleets import SSH_KEY, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World

from virtbus.controller.core.admission import admit
from virtbus.controller.core.input_sizes import largest, size_estimate
from virtbus.schemas import bounds, subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.vm import VmRecord, VmSecrets
from virtbus.schemas.wire import encode, read

KEYS = ["ssh-ed25519 " + "A" * 8170 + str(number) for number in range(10, 73)]
ANNOTATIONS = {f"note-{n}": "x" * 60_000 for n in range(3)}
MANY = 8
GROWING: tuple[dict[str, Any], ...] = (
    {"image": "tiny", "annotations": {"a": "\U0001f600" * 9000}},
    {"image": "tiny", "labels": {f"l{n}": "" for n in range(60)}},
    {
        "spec": {
            "volumes": [{"name": f"v{n}", "image": {"ref": f"http://a/{n}?x"}} for n in range(MANY)]
        }
    },
    {"image": "tiny", "spec": {"networks": [{"name": f"n{n}"} for n in range(MANY)]}},
)
"""Requests that are much smaller than their records."""


def test_the_largest_field_is_named_down_to_its_largest_part() -> None:
    value = {"labels": {"a": "b"}, "spec": {"volumes": [{"name": "a"}, {"name": "b" * 99}]}}
    assert largest(value) == "spec.volumes[1].name"
    assert largest({"annotations": {"a": "x" * 50, "b": "x" * 50, "c": "y" * 50}}) == "annotations"
    assert largest({"annotations": {"k" * 9000: "x"}}).startswith("annotations.kkk")
    assert len(largest({"annotations": {"k" * 9000: "x"}})) < 100


@played()
async def test_a_create_whose_record_would_be_too_large_names_field_and_bound(made: World) -> None:
    error = await refused(made.vm("create", name="web", image="tiny", annotations=ANNOTATIONS))
    assert (error.code, error.reason) == (Code.TOO_LARGE, "too_large")
    assert [detail.path for detail in error.body.details] == ["annotations"]
    assert str(bounds.RECORD_ACCEPTED_BYTES) in str(error)
    assert await made.client.get(subjects.name_claim("default", "web")) is None


@played()
async def test_an_update_whose_record_would_be_too_large_is_refused_too(made: World) -> None:
    vm = await made.vm("create", name="web", image="tiny")
    change = {"uid": vm.uid, "revision": vm.revision, "annotations": ANNOTATIONS}
    assert (await refused(made.vm("update", **change))).code == Code.TOO_LARGE


@played()
async def test_a_record_of_the_largest_size_takes_every_later_write(made: World) -> None:
    vm = await made.vm("create", name="web", image="tiny", uid=uid(1), annotations={"a": "x"})
    stored = await made.stored(uid(1))
    assert stored is not None
    room = bounds.RECORD_ACCEPTED_BYTES - len(encode(stored)) - 20
    notes = dict.fromkeys("abc", "x" * (room // 3))
    await made.vm("update", uid=uid(1), revision=vm.revision, annotations=notes)
    for number in range(6):
        verb, more = (("stop", {"grace_s": 86_400}), ("start", {}))[number % 2]
        request_id = f"{number}" + "i" * 127
        data = {"uid": uid(1), **more}
        subject = subjects.api("vm", verb)
        await made.client.request(subject, data, timeout_s=5, request_id=request_id)
    assert (await made.vm("delete", uid=uid(1), grace_s=86_400)).deleting
    stored = await made.stored(uid(1))
    assert stored is not None
    assert bounds.RECORD_ACCEPTED_BYTES - 100 < len(encode(stored)) < bounds.RECORD.written_bytes


@played()
async def test_ssh_keys_are_secret_inputs_and_in_no_record_view_or_fact(made: World) -> None:
    vm = await made.vm("create", name="web", image="tiny", uid=uid(1), ssh_keys=[SSH_KEY])
    stored = await made.client.get(subjects.vm_record("n1", uid(1)))
    secret = await made.client.get(subjects.vm_secret("n1", uid(1)))
    assert stored is not None
    assert secret is not None
    assert read(VmSecrets, secret.value).cloud_init["cloudinit"].ssh_keys == (SSH_KEY,)
    told: list[Any] = [stored.value, vm.model_dump_json().encode()]
    told += [encode(await made.ask("get", uid=uid(1))), encode(await made.ask("list"))]
    told += [message.body for message in await made.client.history("virtbus.evt.>")]
    assert not any(SSH_KEY.encode() in one for one in told)
    again = await made.ask("create", name="web", image="tiny", uid=uid(1), ssh_keys=[SSH_KEY])
    assert again["created"] is False
    other = made.ask("create", name="web", image="tiny", uid=uid(1), ssh_keys=[f"{SSH_KEY}2"])
    assert (await refused(other)).code == Code.CONFLICT


def test_ssh_keys_count_as_the_other_secret_inputs_do() -> None:
    data = {"name": "web", "image": "tiny", "ssh_keys": KEYS, "user_data": "#!" + "x" * 60_000}
    with pytest.raises(VirtbusError) as caught:
        admit(data, uid(1))
    assert [detail.path for detail in caught.value.body.details] == ["ssh_keys"]


@played()
async def test_a_vm_with_as_many_keys_as_a_request_holds_is_changed_and_deleted(
    made: World,
) -> None:
    """Keys of 512 KB once made a record of that size, and the next change made it unreadable."""
    vm = await made.vm("create", name="web", image="tiny", uid=uid(1), ssh_keys=KEYS)
    assert (await made.vm("stop", uid=vm.uid)).powered is False
    assert (await made.vm("delete", uid=vm.uid)).deleting
    stored = await made.stored(uid(1))
    assert stored is not None
    assert len(encode(stored)) < 2000


@played()
async def test_pull_secrets_leave_room_for_the_record_in_one_request(made: World) -> None:
    """The agent sends them to imaged together, as one request of bounded size."""

    def pulled(number: int) -> dict[str, Any]:
        auth = {"username": "a", "password": "x" * 45_000}
        secret = json.dumps({"auths": {f"r{number}.example": auth}})
        disk = {"image": f"r{number}.example/a", "image_pull_secret": secret}
        return {"name": f"d{number}", "container_disk": disk}

    request = made.vm("create", name="web", spec={"volumes": [pulled(n) for n in range(6)]})
    error = await refused(request)
    assert error.code == Code.TOO_LARGE
    assert error.body.details[0].path.endswith("container_disk.image_pull_secret")


@pytest.mark.parametrize("given", GROWING, ids=lambda given: "-".join(given))
def test_a_record_is_at_most_as_large_as_its_estimate(given: dict[str, Any]) -> None:
    """So a record that is not encoded for its size is not too large."""
    admitted = admit({"name": "web", **given}, uid(1))
    record = VmRecord(
        uid=admitted.uid,
        namespace=admitted.namespace,
        name=admitted.name,
        labels=admitted.labels,
        annotations=admitted.annotations,
        spec=admitted.spec,
        spec_hash=admitted.spec_hash,
        node="n1",
        created_ns=1,
    )
    size = len(encode(record))
    assert size <= size_estimate(record, admitted.spec_bytes) + bounds.KIB
