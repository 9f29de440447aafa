"""An image name on the bus: new VMs have what it stands for now, others keep what they have."""

import asyncio
import hashlib
import json
from typing import Any

import pytest
from tests.e2e.platform import HALT, Json, Platform, Refused, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NAME = "e2e/base"


def digest_of(platform: Platform, name: str) -> str:
    """The digest of the image that the VM's disk was made of, as its node reports it."""
    until(lambda: platform.get(name)["image_digest"], lambda: str(platform.get(name)))
    return str(platform.get(name)["image_digest"])


def put(platform: Platform, file: str, mark: bytes) -> tuple[str, str]:
    """Add a guest that halts, with a mark in its second sector; return its URL and digest."""
    source = platform.state_dir / "images" / "src"
    data = bytearray((source / HALT).read_bytes())
    data[512 : 512 + len(mark)] = mark
    (source / file).write_bytes(data)
    return f"file://{source / file}", f"sha256:{hashlib.sha256(data).hexdigest()}"


def set_name(platform: Platform, url: str, *flags: str) -> Json:
    view: Json = json.loads(platform.cli("imagename", "set", NAME, url, *flags, "-o", "json"))
    return view


def as_admin(platform: Platform, verb: str, **data: Any) -> Any:
    async def asked() -> Any:
        async with platform.bus("admin") as bus:
            return await bus.request(f"virtbus.api.v1.imagename.{verb}", data, timeout_s=30)

    return asyncio.run(asked())


def test_a_name_is_changed_while_vms_use_it(platform: Platform) -> None:
    old_url, old = put(platform, "old.img", b"old")
    new_url, new = put(platform, "new.img", b"new")
    with pytest.raises(Refused) as refused:
        platform.cli("imagename", "set", NAME, old_url, "--fleet", "-o", "json")
    assert refused.value.error["reason"] == "admin_only"
    as_admin(platform, "set", name=NAME, namespace="_", spec={"url": new_url})

    first = set_name(platform, old_url, "--digest", old)
    platform.create("before", "--image", NAME)
    assert digest_of(platform, "before") == old
    second = set_name(platform, new_url)
    assert (second["uid"], second["generation"]) == (first["uid"], 2)
    platform.create("after", "--image", NAME)
    assert digest_of(platform, "after") == new
    assert digest_of(platform, "before") == old

    platform.cli("imagename", "delete", NAME)
    platform.create("fleet", "--image", NAME)
    assert digest_of(platform, "fleet") == new
    as_admin(platform, "delete", name=NAME, namespace="_")
    platform.create("late", "--image", NAME, wait="")
    assert platform.wait_state("late", "Failed")["reason"] == "image_unknown"
    platform.delete("before", "after", "fleet", "late")
    platform.cli("image", "delete", NAME)
    platform.nothing_left()
