"""A guest reads the platform's files, on a disk that only its own login opens."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from services.imaged.tests.docker_registry import Debian
from services.imaged.tests.registry_under_test import Registry, gz, tar
from services.imaged.tests.site_under_test import Web
from tests.e2e.platform import Json, Refused, Stage, tiny_image, until

from virtbus.schemas.registry_login import Login

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LOOK = """#!/bin/sh
mkdir /tmp/d /tmp/f
mount -t iso9660 -o ro /dev/vdd /tmp/d
mount -t iso9660 -o ro /dev/vde /tmp/f
{
    echo "TOLD empty=$(cat /sys/block/vdb/size)"
    echo "TOLD user=$(cat /tmp/d/openstack/latest/user_data)"
    echo "TOLD meta=$(cat /tmp/d/openstack/latest/meta_data.json)"
    echo "TOLD conf=$(cat /tmp/f/app.conf) key=$(md5sum < /tmp/f/key.der) ALL-TOLD"
} > /dev/ttyS0
"""
CANARY = "canary-of-a-secret"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Debian]:
    registry = Debian(tmp_path, private=True)
    with registry.running():
        images = Registry(Web())
        images.push("team/tiny", "1", gz(tar(("disk/tiny.qcow2", tiny_image().read_bytes()))))
        asyncio.run(registry.push(images))
        yield registry


def wanted(registry: Debian, login: Login) -> Json:
    root = {
        "image": f"{registry.host}/team/tiny:1",
        "image_pull_secret": login.config(registry.host),
    }
    return {
        "domain": {"memory": {"guest": "128MiB"}},
        "volumes": [
            {"name": "root", "container_disk": root},
            {"name": "scratch", "empty_disk": {"capacity": "64MiB"}},
            {"name": "seed", "cloud_init_no_cloud": {"user_data": LOOK}},
            {"name": "drive", "cloud_init_config_drive": {"user_data": CANARY}},
            {
                "name": "app",
                "files": {"data": {"app.conf": CANARY}, "binary_data": {"key.der": "AP8B"}},
            },
        ],
    }


def test_a_guest_finds_its_seeds_files_and_empty_disk(
    stage: Stage, registry: Debian, tmp_path: Path
) -> None:
    file = tmp_path / "vm.json"
    insecure = {
        "VIRTBUS_INSECURE_REGISTRIES": json.dumps([registry.host]),
        "VIRTBUS_IMAGE_ADDRESSES": json.dumps(["127.0.0.0/8"]),
    }
    with stage.apart(insecure) as platform:
        file.write_text(json.dumps({"spec": wanted(registry, Login("me", "wrong"))}))
        with pytest.raises(Refused) as refused:
            platform.create("web", "-f", str(file))
        assert refused.value.error["reason"] == "image_denied", refused.value.text
        assert "the VM's image_pull_secret" in refused.value.text
        platform.delete("web")

        file.write_text(json.dumps({"spec": wanted(registry, Login("me", "secret"))}))
        view = platform.create("web", "-f", str(file), "--timeout", "90", wait="ready")
        assert CANARY not in json.dumps(view)
        until(
            lambda: "ALL-TOLD" in platform.console_log("web"),
            lambda: platform.console_log("web")[-2000:],
        )
        log = platform.console_log("web")
        told = dict(re.findall(r"TOLD (\w+)=(.*)\r?\n", log))
        assert told["empty"].rstrip() == str(64 * 2**20 // 512)
        assert told["user"].rstrip() == CANARY
        assert json.loads(told["meta"])["uuid"] == view["uid"]
        assert told["conf"].rstrip() == f"{CANARY} key=afb9b285695ee0ee62aa674ef510e70d  - ALL-TOLD"
        platform.delete("web")
        platform.nothing_left()
