"""Boxes are separate hosts, and leave no trace after any end of their test."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.e2e.host import refuse_the_machines_own_network
from tests.hosts.box import BRIDGE, ROOT, Box, boxes

pytestmark = pytest.mark.integration

KILLED = """
import os, sys
from pathlib import Path
from tests.hosts.box import Box, boxes
with boxes(Path(sys.argv[1])) as held:
    box = Box(held, "n1", 1)
    box.on()
    box.popen("sleep", "1000")
    print(held.base, held.pid, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def seed(tmp_path: Path) -> Path:
    refuse_the_machines_own_network()
    for folder in ("libexec", "images/src"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def traces(base: str, holder: str) -> list[str]:
    """Return the traces of one holder's boxes; other tests may have theirs."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    found = [line for line in links.splitlines() if BRIDGE in line or "vb-n1" in line]
    found += [str(path) for path in (Path(base), Path("/proc", holder)) if path.exists()]
    return found + [str(one) for one in Path("/sys/fs/cgroup").glob(f"*/virtbus-hosts-{holder}")]


def test_a_box_has_its_own_name_processes_and_files_and_keeps_its_disk(seed: Path) -> None:
    with boxes(seed) as held:
        one, two = Box(held, "n1", 1), Box(held, "n2", 2)
        one.on()
        two.on()
        assert one.run("hostname").strip() == "n1"
        assert one.run("ps", "-o", "comm=", "1").strip() == "tini"
        one.run("ping", "-n", "-c", "1", "-W", "2", two.address)
        one.run("touch", "/run/this-boot", "/var/lib/virtbus/kept")
        one.off()
        one.on()
        assert one.run("ls", "/var/lib/virtbus").split() == ["images", "kept", "libexec"]
        assert not one.path("/run/this-boot").exists()
        assert not Path("/var/lib/virtbus/kept").exists()
        one.cut()
        with pytest.raises(AssertionError):
            one.run("ping", "-n", "-c", "1", "-W", "1", two.address)
        one.heal()
        one.run("ping", "-n", "-c", "3", "-i", "0.3", "-W", "2", two.address)


def test_nothing_is_left_of_a_test_that_was_killed(seed: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(seed)]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -9
    base, holder = done.stdout.split()
    deadline = time.monotonic() + 15
    while traces(base, holder):
        assert time.monotonic() < deadline, traces(base, holder)
        time.sleep(0.05)
