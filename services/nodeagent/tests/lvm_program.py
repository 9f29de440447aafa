"""The program `lvm` of the tests: it runs lvm2, and pretends the activation; see `lvm2.py`.

It imports nothing of virtbus, because each command is a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

OLD = b"an earlier owner"
"""In the extents of a new logical volume."""
THIN = "thin"
"""The thin pool, which is an ordinary logical volume here: lvm2 makes none without the kernel."""
REAL = "/sbin/lvm"


def losetup(*words: str) -> str:
    """Run losetup; return its output."""
    done = subprocess.run(["losetup", *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    """Run one command, as `lvm` does."""
    home, words = Path(sys.argv[1]), sys.argv[2:]
    with (home / "log").open("a") as log:
        log.write(json.dumps(words) + "\n")
    fault = home / "faults" / words[0]
    if fault.exists():
        said = json.loads(fault.read_text())
        if said["hangs_s"]:
            os.execvp("sleep", ["sleep", str(said["hangs_s"])])
        sys.stdout.write(said["said"])
        sys.stderr.write(said["why"])
        sys.exit(said["status"])
    if words[0] == "lvremove" and (busy := _busy(home)):
        sys.stderr.write(f"  Logical volume {busy} in use.\n")
        sys.exit(5)
    done = _real(home, words) if "--activate" not in words else None
    if done is not None:
        said = done.stdout
        if words[0] == "lvs" and (home / "thin").exists():
            said = _as_thin(said)
        sys.stdout.write(said)
        sys.stderr.write(done.stderr)
    if words[0] in {"lvcreate", "lvextend", "lvremove", "lvchange"}:
        _activate(home)
    sys.exit(done.returncode if done is not None else 0)


def _real(home: Path, words: list[str]) -> "subprocess.CompletedProcess[str]":
    if words[0] == "lvcreate":
        words = [word for word in words if word not in {"--yes", "y", "--zero", "--wipesignatures"}]
        if "--thinpool" in words:
            at = words.index("--thinpool")
            words = ["--size" if w == "--virtualsize" else w for w in words[:at] + words[at + 2 :]]
        words += ["--activate", "n", "--zero", "n", "--wipesignatures", "n"]
    variables = {"LVM_SYSTEM_DIR": str(home / "etc"), "PATH": os.environ["PATH"], "LC_ALL": "C"}
    return subprocess.run(
        [REAL, *words], env=variables, check=False, capture_output=True, text=True
    )


def _as_thin(said: str) -> str:
    report = json.loads(said)
    for row in report["report"][0]["lv"]:
        if row["lv_name"] == THIN:
            row["data_percent"] = "25.00"
        elif "pool_lv" in row:
            row["pool_lv"] = THIN
    return json.dumps(report)


def _activate(home: Path) -> None:
    """Give each logical volume its device, as large as it is."""
    folder = (home / "devices").readlink()
    fields = ["-o", "lv_name,lv_size", "--units", "b", "--nosuffix", "--reportformat", "json"]
    rows = json.loads(_real(home, ["lvs", *fields, folder.name]).stdout)["report"][0]["lv"]
    sizes = {row["lv_name"]: int(row["lv_size"]) for row in rows}
    for link in folder.iterdir():
        if link.name not in sizes:
            losetup("--detach", str(link.readlink()))
            link.unlink()
            (home / "files" / link.name).unlink()
    for name, size_bytes in sizes.items():
        file, link = home / "files" / name, folder / name
        there = file.stat().st_size if file.exists() else 0
        with file.open("ab") as data:
            data.write(OLD * ((size_bytes - there) // len(OLD)))
        if link.is_symlink():
            losetup("--set-capacity", str(link.readlink()))
        else:
            link.symlink_to(losetup("--find", "--show", str(file)))


def _busy(home: Path) -> str:
    """Return the first logical volume of virtbus that somebody has open exclusively."""
    for link in (home / "devices").readlink().glob("virtbus-*"):
        try:
            os.close(os.open(link, os.O_RDONLY | os.O_EXCL))
        except OSError:
            return f"{link.parent.name}/{link.name}"
    return ""


if __name__ == "__main__":
    main()
