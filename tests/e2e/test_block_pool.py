"""A volume on a device of the host: a guest boots from a copy of an image, and again later."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.platform import DEVICE_POOL, Platform, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

DEVICE_BYTES = 257 * 1024**2


@contextmanager
def device(platform: Platform, file: Path) -> Iterator[None]:
    """A loop device under the name in the platform's settings."""
    with file.open("wb") as disk:
        disk.truncate(DEVICE_BYTES)
    asked = ["losetup", "--find", "--show", str(file)]
    loop = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    platform.device.symlink_to(loop)
    try:
        yield
    finally:
        platform.device.unlink()
        subprocess.run(["losetup", "--detach", loop], check=True)


def boot(platform: Platform, spec: Path) -> None:
    platform.create("web", "-f", str(spec), wait="ready")
    platform.delete("web")


@contextmanager
def volume_of_tiny(platform: Platform, tmp_path: Path) -> Iterator[Path]:
    """The volume `raw` on a device, and the file of a VM with it; nothing of both is left."""
    spec = tmp_path / "vm.json"
    root = {"name": "root", "volume": {"name": "raw"}}
    plain = {"domain": {"memory": {"guest": "128MiB"}}, "volumes": [root]}
    spec.write_text(json.dumps({"spec": plain}), encoding="utf-8")
    with device(platform, tmp_path / "device"):
        until(lambda: platform.pool(DEVICE_POOL)["state"] == "Ready", "the pool")
        made = ("volume", "create", "raw", "--size", "256MiB", "--pool", DEVICE_POOL)
        volume = json.loads(platform.cli(*made, "--from-image", "tiny", "-o", "json"))
        assert (volume["state"], volume["node"]) == ("Bound", "e2e")
        yield spec
        platform.cli("volume", "delete", "raw")
        done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
        platform.cli("operation", "delete", *(item["id"] for item in done))
        assert not any(platform.device.read_bytes())
        platform.nothing_left()


def test_a_guest_boots_from_a_device_and_finds_it_again(platform: Platform, tmp_path: Path) -> None:
    with volume_of_tiny(platform, tmp_path) as spec:
        boot(platform, spec)
        boot(platform, spec)


def test_a_guest_boots_from_its_root_after_each_move(platform: Platform, tmp_path: Path) -> None:
    """A VM that is off holds the volume."""

    def moved(pool: str) -> bool:
        view = json.loads(platform.cli("volume", "get", "raw", "-o", "json"))
        return bool(view["spec"].get("pool", "local") == pool and not view.get("message"))

    with volume_of_tiny(platform, tmp_path) as spec:
        platform.create("web", "-f", str(spec), wait="ready")
        for pool in ("local", DEVICE_POOL):
            platform.cli("vm", "stop", "web", "--grace", "0", "--wait")
            platform.cli("volume", "move", "raw", "--pool", pool)
            until(partial(moved, pool), f"the move to {pool}", within_s=120)
            assert any(platform.device.read_bytes()) == (pool == DEVICE_POOL)
            platform.cli("vm", "start", "web")
            platform.wait_ready("web")
        platform.delete("web")
