"""A program in the sandbox can do nothing but compute, and read and write its two files."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from virtbus.imaged.edge import sandbox

pytestmark = pytest.mark.integration

_PYTHON = "/usr/bin/python3"
_PRELUDE = """
import ctypes, json, os, resource, signal, socket, sys
source, target = sys.argv[1:]
def outcome(deed):
    try:
        deed()
    except (OSError, MemoryError, ValueError) as error:
        return type(error).__name__
    return "done"
"""
_TRIES = """
libc = ctypes.CDLL(None)
tries = {
    "read a secret": lambda: open("/etc/passwd").read(),
    "list a folder": lambda: os.listdir("/root"),
    "read a process": lambda: open(f"/proc/{os.getppid()}/environ", "rb").read(),
    "write a file": lambda: open("/tmp/sandboxed", "w"),
    "write the source": lambda: open(source, "r+b"),
    "truncate by path": lambda: os.truncate(SECRET, 0),
    "change a mode": lambda: os.chmod(SECRET, 0o777),
    "remove": lambda: os.unlink(SECRET),
    "link": lambda: os.link(SECRET, "/tmp/sandboxed"),
    "connect": lambda: socket.create_connection(("127.0.0.1", PORT), 1),
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "fork": os.fork,
    "start a program": lambda: os.posix_spawn("/usr/bin/true", ["true"], {}),
    "signal the parent": lambda: os.kill(os.getppid(), 0),
    "limit the parent": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1)),
    "unshare": lambda: fails(libc.unshare(0x10000000)),
    "memory": lambda: bytearray(2 << 30),
    "more time": lambda: resource.setrlimit(resource.RLIMIT_CPU, (99, 99)),
}
def fails(result):
    if result < 0:
        raise OSError
found = {name: outcome(deed) for name, deed in tries.items()}
found["uid"] = os.getuid()
found["groups"] = os.getgroups()
found["descriptors"] = [n for n in range(64) if outcome(lambda: os.fstat(n)) == "done"]
with open(target, "r+b") as file:
    file.write(json.dumps(found).encode())
"""


def sandboxed(tmp_path: Path, code: str, cpu_s: int = 20, file_bytes: int = 1 << 20) -> Path:
    """Run Python code in the sandbox; return its target file."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"content")
    target.touch()
    for path in (source, target):
        os.chown(path, sandbox.NOBODY, sandbox.NOBODY)
    with (
        source.open("rb") as read,
        target.open("r+b") as write,
        Path("/etc/passwd").open() as other,
    ):
        os.set_inheritable(other.fileno(), True)
        fds = read.fileno(), write.fileno()
        limits = (1 << 30, file_bytes, cpu_s)
        numbers = map(str, (os.getpid(), *fds, *limits))
        argv = [sys.executable, "-I", "-S", sandbox.__file__, *numbers, "--"]
        argv += [_PYTHON, "-I", "-S", "-c", _PRELUDE + code]
        argv += [f"/proc/self/fd/{number}" for number in fds]
        subprocess.run(argv, check=True, pass_fds=fds, timeout=60, cwd="/")
    return target


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("changing owners needs root")
    path = tmp_path / "secret"
    path.write_text("canary")
    path.chmod(0o666)
    tmp_path.chmod(0o777)
    return path


