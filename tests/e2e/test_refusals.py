"""Bad input gets an error with a code, the field or the cause, and the next step; no trace left."""

import asyncio
import hashlib
import json
import re
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from tests.e2e.platform import Json, Platform, Refused

from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.e2e

CREATE = "virtbus.api.v1.vm.create"
MIB = 1024**2


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": value}
    return value


# --- refused by the API, before anything is stored --------------------------------------------

FIELDS: dict[str, tuple[Json, str]] = {
    "unknown field": ({"imgae": "tiny"}, "imgae"),
    "unknown field, deep": ({"spec": {"domain": {"cpuz": {}}}}, "spec.domain.cpuz"),
    "string for number": ({"cpus": "many"}, "cpus"),
    "list for map": ({"labels": ["a"]}, "labels"),
    "number for name": ({"name": 7}, "name"),
    "no name": ({"name": None}, "name"),
    "empty name": ({"name": ""}, "name"),
    "dot in name": ({"name": "a.b"}, "name"),
    "wildcard in name": ({"name": "*"}, "name"),
    "upper case name": ({"name": "Web"}, "name"),
    "name of 64": ({"name": "a" * 64}, "name"),
    "newline in name": ({"name": "a\nb"}, "name"),
    "path as name": ({"name": "../etc"}, "name"),
    "right-to-left name": ({"name": "a\u202eb"}, "name"),
    "wildcard namespace": ({"namespace": ">"}, "namespace"),
    "uid of no UUID": ({"uid": "42"}, "uid"),
    "uid with wildcard": ({"uid": "*"}, "uid"),
    "no CPU": ({"cpus": 0}, "cpus"),
    "negative CPUs": ({"cpus": -1}, "cpus"),
    "million CPUs": ({"cpus": 10**6}, "cpus"),
    "memory of 1 KiB": ({"memory": "1KiB"}, "memory"),
    "negative memory": ({"memory": -1}, "memory"),
    "endless memory": ({"memory": 2**62}, "memory"),
    "memory as prose": ({"memory": "lots"}, "memory"),
    "disk of nothing": ({"disk": 0}, "disk"),
    "endless disk": ({"disk": "1000TiB"}, "disk"),
    "image with space": ({"image": "ti ny"}, "image"),
    "image as path": ({"image": "../tiny"}, "image"),
    "image by ftp": ({"image": "ftp://h/x"}, "image"),
    "image with half a digest": ({"image": "tiny@sha256:abc"}, "image"),
    "label with newline": ({"labels": {"a": "b\nc"}}, "labels"),
    "key with newline": ({"ssh_keys": ["ssh-ed25519 AAAA\nruncmd: []"]}, "ssh_keys"),
    "multicast MAC": (
        {
            "spec": {
                "networks": [{"name": "n"}],
                "domain": {
                    "devices": {"interfaces": [{"name": "n", "mac_address": "ff:ff:ff:ff:ff:ff"}]}
                },
            }
        },
        "mac_address",
    ),
    "two volumes of one name": (
        {
            "spec": {
                "volumes": [
                    {"name": "d", "empty_disk": {"capacity": MIB}},
                    {"name": "d", "empty_disk": {"capacity": MIB}},
                ]
            }
        },
        "spec.volumes[1].name",
    ),
    "volume of nothing": ({"spec": {"volumes": [{"name": "d"}]}}, "spec.volumes[0]"),
    "disk without volume": (
        {"spec": {"domain": {"devices": {"disks": [{"name": "lost"}]}}}},
        "spec.domain.devices.disks[0]",
    ),
    "hundred NICs": ({"spec": {"networks": [{"name": f"n{i}"} for i in range(100)]}}, "networks"),
    "raw QEMU arguments": ({"spec": {"domain": {"qemu_commandline": ["-S"]}}}, "qemu_commandline"),
    "SSH key over its bound": ({"ssh_keys": ["ssh-ed25519 " + "x" * 70_000]}, "ssh_keys"),
}


def test_bad_field_is_named_with_its_path(platform: Platform) -> None:
    for case, (change, path) in FIELDS.items():
        with pytest.raises(VirtbusError) as refused:
            platform.ask("vm.create", {"name": "bad", "image": "tiny", **change})
        body = refused.value.body
        assert (body.code, body.reason) == (400, "invalid"), case
        assert [d for d in body.details if path in d.path and len(d.message) > 3], (case, body)
        assert platform.vms() == [], case


def test_all_problems_come_in_one_answer_and_a_typo_gets_a_hint(platform: Platform) -> None:
    with pytest.raises(VirtbusError) as refused:
        platform.ask("vm.create", {"name": "A.B", "imgae": "tiny", "cpus": 0, "memory": "x"})
    details = {detail.path: detail for detail in refused.value.body.details}
    assert {"name", "imgae", "cpus", "memory", "image"} <= set(details)
    assert "image" in details["imgae"].hint


