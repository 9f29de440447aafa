"""A flexvolume of the type ceph is the volume that a pool of the node assigns to its image."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from services.cri.tests.test_volumes import flexvolume, mount, refusal
from services.cri.tests.world import Fleet, Kubelet, cri

from virtbus.cri.edge.volume_files import _assigned

POOLS = """
[pools.ceph]
kind = "rbd"
monitors = ["192.0.2.1", "192.0.2.2", "2001:db8::1"]
user = "libvirt"
secret_file = "/etc/virtbus/secrets/ceph"
volumes = { "default.data" = "rbd/image-1", "other.data" = "rbd/image-2" }
"""
KEY = "c2VjcmV0LW9mLWNlcGg="
OPTIONS = {"type": "ceph", "monitor": "192.0.2.2:6789", "pool": "rbd", "volume": "image-1"}
OPTIONS |= {"user": "admin", "secret": KEY}


@pytest.fixture
async def node(tmp_path: Path, fleet: Fleet) -> AsyncIterator[Kubelet]:
    """A node with a pool of Ceph."""
    (tmp_path / "pools.toml").write_text(POOLS)
    async with fleet.serving(), cri(tmp_path, fleet, pools_file=tmp_path / "pools.toml") as kubelet:
        yield kubelet


async def test_its_disk_is_the_volume_of_the_pool_and_its_partition_is_mounted(
    tmp_path: Path, fleet: Fleet, node: Kubelet
) -> None:
    folder = flexvolume(tmp_path, **OPTIONS)
    await node.container(await node.sandbox(), mounts=[mount(folder, "/data")])
    (created,) = fleet.created
    volume = fleet.vm.spec.volumes[2].volume
    assert volume is not None
    assert volume.name == "data"
    assert volume.template is not None
    assert (volume.template.pool, str(volume.template.retention)) == ("ceph", "Delete")
    seed = fleet.vm.spec.volumes[1].cloud_init
    assert seed is not None
    assert [(one.path, one.partition, one.make_filesystem) for one in seed.mounts] == [
        ("/data", 1, None)
    ]
    assert KEY not in json.dumps(created), "the login is that of the pool"
    stored = (path for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert not any(KEY.encode() in path.read_bytes() for path in stored)


@pytest.mark.parametrize(
    "monitor",
    [
        "192.0.2.1",
        "198.51.100.7:6789, 192.0.2.2:6789",
        "192.0.2.2:6789,198.51.100.7:6789",
        "2001:db8::1",
        "[2001:db8::1]",
        "[2001:db8::1]:6789",
        "198.51.100.7:6789,[2001:db8::1]:3300",
    ],
)
def test_a_monitor_of_the_pool_names_it(tmp_path: Path, monitor: str) -> None:
    (tmp_path / "pools.toml").write_text(POOLS)
    found = _assigned(OPTIONS | {"monitor": monitor}, "default", tmp_path / "pools.toml")
    assert found == ("ceph", "data")


@pytest.mark.parametrize(
    "change",
    [
        {"monitor": "198.51.100.7:6789"},
        {"monitor": "2001:db8::"},
        {"monitor": ""},
        {"pool": "other"},
        {"volume": "image-2"},  # of another namespace
        {"volume": ""},
    ],
)
async def test_a_disk_that_no_pool_assigns_to_the_namespace_is_refused(
    tmp_path: Path, node: Kubelet, change: dict[str, str]
) -> None:
    text = await refusal(node, mount(flexvolume(tmp_path, **OPTIONS | change), "/data"))
    assert "pools.toml" in text
    assert KEY not in text
