#!/usr/bin/python3 -IS
"""Mounts one directory of the host for a guest, then becomes virtiofsd.

libvirt runs a copy of this file as root, with virtiofsd's arguments. The source in these arguments
is an empty folder of the agent; the JSON file next to the folder names the directory. The mount is
in this process' own mount namespace, so it ends with virtiofsd. Only the standard library of the
host's Python is imported.
"""

from __future__ import annotations  # the host may have an older Python

import ctypes
import fcntl
import json
import os
import sys
import threading
import time
from pathlib import Path

PROGRAMS = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")
ENDS_S, ENDS_AGAIN_S = 3.0, 0.05
"""Seconds that the former virtiofsd has to end, and the delay between two attempts to lock."""
ANSWERS_S = 20
"""Seconds that the directory's file system has to answer. libvirt waits for this program."""
CLONE_NEWNS = 0x20000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_REC, MS_SLAVE = 1 << 14, 1 << 19
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class RefusedError(Exception):
    """The guest does not get the directory; the text says why."""


def source_of(arguments: list[str]) -> Path:
    """Return the folder that libvirt gives as the source: `-o source=PATH,…`."""
    for options in arguments:
        for option in options.split(","):
            if option.startswith("source="):
                return Path(option[len("source=") :])
    msg = "libvirt gave no source"
    raise RefusedError(msg)


def opened(root: str, directory: str) -> list[int]:
    """Open all folders from `/` to a directory; return their descriptors.

    Symbolic links are followed only in `root`, which the operator of the host chose.
    """
    path = os.path.realpath(root) + directory[len(root) :]
    found = [os.open("/", _FOLDER)]
    for part in filter(None, path.split("/")):
        try:
            found.append(os.open(part, _FOLDER, dir_fd=found[-1]))
        except OSError as error:
            msg = f"{part!r} in {path} cannot be opened: {error.strerror}; links are not followed"
            raise RefusedError(msg) from error
    return found


def lock(folders: list[int], *, readonly: bool) -> None:
    """Lock a directory against other guests until this process ends.

    The folders above the directory get shared locks. So while a guest writes to a directory, no
    other guest gets that directory or a directory below it. Another guest gets a directory above it
    only for reading. Guests that only read share a directory. Raises BlockingIOError.
    """
    for folder in folders[:-1]:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(folders[-1], (fcntl.LOCK_SH if readonly else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    for folder in folders:
        os.set_inheritable(folder, True)


def lock_alive(alive: int) -> None:
    """Take the lock that says that virtiofsd lives; raises RefusedError.

    The virtiofsd of the guest's last run may need a moment to end.
    """
    until_s = time.monotonic() + ENDS_S
    while True:
        try:
            return fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > until_s:
                msg = "the former virtiofsd of this VM still runs; its directory does not answer"
                raise RefusedError(msg) from error
            time.sleep(ENDS_AGAIN_S)


def holder(source: Path, directory: str) -> str:
    """Return a clause, for a message, that names the holder of a lock.

    The holder is the VM of this host that has a directory at, above or below `directory`.
    """
    for path in source.parents[2].glob("*/fs/*.json"):
        other = json.loads(path.read_text())["directory"]
        near = f"{other}/".startswith(f"{directory}/") or f"{directory}/".startswith(f"{other}/")
        if near and path.with_suffix("") != source:
            return f"the VM {path.parents[1].name} has {other}"
    return "another program of the host has locked it"


def own_mounts() -> None:
    """Give this process its own mounts. Later mounts and unmounts of the host still arrive."""
    _call("unshare", CLONE_NEWNS)
    _mount("none", "/", MS_REC | MS_SLAVE)


def mount(folder: int, point: Path, *, readonly: bool) -> None:
    """Mount a folder at `point`. The folder must have been opened after `own_mounts`."""
    flags = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | (MS_RDONLY if readonly else 0)
    _mount(f"/proc/self/fd/{folder}", point, MS_BIND)
    _mount("none", point, flags)


def _mount(source: str, target: str | Path, flags: int) -> None:
    paths = os.fsencode(source), os.fsencode(target)
    _call("mount", *paths, None, ctypes.c_ulong(flags), None)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def give_up(source: Path) -> None:
    """End this process, whose main thread waits for a directory and sees no exception."""
    message = f"its file system does not answer within {ANSWERS_S} s; check its server"
    source.with_suffix(".failed").write_text(message)
    os._exit(1)


def prepare(source: Path) -> None:
    """Mount the directory of a source, and lock it; raises RefusedError, OSError."""
    wanted = json.loads(source.with_suffix(".json").read_text())
    alive = os.open(source.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    lock_alive(alive)
    os.set_inheritable(alive, True)
    own_mounts()
    late = threading.Timer(ANSWERS_S, give_up, [source])
    late.daemon = True
    late.start()
    folders = opened(wanted["root"], wanted["directory"])
    try:
        lock(folders, readonly=wanted["readonly"])
    except BlockingIOError as error:
        msg = f"{holder(source, wanted['directory'])}; a directory is for one VM that writes"
        raise RefusedError(msg) from error
    mount(folders[-1], source, readonly=wanted["readonly"])
    late.cancel()


def main(argv: list[str]) -> None:
    """Become virtiofsd; on failure, leave the reason next to the source."""
    source = source_of(argv[1:])
    try:
        prepare(source)
        program = next((one for one in PROGRAMS if os.path.exists(one)), PROGRAMS[0])  # noqa: PTH110
        os.execv(program, [program, *argv[1:]])  # noqa: S606
    except (RefusedError, OSError, ValueError, KeyError) as error:
        source.with_suffix(".failed").write_text(str(error))
        sys.exit(f"virtbus: {error}")


if __name__ == "__main__":
    main(sys.argv)