BODIES: dict[str, tuple[bytes, int]] = {
    "half a JSON": (b'{"name": "bad", "ima', 400),
    "JSON with a name twice": (b'{"name":"a","name":"b","image":"tiny"}', 400),
    "JSON with NaN": (b'{"name":"a","image":"tiny","cpus":NaN}', 400),
    "JSON too deep": (json.dumps(_nested(200)).encode(), 400),
    "half a msgpack": (msgpack.packb({"name": "bad", "image": "tiny"})[:-3], 400),
    "msgpack that promises 4 GiB": (b"\xdf\xff\xff\xff\xff", 400),
    "msgpack too deep": (msgpack.packb(_nested(200)), 400),
    "msgpack of unknown ext": (b"\x81\xa4name\xd4\x2ax", 400),
    "msgpack with bytes after it": (msgpack.packb({"name": "a"}) + b"\x00", 400),
    "no map at all": (msgpack.packb([1, 2, 3]), 400),
    "text": (b"hello", 400),
    "broken UTF-8": (b"\x81\xa4name\xa2\xff\xfe", 400),
    "over 512 KiB": (b'{"name":"' + b"a" * (600 * 1024) + b'"}', 413),
}


async def _raw(platform: Platform, body: bytes) -> Json:
    """Return the answer to bytes of a plain NATS client, with the printed credentials."""
    import nats

    settings = BusSettings.found(platform.run_dir, "client").resolved()
    client = await nats.connect(
        settings.servers[0],
        user=settings.user,
        password=settings.password,
        inbox_prefix=settings.inbox_prefix.encode(),
    )
    try:
        answer = await client.request(CREATE, body, timeout=10)
    finally:
        await client.close()
    text = answer.data
    data = json.loads(text) if text.lstrip()[:1] == b"{" else msgpack.unpackb(text)
    return {"headers": dict(answer.headers or {}), "data": data}


def test_unreadable_body_is_refused_and_the_next_one_is_served(platform: Platform) -> None:
    for case, (body, code) in BODIES.items():
        answer = asyncio.run(_raw(platform, body))
        assert answer["headers"]["Nats-Service-Error-Code"] == str(code), (case, answer)
        error = _error(answer["data"])
        assert error["code"] == code, case
        assert len(error["message"]) > 10, case
        assert platform.vms() == [], case


def _error(data: Json) -> Json:
    inner = data.get("data", data)
    error: Json = inner.get("error", inner)
    return error


def test_json_from_any_nats_client_with_the_printed_credentials_makes_a_vm(
    platform: Platform,
) -> None:
    """Send the line that `virtbus up` prints, from a client without any of our code."""
    printed = re.findall(r"nats --server nats://(\S+):(\S+)@(\S+) req (\S+) '(.*)'", _log(platform))
    user, password, server, subject, body = printed[-1]
    answer = asyncio.run(_printed(user, password, server, subject, body))
    vm = answer.get("data", answer)["vm"]
    assert (vm["name"], vm["namespace"]) == ("web", "default")
    platform.wait_state("web", "Running")


def _log(platform: Platform) -> str:
    return platform.log.read_text()


async def _printed(user: str, password: str, server: str, subject: str, body: str) -> Json:
    import nats

    client = await nats.connect(f"nats://{server}", user=user, password=password)
    try:
        answer = await client.request(subject, body.encode(), timeout=10)
    finally:
        await client.close()
    found: Json = json.loads(answer.data)
    return found


def test_taken_name_and_uid_are_refused_and_the_same_uid_again_is_the_same_vm(
    platform: Platform,
) -> None:
    uid = uuid7()
    data = {"uid": uid, "name": "one", "image": "tiny", "memory": "128MiB"}
    first = platform.ask("vm.create", data)
    assert first["created"]
    again = platform.ask("vm.create", data)
    assert not again.get("created", False)
    assert again["vm"]["uid"] == uid
    for change, reason in (
        ({"uid": uuid7()}, "exists_unchanged"),
        ({"uid": uuid7(), "cpus": 2}, "name_taken"),
        ({"name": "other"}, "uid_taken"),
    ):
        with pytest.raises(VirtbusError) as refused:
            platform.ask("vm.create", {**data, **change})
        assert (refused.value.code, refused.value.reason) == (409, reason)
    with pytest.raises(VirtbusError, match=uid):
        platform.ask("vm.create", {**data, "uid": uuid7(), "cpus": 2})
    platform.delete("one")
    with pytest.raises(VirtbusError) as refused:
        platform.ask("vm.create", data)
    assert (refused.value.code, refused.value.reason) == (410, "deleted")


def test_a_vm_on_an_unknown_network_is_refused_with_the_field(platform: Platform) -> None:
    with pytest.raises(VirtbusError) as refused:
        platform.ask("vm.create", {"name": "big", "image": "tiny", "network": "nowhere"})
    body = refused.value.body
    assert (body.code, body.reason) == (404, "network_unknown")
    assert [one.path for one in body.details] == ["spec.networks[0].network"]
    assert platform.vms() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"memory": "1TiB"}, "no_capacity"),
        ({"cpus": 200}, "no_capacity"),
        ({"spec": {"node_selector": {"zone": "mars"}}}, "no_"),
    ],
)
def test_a_vm_that_fits_on_no_node_is_refused_with_the_reason_of_each_node(
    platform: Platform, change: Json, reason: str
) -> None:
    with pytest.raises(VirtbusError) as refused:
        platform.ask("vm.create", {"name": "big", "image": "tiny", **change})
    body = refused.value.body
    assert body.reason.startswith(reason), body
    assert "e2e" in body.message + "".join(d.path + d.message for d in body.details), body
    assert platform.vms() == []


