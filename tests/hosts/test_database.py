"""A database under constant writes is consistent in each snapshot, restore, clone and backup."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.platform import Json, until
from tests.hosts.database import (
    IMAGE,
    Found,
    State,
    make_image,
    spec,
    starts,
    written,
)
from tests.hosts.fleet import STATE, Fleet, fleet

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3600)]

SNAPSHOTS = 10
RESTORED_AFTER = (2, 4, 6, 8, 10)
CLONED_AFTER = {3: (), 5: (), 9: ("--full",)}
"""Options of the clones after so many snapshots: two rest on layers, one copies."""
BACKUPS = 4
BOOT_S = 240.0
CONSOLE_BYTES = "1000000"
SEED = 15


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two hosts that share a backup directory, as by a server."""
    shared = tmp_path_factory.mktemp("backups")
    with fleet(hosts=2, servers=1, environ={"VIRTBUS_BACKUP_DIR": str(shared)}) as made:
        yield made


class Guest:
    """A VM with the database."""

    def __init__(self, platform: Fleet, name: str) -> None:
        self._platform = platform
        self.name = name
        self._boots: set[str] = set()

    def console(self) -> str:
        return self._platform.cli("vm", "logs", self.name, "--tail-bytes", CONSOLE_BYTES)

    def booted(self) -> Found:
        """Return what the next boot has found."""

        def new() -> list[Found]:
            return [one for one in starts(self.console()) if one.boot not in self._boots]

        until(
            new,
            lambda: f"{self.name} has checked its files:\n{self.console()[-3000:]}",
            within_s=BOOT_S,
        )
        found = new()[-1]
        self._boots.add(found.boot)
        return found

    def writes_on(self) -> None:
        """Wait for a few transactions."""
        seen = written(self.console())
        until(lambda: written(self.console()) > seen + 2, "it writes on", within_s=BOOT_S)

    def during(self, *command: str) -> tuple[State, Json]:
        """Run a command; return the state between its begin and its end, and its output."""
        console = self.console()
        boot, low = starts(console)[-1].boot, written(console)
        done = json.loads(self._platform.cli(*command, "-o", "json"))
        self.writes_on()
        return State(boot, low, written(self.console())), done

    def stop(self) -> None:
        self._platform.cli("vm", "stop", self.name, "--grace", "0", "--wait")

    def restarted(self) -> Found:
        """Start it; return what it has found."""
        self._platform.cli("vm", "start", self.name, "--wait")
        return self.booted()


def create(platform: Fleet, folder: Path) -> Guest:
    """Make the VM with the database on n1."""
    disk = make_image(folder)
    platform.cli("image", "upload", str(disk), "--name", IMAGE, "--node", "n1")
    file = folder / "vm.json"
    file.write_text(json.dumps({"spec": spec()}))
    platform.cli("vm", "create", "db", "-f", str(file), "--wait", "running")
    guest = Guest(platform, "db")
    assert guest.booted().problems() == []
    guest.writes_on()
    return guest


def restored(platform: Fleet, guest: Guest, name: str, state: State, keep: str) -> None:
    """Restore a snapshot in place; the guest finds its state, and writes on."""
    guest.stop()
    platform.cli("snapshot", "restore", name, "--keep", keep)
    assert state.problems(guest.restarted()) == [], name
    guest.writes_on()


def cloned(platform: Fleet, guest: Guest, name: str, options: tuple[str, ...]) -> None:
    """Clone the running guest; the clone finds the state of that instant."""
    state, _ = guest.during("vm", "clone", guest.name, name, *options)
    clone = Guest(platform, name)
    assert state.problems(clone.booted()) == [], name
    clone.writes_on()
    clone.stop()
    assert clone.restarted().problems() == [], name
    clone.stop()


def backed_up(platform: Fleet, guest: Guest) -> list[tuple[str, State]]:
    """Make a chain of backups of the running guest; return their ids and states."""
    made = []
    for number in range(BACKUPS):
        state, backup = guest.during("backup", "create", guest.name)
        assert backup.get("depth", 0) == number, backup.get("full_because")
        made.append((backup["id"], state))
    return made


def on_the_other_host(platform: Fleet, backups: list[tuple[str, State]]) -> None:
    """Restore backups of the chain on n2, which never had the VM."""
    for number in (0, BACKUPS // 2, BACKUPS - 1):
        id_, state = backups[number]
        name = f"back-{number}"
        platform.cli("backup", "verify", id_, "--node", "n2")
        platform.cli("backup", "restore", id_, "--name", name, "--node", "n2")
        guest = Guest(platform, name)
        assert state.problems(guest.booted()) == [], name
        guest.writes_on()
        assert json.loads(platform.cli("vm", "get", name, "-o", "json"))["node"] == "n2"
        guest.stop()


def clean(platform: Fleet) -> None:
    """Every disk and layer of both hosts is sound for qemu-img."""
    for host in platform.hosts.values():
        disks = host.box.path(STATE / "disks")
        for path in sorted(disks.glob("**/*.qcow2")):
            inside = STATE / "disks" / path.relative_to(disks)
            host.box.run("qemu-img", "check", "-q", str(inside))


def all_removed(platform: Fleet) -> None:
    """Remove everything; the layers go as well."""

    def names(kind: str, field: str = "name") -> list[str]:
        return [one[field] for one in json.loads(platform.cli(kind, "list", "-o", "json"))["items"]]

    platform.cli("vm", "delete", *names("vm"), "--grace", "0", "--wait")
    platform.cli("snapshot", "delete", *names("snapshot"))
    platform.cli("backup", "delete", *reversed(names("backup", "id")))
    layers = platform.hosts["n1"].box.path(STATE / "disks/layers")
    until(lambda: not list(layers.glob("*")), "no layer is left", within_s=180)
    volumes = names("volume")
    if volumes:
        platform.cli("volume", "delete", *volumes)
    platform.cli("operation", "delete", *names("operation", "id"))
    platform.nothing_left()


def test_each_state_of_a_database_is_consistent_and_the_requested_one(
    platform: Fleet, tmp_path: Path
) -> None:
    guest = create(platform, tmp_path)
    chosen = random.Random(SEED)
    states: dict[str, State] = {}
    for number in range(1, SNAPSHOTS + 1):
        name = f"s{number}"
        states[name], _ = guest.during("snapshot", "create", name, "--vm", "db")
        if number in CLONED_AFTER:
            cloned(platform, guest, f"clone-{number}", CLONED_AFTER[number])
        if number in RESTORED_AFTER:
            one = chosen.choice(sorted(states))
            restored(platform, guest, one, states[one], f"before-{number}")
    backups = backed_up(platform, guest)
    guest.stop()
    on_the_other_host(platform, backups)
    clean(platform)
    all_removed(platform)
