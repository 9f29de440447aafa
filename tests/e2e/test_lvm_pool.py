"""Volumes in a volume group: a guest boots from one, and sees another come, grow and go."""

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from services.nodeagent.tests.lvm2 import MIB, Lvm2, lvm2
from tests.e2e.platform import Platform, until
from tests.e2e.stage import STAGE
from tests.e2e.test_hot_volumes import WATCH, sees, volume

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lvm2]:
    home = tmp_path_factory.mktemp("lvm2") / "home"
    with lvm2(home, size_bytes=512 * MIB, devices=Path("/dev")) as made:
        yield made


@pytest.fixture(scope="module")
def platform(group: Lvm2) -> Iterator[Platform]:
    def add_pool(held: Platform) -> None:
        file = held.base / "pools.toml"
        pool = f'[pools.group]\nkind = "lvm"\ngroup = "{group.group}"\n'
        file.write_text(f"{file.read_text()}\n{pool}", encoding="utf-8")

    own = (str(group.home / "bin"), str(Path(sys.executable).parent))
    path = os.pathsep.join((*own, os.environ["PATH"]))
    with STAGE.apart({"PATH": path}, add_pool) as held:
        yield held


def moved(platform: Platform, pool: str) -> bool:
    view = volume(platform, "root")
    return bool(view["spec"].get("pool", "local") == pool and not view.get("message"))


def holds(platform: Platform, volumes: int) -> bool:
    return bool(platform.pool("group")["volumes"] == volumes)


def test_a_guest_boots_from_a_volume_group_and_uses_a_volume_that_grows(
    platform: Platform, group: Lvm2, tmp_path: Path
) -> None:
    until(lambda: platform.pool("group")["state"] == "Ready", "the pool")
    made = ("volume", "create", "root", "--size", "256MiB", "--pool", "group")
    platform.cli(*made, "--from-image", "tiny")
    spec = {"volumes": [{"name": "root", "volume": {"name": "root"}}]}
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"memory": "128MiB", "user_data": WATCH, "spec": spec}))
    platform.create("hot", "-f", str(file), wait="ready")
    platform.cli("volume", "create", "data", "--size", "40MiB", "--pool", "group")
    platform.cli("volume", "attach", "data", "hot")
    sees(platform, {("vd", 40)})
    platform.cli("volume", "update", "data", "--size", "48MiB")
    sees(platform, {("vd", 48)})
    platform.cli("volume", "detach", "data")
    assert volume(platform, "data")["state"] == "Bound"
    platform.cli("volume", "delete", "data")
    platform.delete("hot")
    platform.create("hot", "-f", str(file), wait="ready")  # it finds its root again
    for pool, held in (("local", 1), ("group", 0)):
        platform.cli("vm", "stop", "hot", "--grace", "0", "--wait")
        # the group has room for one root: the next move is planned by the pool's report
        until(partial(holds, platform, held), "the pool's report")
        platform.cli("volume", "move", "root", "--pool", pool)
        until(partial(moved, platform, pool), f"the move to {pool}", within_s=120)
        assert bool(group.tags()) == (pool == "group")
        platform.cli("vm", "start", "hot")
        platform.wait_ready("hot")
    platform.delete("hot")
    until(lambda: platform.pool("group")["volumes"] == 1, "the next report of the pool")
    assert platform.pool("group")["kind"] == "lvm"
    platform.cli("volume", "delete", "root")
    assert group.tags() == {}
    done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    platform.cli("operation", "delete", *(item["id"] for item in done))
    platform.nothing_left()