@pytest.mark.parametrize(
    "argv",
    [
        ("vm", "get", "nobody"),
        ("vm", "delete", "nobody"),
        ("vm", "stop", "nobody"),
        ("vm", "logs", "nobody"),
        ("vm", "console", "nobody"),
    ],
)
def test_a_missing_vm_exits_3_and_names_the_next_step(
    platform: Platform, argv: tuple[str, ...]
) -> None:
    with pytest.raises(Refused) as refused:
        platform.cli(*argv)
    assert refused.value.exit_code == 3
    assert "nobody" in refused.value.text
    assert "virtbus vm list" in refused.value.text


# --- accepted, and then the image is unavailable -----------------------------------------------


def _qcow2(version: int = 3, backing: str = "", incompatible: int = 0) -> bytes:
    """A qcow2 header without data, in the layout of QEMU's docs/interop/qcow2."""
    offset = 0x200 if backing else 0
    header = struct.pack(
        ">4sIQIIQIIQQIIQ",
        *(b"QFI\xfb", version, offset, len(backing), 16, 64 * MIB, 0),
        *(1, 0x30000, 0x10000, 1, 0, 0),
    )
    header += struct.pack(">QQQII", incompatible, 0, 0, 4, 104)
    return (header.ljust(0x200, b"\0") + backing.encode()).ljust(0x40000, b"\0")


def _make(platform: Platform, name: str, content: bytes) -> str:
    path = platform.state_dir / "images" / "src" / name
    path.write_bytes(content)
    return f"file://{path}"


def _with_backing(platform: Platform) -> str:
    return _make(platform, "backing.qcow2", _qcow2(backing="/etc/shadow"))


def _with_json_backing(platform: Platform) -> str:
    backing = 'json:{"driver":"file","filename":"/etc/shadow"}'
    return _make(platform, "json.qcow2", _qcow2(backing=backing))


def _with_data_file(platform: Platform) -> str:
    return _make(platform, "data.qcow2", _qcow2(incompatible=4))


def _vmdk(platform: Platform) -> str:
    return _make(platform, "x.vmdk", b"KDMV" + bytes(65536))


def _wrong_digest(platform: Platform) -> str:
    return "tiny@sha256:" + hashlib.sha256(b"another").hexdigest()


def _outside_roots(platform: Platform) -> str:
    return "file:///etc/shadow"


def _symlink(platform: Platform) -> str:
    path = platform.state_dir / "images" / "src" / "link.qcow2"
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/shadow")
    return f"file://{path}"


def _unknown_name(platform: Platform) -> str:
    return "no-such-image"


def _nobody_listens(platform: Platform) -> str:
    return "http://198.51.100.7/x.qcow2"


def _missing_file(platform: Platform) -> str:
    return f"file://{platform.state_dir}/images/src/gone.qcow2"


IMAGES: list[tuple[Callable[[Platform], str], str]] = [
    (_with_backing, "backing"),
    (_with_json_backing, "backing"),
    (_with_data_file, "another file"),
    (_vmdk, "no data of its own"),
    (_wrong_digest, "digest"),
    (_outside_roots, "allowed"),
    (_symlink, "symlink"),
    (_unknown_name, "no-such-image"),
    (_nobody_listens, "198.51.100.7"),
    (_missing_file, "gone.qcow2"),
]


@pytest.mark.parametrize(("make", "word"), IMAGES, ids=[make.__name__ for make, _ in IMAGES])
def test_an_unavailable_image_fails_only_its_vm_with_the_reason(
    platform: Platform, make: Callable[[Platform], str], word: str
) -> None:
    ref = make(platform)
    store = sorted(p.name for p in (platform.state_dir / "images" / "data").glob("*"))
    with pytest.raises(Refused) as refused:
        platform.create("bad", "--image", ref, "--timeout", "60")
    assert refused.value.exit_code == 1, refused.value.text
    assert word in refused.value.text, refused.value.text
    error = refused.value.error
    assert error["reason"] not in {"failed", "internal"}, error
    view = platform.get("bad")
    assert view["state"] == "Failed"
    assert "image.failed" in platform.events("bad")
    platform.delete("bad")
    platform.wait_quiet()
    assert sorted(p.name for p in (platform.state_dir / "images" / "data").glob("*")) == store
    # one bad tenant never slows another: the next create takes the usual time
    platform.create("good")


def test_pull_of_a_missing_image_lists_the_known_names(platform: Platform) -> None:
    done = platform.try_cli("image", "pull", "no-such-image")
    assert done.returncode == 3
    assert "no-such-image" in done.stderr
    assert "tiny" in done.stderr
