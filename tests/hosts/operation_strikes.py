"""Kills a process at a seeded instant of an operation, and follows the operation to its end."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.platform import Json, until
from tests.hosts.fleet import STATE, Fleet, Host
from tests.hosts.killer import _end_probes

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import Code, VirtbusError

POINTS = int(os.environ.get("KILL_POINTS", "50"))
"""Kills of each operation."""
SEED = int(os.environ.get("KILL_SEED", "15"))
SERVICES = ("controller", "imaged", "nodeagent")
OF_GUEST = (*SERVICES, "libvirtd", "qemu")
"""The processes that may be killed during an operation on a running guest."""
DAEMON = "qemu-storage-daemon"
"""It merges the layers of disks."""
ENDED = ("Succeeded", "Failed", "Cancelled")
NO_GUEST = frozenset({"guest_ended", "vm_runs", "vm_fails", "disk_not_switchable", "disk_in_use"})
"""Reasons of refusals and failures while a guest ends, or starts again."""
UNKNOWN_LAYERS = "layers_differ"
"""libvirt died while QEMU took new files: the guest needs a start before its next snapshot."""
WITHIN_S = 180.0
KEPT_FILES = 40
CONSOLE_BYTES = 1_000_000
FILES = f"""#!/bin/sh
cat >/lib/tiny/files <<'PROGRAM'
#!/bin/sh
mkdir /dev/files 2>/dev/null || exit 0  # a first boot of a clone would start a second writer
mkdir -p /files && cd /files
last=$(ls | grep -v new | sort -n | tail -n 1)
last=${{last:-0}} bad=0 n=$((last - {KEPT_FILES}))
[ $n -gt 0 ] || n=0
while [ $n -lt $last ]; do
    n=$((n + 1))
    [ "$(cat $n)" = "file $n" ] || bad=$((bad + 1))
done
echo "START $(cat /proc/sys/kernel/random/boot_id) $last $bad DONE" >/dev/ttyS0
while :; do
    n=$((n + 1))
    echo "file $n" >$n.new && sync && mv $n.new $n && sync
    rm -f $((n - {KEPT_FILES}))
    echo "AT $n." >/dev/ttyS0
    usleep 50000
done
PROGRAM
chmod 755 /lib/tiny/files
grep -q files /etc/inittab || echo '::once:/lib/tiny/files' >>/etc/inittab
sync
/lib/tiny/files &
"""
"""The guest writes numbered files, each to disk, and checks the last ones at each boot."""


class Strikes:
    """The kills of one operation, on one host.

    Its services restart after a second, as by systemd. `virtbus up` would wait longer each time.
    """

    def __init__(self, platform: Fleet, what: str, targets: tuple[str, ...]) -> None:
        self.platform = platform
        self._random = random.Random(f"{SEED}-{what}")
        self._targets = targets
        self._longest_s = 0.5
        self._ended: list[str] = []
        self._writer_killed = False

    @property
    def host(self) -> Host:
        return self.platform.hosts["n1"]

    def calibrate(self, took_s: float) -> None:
        """Draw the next instants from the time that the operation takes without a kill."""
        self._longest_s = max(took_s, 0.2)

    def during(self, work: Callable[[], Any], vm: str = "") -> tuple[str, Any]:
        """Run `work`, and kill a process meanwhile or right after; return both.

        `vm` is the uid of the guest whose QEMU may be killed.
        """
        while self._ended:  # their number is limited
            with suppress(VirtbusError):
                self.insist("operation.delete", {"id": self._ended.pop()})
        target = self._random.choice(self._targets)
        after_s = self._random.uniform(0, 1.1 * self._longest_s)
        sys.stderr.write(f"kill -9 {target} after {after_s:.2f} s\n")
        timer = threading.Timer(after_s, self._kill, (target, vm))
        timer.start()
        try:
            done = work()
        finally:
            timer.join()
        return target, done

    def _kill(self, target: str, vm: str) -> None:
        self._writer_killed = self._writer_killed or target in {"qemu", DAEMON}
        for pid in self._victims(target, vm):
            self.host.box.kill(pid)
        if target == "libvirtd":
            _end_probes(self.host)

    def restart_libvirtd(self) -> None:
        """Kill libvirtd, and wait until another one runs."""
        before = self._victims("libvirtd", "")
        self._kill("libvirtd", "")
        until(
            lambda: self._victims("libvirtd", "") not in ([], before),
            "libvirtd runs again",
            within_s=WITHIN_S,
        )

    def _victims(self, target: str, vm: str) -> list[int]:
        if target == "qemu":
            return [pid for pid, uid in self.host.emulators().items() if uid == vm]
        if target == DAEMON:
            found = self.host.box.processes()
            return [pid for pid, argv in found.items() if argv[0].endswith(DAEMON)]
        pid = self.host.pids().get(target)
        return [] if pid is None else [pid]

    # --- requests ---------------------------------------------------------------------------
    def insist(self, verb: str, data: Json) -> Json:
        """Repeat a request until it is answered; raise a refusal that a repeat cannot change."""
        end_s = time.monotonic() + WITHIN_S
        while True:
            try:
                found: Json = self.platform.ask(verb, data, timeout_s=8)
            except (BusError, VirtbusError) as error:
                passes = not isinstance(error, VirtbusError) or error.code >= Code.EXHAUSTED
                if not passes or time.monotonic() > end_s:
                    raise
                time.sleep(0.1)
            else:
                return found

    def cli(self, *argv: str) -> str:
        """Run a command once all services are ready; it does not repeat its requests."""
        self.platform.wait_whole(within_s=WITHIN_S)
        return self.platform.cli(*argv)

    def begun(self, verb: str, data: Json) -> str:
        """Begin an operation; return the reason of its refusal while no guest runs."""
        try:
            self.insist(verb, data)
        except VirtbusError as error:
            if error.reason not in NO_GUEST:
                raise
            return error.reason
        return ""

    def ended(self, operation: str) -> Json:
        """Return an operation after its end."""
        seen: list[Json] = []

        def over() -> bool:
            seen.append(self.insist("operation.get", {"id": operation}))
            return seen[-1].get("phase") in ENDED

        until(over, lambda: f"the operation ends: {seen[-1]}", within_s=WITHIN_S)
        self._ended.append(operation)
        return seen[-1]

    def gone(self, verb: str, data: Json) -> bool:
        """Return True if a get answers that there is nothing."""
        try:
            self.insist(verb, data)
        except VirtbusError as error:
            if error.code in {Code.NOT_FOUND, Code.GONE}:
                return True
            raise
        return False

    # --- the host ---------------------------------------------------------------------------
    def path(self, inside: str) -> Path:
        """Return the path here of a file in the host's state folder."""
        return self.host.box.path(STATE / inside)

    def check(self, *files: str) -> None:
        """Let qemu-img check files of the state folder that no guest has open.

        A killed QEMU leaves clusters that it has reserved and not used yet. They only take space.
        """
        for file in files:
            told = self.host.box.run(
                *("qemu-img", "check", "--output=json", str(STATE / file)), check=False
            )
            found = json.loads(told)
            assert found["check-errors"] == found.get("corruptions", 0) == 0, told
            assert self._writer_killed or not found.get("leaks"), told

    def check_all(self) -> None:
        """Check every disk and layer, once no guest runs."""
        root = self.path("")
        self.check(*(str(path.relative_to(root)) for path in root.glob("disks/**/*.qcow2")))

    def staged(self) -> list[str]:
        """Return the files of unfinished work on disks."""
        names = (".new-*", "layering.json", "replacing.json", "part", "packed", ".part-*")
        root = self.path("disks")
        found = [path for name in names for path in root.glob(f"**/{name}")]
        return [str(path.relative_to(root)) for path in (*found, *root.glob("backups/*"))]

    def removed(self, file: str) -> None:
        """Wait until a file of the state folder is gone."""
        until(lambda: not self.path(file).exists(), f"{file} is gone", within_s=WITHIN_S)

    def ready(self, snapshot: str) -> None:
        """Wait until a snapshot is complete."""
        ask = {"name": snapshot}
        until(
            lambda: self.insist("snapshot.get", ask)["state"] == "Ready",
            f"{snapshot} is ready",
            within_s=WITHIN_S,
        )

    def delete_snapshots(self, *names: str) -> None:
        """Delete snapshots with their data, once they are complete."""
        for name in names:
            self.ready(name)
            self.insist("snapshot.delete", {"name": name})
        self.no_snapshots(*names)

    def no_snapshots(self, *names: str) -> None:
        """Wait until the snapshots are gone, as those of failed operations are."""
        for name in names:
            gone = partial(self.gone, "snapshot.get", {"name": name})
            until(gone, f"{name} is gone", within_s=WITHIN_S)

    def nothing_staged(self) -> None:
        """Wait until nothing of unfinished work is left."""
        until(lambda: not self.staged(), lambda: f"left: {self.staged()}", within_s=WITHIN_S)


