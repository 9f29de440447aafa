"""Installs vmwrapper at a path that libvirt may run.

On a host with a compiler, vmwrapper is compiled from C and uses 0.8 ms of CPU per start. Without a
compiler, the Python version is installed, which uses 10 ms.
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

log = logging.getLogger(__name__)

DEFAULT_EMULATOR = Path("/usr/bin/qemu-system-x86_64")
NAME = "vmwrapper"
_COMPILE_TIMEOUT_S = 60
_FLAGS = ("-static", "-Os", "-s", "-Wall", "-Wextra")


def install(
    target_dir: Path,
    wrapper_socket: Path,
    *,
    emulator: Path = DEFAULT_EMULATOR,
    memo: Path | None = None,
    compiler: str | None = "gcc",
) -> Path:
    """Ensure the wrapper in `target_dir`, and return its path.

    libvirt takes the wrapper for the emulator. After a change of the emulator's ctime, libvirt
    probes QEMU's capabilities again, which takes 300 ms. Therefore write the wrapper only if it is
    missing, or if its source or built-in values changed. If QEMU's ctime changed, only update the
    wrapper's ctime, so that libvirt notices the new QEMU.

    `memo` is a file with a digest of the installed wrapper, and QEMU's ctime at the installation.

    Raises:
        OSError: `target_dir` cannot be written, or `emulator` is missing.
    """
    for directory in (target_dir.parent, target_dir):
        if not directory.is_dir():
            directory.mkdir(parents=True)
            directory.chmod(0o755)  # despite the umask: QEMU's user traverses it
    path = target_dir / NAME
    memo = memo or target_dir / f"{NAME}.json"
    before = _read(memo)
    language, source = _source(compiler)
    script = _script(wrapper_socket, emulator)  # also installed if the compiler fails
    baked = f"{language}\0{wrapper_socket}\0{emulator}\0{source}\0{script.decode()}"
    wanted = {
        "content": hashlib.sha256(baked.encode()).hexdigest(),
        "emulator_ctime_ns": emulator.stat().st_ctime_ns,
    }
    if before.get("content") != wanted["content"] or not path.exists():
        built = None
        if compiler is not None and language == "c":
            built = _compiled(source, wrapper_socket, emulator, compiler)
        _replace(path, built or script)
    elif before.get("emulator_ctime_ns") != wanted["emulator_ctime_ns"]:
        path.chmod(0o755)  # the same mode, for a new ctime
        os.utime(path)
    if wanted != before:
        _replace(memo, json.dumps(wanted).encode(), mode=0o644)
    return path


def _source(compiler: str | None) -> tuple[str, str]:
    if compiler is not None and shutil.which(compiler):
        return "c", (files("virtbus.netd.vmwrapper") / "vmwrapper.c").read_text()
    return "python", (files("virtbus.netd.vmwrapper") / "vmwrapper.py").read_text()


def _script(wrapper_socket: Path, emulator: Path) -> bytes:
    text = (files("virtbus.netd.vmwrapper") / "vmwrapper.py").read_text()
    text = text.replace("@WRAPPER_SOCKET@", str(wrapper_socket))
    return text.replace("@EMULATOR@", str(emulator)).encode()


def _compiled(source: str, wrapper_socket: Path, emulator: Path, compiler: str) -> bytes | None:
    """Return the program; None if the compiler fails, for example without a static libc."""
    defines = [
        f"-DWRAPPER_SOCKET={json.dumps(str(wrapper_socket))}",
        f"-DEMULATOR={json.dumps(str(emulator))}",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch, NAME)
        command = [compiler, *_FLAGS, *defines, "-x", "c", "-", "-o", str(built)]
        try:
            subprocess.run(  # noqa: S603  # our own source, paths from the settings
                command,
                input=source.encode(),
                capture_output=True,
                check=True,
                timeout=_COMPILE_TIMEOUT_S,
            )
        except (subprocess.SubprocessError, OSError) as error:
            stderr = getattr(error, "stderr", b"") or b""
            extra = {"code": "wrapper_python"}
            log.warning("vmwrapper is the Python version: %s %s", error, stderr[-300:], extra=extra)
            return None
        return built.read_bytes()


def _replace(path: Path, content: bytes, *, mode: int = 0o755) -> None:
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    part.write_bytes(content)
    part.chmod(mode)
    part.replace(path)


def _read(memo: Path) -> dict[str, object]:
    try:
        found = json.loads(memo.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
