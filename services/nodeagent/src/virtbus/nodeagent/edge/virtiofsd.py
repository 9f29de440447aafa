#!/usr/bin/python3 -IS
"""Mounts a directory of the host for a guest, then becomes virtiofsd.

libvirt runs a copy of this file as root, with virtiofsd's arguments. The source in these arguments
is an empty folder of the agent. The JSON file next to that folder names the directory. The mount is
in the process' own mount namespace, so it ends with virtiofsd. The program may import only the
standard library of the host's Python.
"""

from __future__ import annotations  # the host may have an older Python

import ctypes
import fcntl
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")
ENDS_S, ENDS_AGAIN_S = 3.0, 0.05
"""Time for the previous virtiofsd to end, and the delay between two attempts to lock."""
ANSWERS_S = 20
"""Time for the directory's file system to answer. libvirt waits for this program."""
CLONE_NEWNS = 0x20000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_REC, MS_SLAVE = 1 << 14, 1 << 19
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class RefusedError(Exception):
    """The guest does not get the directory. The text gives the reason."""


def source_of(arguments: list[str]) -> Path:
    """Return the folder that libvirt gives as the source: `-o source=PATH,…`."""
    for options in arguments:
        for option in options.split(","):
            if option.startswith("source="):
                return Path(option[len("source=") :])
    msg = "libvirt gave no source"
    raise RefusedError(msg)


def opened(root: str, directory: str) -> list[int]:
    """Open all folders from `/` to `directory`; return their descriptors.

    Only `root` may have symbolic links, because the operator of the host chose it.
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

    A writer gets an exclusive lock on the directory. So no other guest gets that directory or a
    directory below. The folders above have shared locks, so other guests get them only for reading.

    Raises:
        BlockingIOError: another guest has a lock.
    """
    for folder in folders[:-1]:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(folders[-1], (fcntl.LOCK_SH if readonly else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    for folder in folders:
        os.set_inheritable(folder, True)


def lock_alive(alive: int) -> None:
    """Take the lock that is held while virtiofsd runs; raise RefusedError after ENDS_S.

    The virtiofsd of the guest's last run may need time to end.
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
    """Return a clause for a message, which names the VM that holds the lock.

    That VM has a directory at, above or below `directory`.
    """
    for path in source.parents[2].glob("*/fs/*.json"):
        with suppress(FileNotFoundError):  # that VM was deleted
            other = json.loads(path.read_text())["directory"]
            pairs = ((other, directory), (directory, other))
            near = any(f"{one}/".startswith(f"{above}/") for one, above in pairs)
            if near and path.with_suffix("") != source:
                return f"the VM {path.parents[1].name} has {other}"
    return "another program of the host has locked it"


def own_mounts() -> None:
    """Give this process its own mounts. Later mounts and unmounts of the host reach them."""
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
    """End the process at once, because its main thread hangs and sees no exception."""
    message = f"its file system does not answer within {ANSWERS_S} s; check its server"
    source.with_suffix(".failed").write_text(message)
    os._exit(1)


def prepare(source: Path) -> None:
    """Lock the directory of a source, and mount it; raises RefusedError, OSError."""
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
    """Become virtiofsd. After a failure, write the reason to a file next to the source."""
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