class FilesGuest:
    """A VM whose guest syncs files."""

    def __init__(self, strikes: Strikes, folder: Path, name: str) -> None:
        self._strikes = strikes
        self.name, self.uid = name, uuid7()
        self._boots: set[str] = set()
        data = folder / "files"
        data.write_text(FILES)
        strikes.cli(
            *("vm", "create", name, "--uid", self.uid, "--image", "tiny", "--memory", "128MiB"),
            *("--user-data", str(data), "--wait", "running"),
        )
        self.whole()

    def console(self) -> str:
        """Return the log of its last run: a command for each look would take the guest's CPU."""
        log = self._strikes.path(f"consoles/{self.uid}.log")
        with suppress(FileNotFoundError):  # the agent moves the log of an earlier run away
            return log.read_bytes()[-CONSOLE_BYTES:].decode(errors="replace")
        return ""

    def written(self) -> int:
        """Return the last file that the guest has synced since its last boot."""
        console = self.console()
        since = console[max(console.rfind("START"), 0) :]
        return max(map(int, re.findall(r"AT (\d+)\.", since)), default=0)

    def whole(self, synced: int = 0) -> None:
        """Wait for the next boot; the guest has found each file that it had synced."""

        def new() -> list[tuple[str, int, int]]:
            return [one for one in _starts(self.console()) if one[0] not in self._boots]

        until(new, lambda: f"{self.name} boots:\n{self.console()[-2000:]}", within_s=WITHIN_S)
        boot, last, bad = new()[-1]
        self._boots.add(boot)
        assert (last >= synced, bad) == (True, 0), f"{last} files after {synced}, {bad} are bad"

    def continues(self) -> None:
        """Wait until it has synced another file."""
        seen = self.written()
        until(lambda: self.written() > seen, f"{self.name} writes on", within_s=WITHIN_S)

    def stop(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._strikes.cli("vm", "stop", self.name, "--grace", "0", "--wait")

    def restarted(self) -> None:
        """Start it after a stop; it has all files."""
        synced = self.written()
        self.started(synced)

    def started(self, synced: int) -> None:
        """Start it; it has at least so many files."""
        self._strikes.cli("vm", "start", self.name, "--wait")
        self.whole(synced)


def _starts(console: str) -> list[tuple[str, int, int]]:
    """Return the id of each boot, the last file that it has found, and the number of bad ones."""
    found = re.findall(r"START (\S+) (\d+) (\d+) DONE", console)
    return [(boot, int(last), int(bad)) for boot, last, bad in found]
