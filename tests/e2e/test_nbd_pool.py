"""A volume on a server of network block devices: its guest waits while the server is away."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.platform import SERVER_POOL, SERVER_PORT, Platform, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SIZE_BYTES = 8 * 1024**2
WRITE = """#!/bin/sh
n=0
while [ $n -lt 2000 ]; do
  n=$((n+1))
  echo line-$n | dd of=/dev/vdb bs=512 seek=$n conv=fsync,sync 2>/dev/null || echo LOST > /dev/ttyS0
  echo "WROTE $n." > /dev/ttyS0
  sleep 0.2
done
"""


@contextmanager
def served(disk: Path) -> Iterator[None]:
    """Serve a file as the export `one` until the end of the context, then kill the server."""
    port = str(SERVER_PORT)
    words = ["qemu-nbd", "-t", "-x", "one", "-f", "raw", "-b", "127.0.0.1", "-p", port, str(disk)]
    with subprocess.Popen(words) as server:
        try:
            yield
        finally:
            server.kill()


def pool(platform: Platform) -> dict[str, str]:
    found = json.loads(platform.cli("pool", "get", SERVER_POOL, "-o", "json"))["items"][0]
    return {"state": found["state"], "message": found.get("message", "")}


def written(platform: Platform) -> int:
    """Return the number of the last line that the guest has written."""
    return platform.console_log("web").count("WROTE ")


def test_a_guest_waits_for_its_server_and_continues(platform: Platform, tmp_path: Path) -> None:
    disk, script = tmp_path / "one.raw", tmp_path / "user-data"
    disk.write_bytes(bytes(SIZE_BYTES))
    script.write_text(WRITE)
    with served(disk):
        until(lambda: pool(platform)["state"] == "Ready", "the server is known")
        platform.cli("volume", "create", "remote", "--size", "8MiB", "--pool", SERVER_POOL)
        use = ("--image", "tiny", "--memory", "128MiB", "--user-data", str(script))
        platform.create("web", *use, "--volume", "remote", wait="ready")
        until(lambda: written(platform) > 3, lambda: platform.console_log("web")[-2000:])
    began_s = time.monotonic()
    until(lambda: platform.get("web")["state"] == "Paused", "the guest waits")
    why = str(platform.get("web")["message"])
    assert f"the server of the pool {SERVER_POOL}" in why
    waited_s = time.monotonic() - began_s
    assert waited_s < 10, f"it took {waited_s:.1f} s"  # a probe interval, on a busy machine
    until(lambda: pool(platform)["state"] == "Gone", "the pool is gone")
    assert "start it" in pool(platform)["message"]  # it refuses, or a probe was under way
    platform.create("other", "--image", "tiny", "--memory", "128MiB", wait="ready")
    platform.delete("other")

    before = written(platform)
    with served(disk):
        until(lambda: written(platform) > before + 3, lambda: str(platform.get("web")))
        assert platform.get("web")["state"] == "Running"
        assert "LOST" not in platform.console_log("web")
        last = written(platform)
        platform.delete("web")
        lines = disk.read_bytes()
    for number in range(1, last):
        assert lines[number * 512 :].startswith(f"line-{number}\n".encode()), number
    platform.cli("volume", "delete", "remote")
    platform.nothing_left()