def test_every_way_out_is_closed(tmp_path: Path, secret: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"SECRET, PORT = {str(secret)!r}, {port}\n{_TRIES}"
        target = sandboxed(tmp_path, code)
    found = json.loads(target.read_text())
    assert found.pop("uid") == sandbox.NOBODY
    assert found.pop("groups") == []
    assert len(found.pop("descriptors")) <= 6  # three streams, two files, and the list's own
    assert {name: how for name, how in found.items() if how == "done"} == {}
    assert secret.read_text() == "canary"
    assert secret.stat().st_mode & 0o777 == 0o666


_THREADS = """
import threading
libc = ctypes.CDLL(None)
together = threading.Barrier(64, timeout=20)
def work():
    together.wait()
    libc.malloc(1024)
    together.wait()
threads = [threading.Thread(target=work) for _ in range(64)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with open(target, "r+b") as file:
    file.write(b"done")
"""


def test_a_program_may_use_as_many_threads_as_a_slow_disk_asks_for(
    tmp_path: Path, secret: Path
) -> None:
    assert sandboxed(tmp_path, _THREADS).read_bytes() == b"done"


def test_time_and_output_are_bounded(tmp_path: Path, secret: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        sandboxed(tmp_path, "while True: pass", cpu_s=1)
    assert caught.value.returncode < 0
    code = "open(target, 'r+b').write(bytes(2 << 20))"
    with pytest.raises(subprocess.CalledProcessError):
        sandboxed(tmp_path, code)
    assert (tmp_path / "target").stat().st_size <= 1 << 20


@pytest.mark.parametrize("version", [1, 2, 4, sandbox.landlock_version()])
def test_a_service_without_rights_converts_an_image(
    tmp_path: Path, secret: Path, version: int
) -> None:
    """As under systemd and in compose: another user, no capabilities, any kernel's Landlock."""
    user = 65532
    source, target = tmp_path / "source", tmp_path / "target"
    create = ("qemu-img", "create", "-q", "-f", "vmdk", source, "8M")
    subprocess.run(create, check=True)
    target.touch()
    for path in (source, target):
        os.chown(path, user, user)
        path.chmod(0o600)
    text = Path(sandbox.__file__).read_text(encoding="utf-8")
    assert "version = landlock_version()" in text
    text = text.replace("version = landlock_version()", f"version = {version}")
    with source.open("rb") as read, target.open("r+b") as write:
        fds = read.fileno(), write.fileno()
        files = [f"/proc/self/fd/{number}" for number in fds]
        argv = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        argv += ["--bounding-set=-all", "--no-new-privs", _PYTHON, "-I", "-S", "-c", text]
        argv += [*map(str, (os.getpid(), *fds, 1 << 30, 1 << 20, 20)), "--"]
        argv += ["/usr/bin/qemu-img", "convert"]
        argv += ["-f", "vmdk", "-O", "qcow2", *files]
        subprocess.run(argv, check=True, pass_fds=fds, timeout=60, cwd="/")
    assert target.read_bytes().startswith(b"QFI\xfb")


def test_without_the_kernels_help_nothing_is_run() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import sandbox\n"
        "sandbox.platform.machine = lambda: 'riscv64'\n"
        "sandbox.main(['1', '0', '1', '1', '1', '1', '--', '/usr/bin/touch', '/tmp/never'])\n"
    )
    folder = str(Path(sandbox.__file__).parent)
    argv = [sys.executable, "-I", "-S", "-c", code, folder]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == sandbox.UNAVAILABLE
    assert "Landlock" in done.stderr


def test_nothing_is_run_for_a_parent_that_was_killed_right_after_the_fork() -> None:
    """Otherwise a storage daemon without its imaged would lock a disk for good."""
    seconds = f"30.{os.getpid()}"
    limits = ["0", "1", str(1 << 30), "1", "1"]
    code = (
        "import os, subprocess, sys\n"
        "argv = [sys.executable, '-I', '-S', sys.argv[1], str(os.getpid()), *sys.argv[2:]]\n"
        "subprocess.Popen(argv)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    words = ["-c", code, sandbox.__file__, *limits, "--", "/usr/bin/sleep", seconds]
    subprocess.run([sys.executable, *words], check=False, stdin=subprocess.DEVNULL)
    limit_s = time.monotonic() + 10
    while _processes(seconds):
        assert time.monotonic() < limit_s, "it runs without its parent"
        time.sleep(0.05)


def _processes(word: str) -> list[str]:
    """Return the processes that have this word in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in path.read_bytes().decode(errors="replace").split("\0"):
                found.append(path.parent.name)
    return found
