"""The process that holds boxes: they end with it, and it ends with its starter.

    python -m tests.hosts.holder BASE SEED BRIDGE ADDRESS/PREFIX

It reads `on NAME ADDRESS/PREFIX` and `off NAME` on stdin, and answers each with `NAME PID` or
`NAME -`. At the end of stdin, for any cause, it kills every box and removes all their traces. It
uses only the standard library. A holder that was itself killed takes its boxes with it; the next
one removes the rest.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MARK = "virtbus-hosts-"
INIT = Path(__file__).with_name("box.sh")
NAMESPACES = ("--pid", "--net", "--mount", "--uts", "--cgroup")
WITHIN_S = 20.0


def run(*argv: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def hierarchies() -> list[Path]:
    """Return every mounted cgroup hierarchy of the machine."""
    return [path for path in CGROUPS.iterdir() if (path / "cgroup.procs").exists()]


class Holder:
    """Boxes on one bridge, by name."""

    def __init__(self, base: Path, seed: Path, bridge: str, address: str) -> None:
        self._base = base
        self._seed = seed
        self._bridge = bridge
        self._boxes: dict[str, subprocess.Popen[bytes]] = {}
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "address", "add", address, "dev", bridge)
        run("ip", "link", "set", bridge, "up")

    def on(self, name: str, address: str) -> int:
        """Power a box on; return the pid of its first process."""
        (self._base / name / "disk").mkdir(parents=True, exist_ok=True)
        (self._base / name / "up").unlink(missing_ok=True)
        groups = self._groups(name)
        enter = "".join(f"echo $$ > {group}/cgroup.procs\n" for group in groups)
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", *NAMESPACES]
        argv += [str(INIT), name, str(self._base), str(self._seed)]
        box = subprocess.Popen(
            ["bash", "-ec", f'{enter}exec "$@"', "box", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._boxes[name] = box
        self._until(lambda: (self._base / name / "up").exists(), box, f"{name} is up")
        children = Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text().split()
        pid = int(children[0])
        link = f"vb-{name}"
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        run("ip", "link", "set", link, "master", self._bridge, "up")
        inside = ("nsenter", "-t", str(pid), "-n", "ip")
        run(*inside, "address", "add", address, "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        return pid

    def off(self, name: str) -> None:
        """Cut a box's power: every process in it is gone on return; its disk stays."""
        box = self._boxes.pop(name, None)
        if box is not None:
            # --kill-child: the kernel ends the box's first process, and so the whole box
            box.kill()
            box.wait()
        with contextlib.suppress(subprocess.CalledProcessError):
            # the peer ends with the namespace, but only when the last of its sockets is closed
            subprocess.run(["ip", "link", "delete", f"vb-{name}"], capture_output=True, check=True)
        deadline = time.monotonic() + WITHIN_S
        while any(self._remove_group(group / name) for group in self._roots()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)

    def _groups(self, name: str) -> list[Path]:
        found = []
        for root in self._roots():
            for path in (root, root / name):
                path.mkdir(exist_ok=True)
                for knob in ("cpuset.cpus", "cpuset.mems"):  # v1: empty, and nobody may enter
                    if (path / knob).exists():
                        (path / knob).write_text((path.parent / knob).read_text())
            found.append(root / name)
        return found

    def _roots(self) -> list[Path]:
        return [path / f"{MARK}{os.getpid()}" for path in hierarchies()]

    @staticmethod
    def _remove_group(path: Path) -> bool:
        """Remove an emptied tree of groups; return True while something is still in it."""
        for folder, _, _ in os.walk(path, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
        return path.exists()

    def end(self) -> None:
        """Remove all traces."""
        for name in list(self._boxes):
            self.off(name)
        for root in self._roots():
            self._remove_group(root)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, check=False)
        # frozen layers are immutable (ADR 0061)
        argv = ["chattr", "-R", "-f", "-i", str(self._base)]
        subprocess.run(argv, capture_output=True, check=False)
        shutil.rmtree(self._base, ignore_errors=True)

    @staticmethod
    def _until(condition: Callable[[], bool], box: "subprocess.Popen[bytes]", what: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            if box.poll() is not None or time.monotonic() > deadline:
                msg = f"not within {WITHIN_S:g} s: {what} ({box.poll()})"
                raise RuntimeError(msg)
            time.sleep(0.01)


def sweep() -> None:
    """Remove the empty groups of holders that were killed."""
    for hierarchy in hierarchies():
        for path in hierarchy.glob(f"{MARK}*"):
            if not Path(f"/proc/{path.name.removeprefix(MARK)}").exists():
                Holder._remove_group(path)


def _answer(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(base: str, seed: str, bridge: str, address: str) -> None:
    """Execute the orders on stdin until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # the end of stdin is the only way to end this process
        signal.signal(number, signal.SIG_IGN)
    sweep()
    holder = Holder(Path(base), Path(seed), bridge, address)
    try:
        for line in sys.stdin:
            match line.split():
                case ["on", name, where]:
                    _answer(name, holder.on(name, where))
                case ["off", name]:
                    holder.off(name)
                    _answer(name, "-")
                case _:
                    _answer("what?", line)
    finally:
        holder.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
