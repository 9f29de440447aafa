"""A guest with a database under constant writes: its disks, its program, and what it reports.

SQLite of this machine runs in the guest `tiny`. Each transaction writes to two database files on
two disks, so SQLite's own recovery fails if both disks are not of one instant. After each boot
the guest checks both files before it writes on.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

IMAGE = "database"
DISK_BYTES = 32 * 2**20
KEPT = 300
"""Older rows are deleted, so pages are used again and the files stay small."""
_SQLITE = Path("/usr/bin/sqlite3")
_DISKS = ("first", "second")
_FILES = "/first/db", "/second/db"

_PROGRAM = rf"""#!/bin/sh
mkdir /dev/database 2>/dev/null || exit 0  # a first boot of a clone would start a second writer
mkdir -p /first /second
mount -t ext4 /dev/vdb /first && mount -t ext4 /dev/vdc /second || echo NO-DISKS >/dev/ttyS0
boot=$(cat /proc/sys/kernel/random/boot_id)
cd /first
sql() {{ lib/ld-linux-x86-64.so.2 --library-path lib ./sqlite3 -batch {_FILES[0]}; }}
both="ATTACH '{_FILES[1]}' AS second;"
sql >/dev/ttyS0 2>&1 <<END
$both
BEGIN;
CREATE TABLE IF NOT EXISTS main.log(n INTEGER PRIMARY KEY, boot TEXT, body BLOB);
CREATE TABLE IF NOT EXISTS second.log(n INTEGER PRIMARY KEY, boot TEXT, body BLOB);
CREATE TABLE IF NOT EXISTS main.total(total INTEGER);
INSERT INTO main.total SELECT 0 WHERE NOT EXISTS (SELECT * FROM main.total);
COMMIT;
SELECT 'START', '$boot', (SELECT integrity_check FROM pragma_integrity_check(9, 'main')),
    (SELECT integrity_check FROM pragma_integrity_check(9, 'second')),
    coalesce((SELECT max(n) FROM main.log), 0), coalesce((SELECT max(n) FROM second.log), 0),
    (SELECT count(*) FROM main.log), (SELECT count(*) FROM second.log),
    (SELECT total FROM main.total),
    coalesce((SELECT boot FROM main.log ORDER BY n DESC), '-'), 'DONE';
END
row="coalesce(max(n), 0) + 1, '$boot', randomblob(900)"
write() {{
    echo "$both"
    while :; do
        echo "BEGIN IMMEDIATE;
        INSERT INTO main.log SELECT $row FROM main.log;
        INSERT INTO second.log SELECT $row FROM second.log;
        UPDATE main.total SET total = total + (SELECT max(n) FROM second.log);
        DELETE FROM main.log WHERE n <= (SELECT max(n) FROM main.log) - {KEPT};
        DELETE FROM second.log WHERE n <= (SELECT max(n) FROM second.log) - {KEPT};
        COMMIT;
        SELECT 'AT ' || max(n) || '.' FROM main.log;"
        usleep 20000
    done
}}
write | sql >/dev/ttyS0 2>&1
"""
USER_DATA = f"""#!/bin/sh
cat >/lib/tiny/database <<'PROGRAM'
{_PROGRAM}
PROGRAM
chmod 755 /lib/tiny/database
grep -q database /etc/inittab || echo '::once:/lib/tiny/database' >>/etc/inittab
sync
/lib/tiny/database &
"""


def make_image(folder: Path) -> Path:
    """Return a disk with a file system and SQLite's program, for both disks of the guest."""
    root, raw = folder / "root", folder / "database.raw"
    (root / "lib").mkdir(parents=True)
    shutil.copy(_SQLITE, root / "sqlite3")
    needed = subprocess.run(["ldd", _SQLITE], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"(/\S+\.so\S*)", needed):
        shutil.copy(library, root / "lib")
    with raw.open("wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", root, raw], check=True)
    return raw


def spec() -> dict[str, object]:
    """Return the spec of a VM with the database on two disks of its own."""
    disks = [{"name": name} for name in ("root", *_DISKS)]
    own = [{"name": name, "image": {"ref": IMAGE}} for name in _DISKS]
    return {
        "domain": {"memory": {"guest": "128MiB"}, "devices": {"disks": disks}},
        "volumes": [
            {"name": "root", "image": {"ref": "tiny"}},
            *own,
            {"name": "seed", "cloud_init_no_cloud": {"user_data": USER_DATA}},
        ],
    }


@dataclass(frozen=True)
class Found:
    """The database as one boot of the guest has found it."""

    boot: str
    """The id of that boot."""
    checks: tuple[str, str]
    """SQLite's verdict on each file."""
    last: tuple[int, int]
    """The last transaction in each file."""
    rows: tuple[int, int]
    total: int
    """The sum of the numbers of all transactions ever."""
    written_by: str
    """The id of the boot that wrote the last transaction."""

    def problems(self) -> list[str]:
        """Return each way in which this is no state between two transactions."""
        last, found = self.last[0], []
        if self.checks != ("ok", "ok"):
            found.append(f"SQLite: {self.checks}")
        if self.last[0] != self.last[1]:
            found.append(f"the files have other transactions: {self.last}")
        if set(self.rows) != {min(last, KEPT)}:
            found.append(f"{self.rows} rows after {last} transactions")
        if self.total != last * (last + 1) // 2:
            found.append(f"the total is {self.total} after {last} transactions")
        return found


@dataclass(frozen=True)
class State:
    """A state that was asked for: transactions of one boot, from the last reported before."""

    boot: str
    low: int
    high: int

    def problems(self, found: Found) -> list[str]:
        """Return each way in which `found` is not this state."""
        wrong = found.problems()
        if found.written_by != self.boot:
            wrong.append(f"written by the boot {found.written_by}, not {self.boot}")
        if not self.low <= found.last[0] <= self.high:
            wrong.append(f"{found.last[0]} transactions, not {self.low} to {self.high}")
        return wrong


def written(console: str) -> int:
    """Return the last transaction that the guest reported since its last boot."""
    since = console[console.rfind("START|") :]
    return max(map(int, re.findall(r"AT (\d+)\.", since)), default=0)


def starts(console: str) -> list[Found]:
    """Return what each boot has found, the oldest first."""
    return [_found(line.split("|")) for line in re.findall(r"START\|(\S+)\|DONE", console)]


def _found(words: list[str]) -> Found:
    boot, *checks = words[:3]
    numbers = [int(word) for word in words[3:8]]
    return Found(
        boot,
        (checks[0], checks[1]),
        (numbers[0], numbers[1]),
        (numbers[2], numbers[3]),
        numbers[4],
        words[8],
    )
