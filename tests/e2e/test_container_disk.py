"""Guests that boot from a disk in a container image, from a registry on this machine."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.docker_registry import Debian
from services.imaged.tests.registry_under_test import Registry, gz, tar, zst
from services.imaged.tests.site_under_test import Web
from tests.e2e import host
from tests.e2e.platform import Platform, Refused, Stage, address, tiny_image, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Debian]:
    registry = Debian(tmp_path)
    with registry.running():
        yield registry


def push(registry: Debian, name: str, *layers: bytes) -> None:
    images = Registry(Web())
    repository, _, tag = name.partition(":")
    images.push(repository, tag, *layers)
    asyncio.run(registry.push(images))


def create(platform: Platform, path: Path, name: str, wait: str, **disk: Any) -> Any:
    """A VM whose only disk is a container's."""
    spec = {
        "domain": {"memory": {"guest": "128MiB"}},
        "volumes": [{"name": "root", "container_disk": disk}],
        "networks": [{"name": "default"}],
    }
    path.write_text(json.dumps({"spec": spec}))
    return platform.create(name, "-f", str(path), "--timeout", "90", wait=wait)


def test_a_container_disk_boots_keeps_its_overlay_and_recovers_after_a_repair(
    stage: Stage, registry: Debian, tmp_path: Path
) -> None:
    tiny, wanted = tiny_image().read_bytes(), tmp_path / "vm.json"
    push(registry, "team/tiny:1", gz(tar(("etc/x", b"x"))), zst(tar(("disk/tiny.qcow2", tiny))))
    push(registry, "team/broken:1", gz(tar(("etc/x", b"x"))))
    insecure = {
        "VIRTBUS_INSECURE_REGISTRIES": json.dumps([registry.host]),
        "VIRTBUS_IMAGE_ADDRESSES": json.dumps(["127.0.0.0/8"]),
    }
    with stage.apart(insecure) as platform:
        view = create(platform, wanted, "a", "ready", image=f"{registry.host}/team/tiny:1")
        assert view["image_digest"].startswith("sha256:")
        assert host.ping(address(view))
        (node,) = json.loads(platform.cli("node", "list", "-o", "json"))["items"]
        assert node["images"] >= 2, "controllers know of the name and of the digest"
        overlay = platform.state_dir / "disks" / view["uid"] / "root.qcow2"
        inode = overlay.stat().st_ino
        platform.cli("vm", "stop", "a", "--grace", "0")
        platform.cli("vm", "start", "a")
        assert overlay.stat().st_ino == inode  # the guest's writes belong to the VM
        platform.delete("a")
        assert not overlay.exists()

        with pytest.raises(Refused) as refused:
            create(platform, wanted, "b", "ready", image=f"{registry.host}/team/broken:1")
        assert refused.value.error["reason"] == "container_disk_missing", refused.value.text
        push(registry, "team/broken:1", gz(tar(("disk/tiny.qcow2", tiny))))
        platform.cli("vm", "start", "b", "--no-wait")
        until(lambda: platform.get("b")["state"] == "Running", "it runs, mended")
        platform.delete("b")

        ref = f"docker://{registry.host}/team/tiny:1"
        platform.cli("volume", "create", "of-image", "--from-container-disk", ref[9:])
        volume = json.loads(platform.cli("volume", "get", "of-image", "-o", "json"))
        size = int.from_bytes(tiny[24:32], "big")  # of the disk, in the header of qcow2
        assert (volume["state"], volume["spec"]["size"]) == ("Bound", size)
        platform.cli("volume", "delete", "of-image")
        (fill,) = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
        platform.cli("operation", "delete", fill["id"])
        platform.cli("image", "delete", ref)
        assert "qcow2" in platform.cli("image", "pull", ref)
        until(lambda: ref in platform.cli("image", "list", "-o", "json"), "the image is listed")
        with pytest.raises(Refused) as refused:
            platform.cli("image", "pull", f"docker://{registry.host}/team/tiny:none")
        assert "no docker://" in refused.value.text
        platform.nothing_left()
