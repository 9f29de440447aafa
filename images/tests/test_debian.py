"""The image `debian` in plain QEMU; `tests/e2e/test_debian.py` tests it on virtbus."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from images.tests.plain_qemu import Guest, disk_seed, overlay, write_seed

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(2400)]

BOOT_S = 1200  # a minute on an idle machine; a crowded one takes far longer
USER = """\
#cloud-config
runcmd:
- |
  sources=$(grep -c ^deb /etc/apt/sources.list) warnings=$(grep -c WARNING /var/log/cloud-init.log)
  echo "RAN sources=$sources warnings=$warnings" >/dev/ttyS0
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh image; instant if the cache has it, as after `make debian-image`."""
    path = tmp_path_factory.mktemp("image") / "debian.qcow2"
    build = Path(__file__).parents[1] / "debian" / "build"
    subprocess.run([build, path], check=True, timeout=1200)
    return path


def test_a_config_drive_is_taken_and_the_power_button_shuts_down(
    image: Path, tmp_path: Path
) -> None:
    meta = {"uuid": "c-1", "hostname": "driven"}
    seed = write_seed(
        tmp_path / "seed.iso",
        {"meta_data.json": json.dumps(meta), "user_data": USER},
        label="config-2",
        folder="/openstack/latest",
    )
    disk = overlay(image, tmp_path / "disk.qcow2", "3G")
    nic = ("-nic", "user,model=virtio-net-pci")
    with Guest(tmp_path, disk, *disk_seed(seed), *nic, mib=512) as guest:
        console = guest.wait_for("GUEST-NICS ", BOOT_S)
        assert "GUEST-READY hostname=driven ip=10.0.2.15\r\n" in console, console
        assert "Datasource DataSourceConfigDrive" in console, console
        assert re.search(r"RAN sources=[1-9]\d* warnings=0\r\n", console), console
        guest.wait_for("driven login:", BOOT_S)
        guest.power_button()
        assert guest.wait_off(BOOT_S) == 0
