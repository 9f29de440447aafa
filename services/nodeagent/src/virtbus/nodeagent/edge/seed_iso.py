"""Writes first-boot data: ISO 9660 images and Ignition's file.

Only this module imports pycdlib.
"""

import asyncio
import functools
import io
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

import pycdlib

from virtbus.nodeagent.core.config_drive import config_drive_files
from virtbus.nodeagent.core.seed import seed_files
from virtbus.nodeagent.core.user_data import sources_of
from virtbus.nodeagent.edge.atomic_file import in_thread, replace, writing
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.vm import VmRecord, VmSecrets, Volume

NO_CLOUD, CONFIG_DRIVE = "cidata", "config-2"
"""The ISO labels by which cloud-init finds its datasources."""
IGNITION = "seed-ignition.json"
"""The file that QEMU shows in fw_cfg."""
SMALL_BYTES = 4096
"""Larger user data is parsed in a separate thread, because that takes up to 0.2 s."""


KEPT_BYTES = 16 * 1024
"""Layouts of images up to this content are kept, because pycdlib needs 1 to 2 ms of CPU for one."""
_SECTOR_BYTES = 2048


def iso(files: Mapping[str, bytes], label: str) -> bytes:
    """Return an ISO with Joliet and Rock Ridge names, which any guest can read.

    `files` has the contents by path. The image may have the date of an earlier image.
    """
    sizes = tuple((name, len(data)) for name, data in files.items())
    small = sum(size for _, size in sizes) <= KEPT_BYTES
    empty, offsets = _kept_layout(label, sizes) if small else _layout(label, sizes)
    image = bytearray(empty)
    for data, offset in zip(files.values(), offsets, strict=True):
        image[offset : offset + len(data)] = data
    return bytes(image)


def _layout(label: str, sizes: tuple[tuple[str, int], ...]) -> tuple[bytes, tuple[int, ...]]:
    """Return an image with zeros as the files' contents, and the offset of each content.

    `sizes` has the path and the length of each file.
    """
    image = pycdlib.PyCdlib()
    image.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident=label)
    folders = {PurePosixPath(): ""}
    for index, (name, size) in enumerate(sizes):
        path = PurePosixPath(name)
        for folder in reversed(path.parents):
            if folder not in folders:
                folders[folder] = f"{folders[folder.parent]}/DIR{len(folders)}"
                image.add_directory(folders[folder], rr_name=folder.name, joliet_path=f"/{folder}")
        image.add_fp(
            io.BytesIO(bytes(size)),
            size,
            f"{folders[path.parent]}/FILE{index}.;1",
            rr_name=path.name,
            joliet_path=f"/{path}",
        )
    out = io.BytesIO()
    image.write_fp(out)
    offsets = tuple(
        image.get_record(joliet_path=f"/{PurePosixPath(name)}").extent_location() * _SECTOR_BYTES
        for name, _ in sizes
    )
    image.close()
    return out.getvalue(), offsets


_kept_layout = functools.lru_cache(maxsize=8)(_layout)


class SeedIsos:
    """The `Seeds` port. It writes `seed-<volume>.iso` and IGNITION in `<state_dir>/vms/<uid>/`."""

    def __init__(self, vms_dir: Path) -> None:
        self._vms_dir = vms_dir
        # The threads only parse user data, so that slow parsing delays nothing but other seeds.
        self._small, self._large = (ThreadPoolExecutor(1, f"seed-{n}") for n in ("small", "large"))
        self._numbers = itertools.count(1)
        self._latest: dict[str, int] = {}
        """The number of the latest write, by uid, while that write runs."""
        self._renaming = threading.Lock()

    def paths(self, record: VmRecord) -> dict[str, Path]:
        return {
            volume.name: self._vms_dir / record.uid / f"seed-{volume.name}.iso"
            for volume in record.spec.volumes
            if volume.is_iso
        }

    def ignition_path(self, record: VmRecord) -> Path | None:
        return None if record.spec.ignition is None else self._vms_dir / record.uid / IGNITION

    def stand(self, record: VmRecord) -> bool:
        ignition = self.ignition_path(record)
        there = all(path.exists() for path in self.paths(record).values())
        return there and (ignition is None or ignition.exists())

    async def write(
        self, record: VmRecord, secrets: VmSecrets | None, interfaces: Sequence[InterfaceStatus]
    ) -> None:
        """Write each file with mode 0600, because it may contain passwords (SEC-03).

        A cancelled call writes no file after its end. A thread may continue to parse user data, and
        its result is dropped (ADR 0029). If a slow disk delays a write, the write replaces no file
        of a later write for the same VM.
        """
        secret = secrets or VmSecrets(uid=record.uid)
        volumes = tuple(volume for volume in record.spec.volumes if volume.is_iso)
        ignition = self.ignition_path(record)
        if not volumes and ignition is None:
            return
        paths = self.paths(record)

        def render() -> dict[Path, bytes]:
            files = {
                paths[volume.name]: iso(*_contents(record, volume, secret, interfaces))
                for volume in volumes
            }
            if ignition is not None:
                files[ignition] = _ignition(secret)
            return files

        def write_all(rendered: Mapping[Path, bytes]) -> None:
            for path, image in rendered.items():
                path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
                path.parent.chmod(0o711)  # the umask may withhold access from QEMU's user
                replace(path, image, durable=False, rename=partial(self._rename, mine))

        user_bytes = _user_bytes(secret, volumes)
        mine = record.uid, next(self._numbers)
        with writing(self._vms_dir), self._begun(*mine):
            if not user_bytes:  # there is no user data to parse, so one thread is enough
                await in_thread(lambda: write_all(render()))
                return
            pool = self._small if user_bytes <= SMALL_BYTES else self._large
            rendered = await asyncio.get_running_loop().run_in_executor(pool, render)
            await in_thread(lambda: write_all(rendered))

    @contextmanager
    def _begun(self, uid: str, number: int) -> Iterator[None]:
        self._latest[uid] = number
        try:
            yield
        finally:
            if self._latest.get(uid) == number:
                del self._latest[uid]

    def _rename(self, mine: tuple[str, int], part: Path, path: Path) -> None:
        """Rename `part` to `path`, or remove `part` if a later write for the VM has begun."""
        uid, number = mine
        with self._renaming:
            if self._latest.get(uid) == number:
                part.replace(path)
            else:
                part.unlink()


def _ignition(secrets: VmSecrets) -> bytes:
    given = secrets.ignition
    return (given.config or "").encode() if given is not None else b""


def _user_bytes(secrets: VmSecrets, volumes: Sequence[Volume]) -> int:
    seeds = (secrets.cloud_init.get(one.name, one.cloud_init) for one in volumes)
    return sum(len(data) for seed in seeds if seed is not None for _, data in sources_of(seed))


def _contents(
    record: VmRecord, volume: Volume, secrets: VmSecrets, interfaces: Sequence[InterfaceStatus]
) -> tuple[dict[str, bytes], str]:
    if volume.file_set is not None:
        files = secrets.files.get(volume.name, volume.file_set)
        return files.contents, volume.file_set.volume_label
    seed = secrets.cloud_init.get(volume.name, volume.cloud_init)
    assert seed is not None  # noqa: S101  `is_iso`
    if volume.cloud_init_config_drive is not None:
        return config_drive_files(record, seed, interfaces), CONFIG_DRIVE
    return seed_files(record, seed, interfaces), NO_CLOUD
