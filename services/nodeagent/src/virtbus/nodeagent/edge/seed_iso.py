"""Seeds and files as ISO 9660 images; the only importer of pycdlib."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import pycdlib

from virtbus.nodeagent.core.config_drive import config_drive_files
from virtbus.nodeagent.core.seed import seed_files
from virtbus.nodeagent.edge.durable import in_thread, replace, writing
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.vm import VmRecord, VmSecrets, Volume

NO_CLOUD, CONFIG_DRIVE = "cidata", "config-2"
"""The labels by which cloud-init finds its datasources."""


def iso(files: Mapping[str, bytes], label: str) -> bytes:
    """An ISO with Joliet and Rock Ridge names, so that any guest reads them as they are.

    `files` is path to contents; folders are made as they come.
    """
    image = pycdlib.PyCdlib()
    image.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident=label)
    folders = {PurePosixPath(): ""}
    for index, (name, data) in enumerate(files.items()):
        path = PurePosixPath(name)
        for folder in reversed(path.parents):
            if folder not in folders:
                folders[folder] = f"{folders[folder.parent]}/DIR{len(folders)}"
                image.add_directory(folders[folder], rr_name=folder.name, joliet_path=f"/{folder}")
        image.add_fp(
            io.BytesIO(data),
            len(data),
            f"{folders[path.parent]}/FILE{index}.;1",
            rr_name=path.name,
            joliet_path=f"/{path}",
        )
    out = io.BytesIO()
    image.write_fp(out)
    image.close()
    return out.getvalue()


class SeedIsos:
    """The `Seeds` port: `<state_dir>/vms/<uid>/seed-<volume>.iso`."""

    def __init__(self, vms_dir: Path) -> None:
        self._vms_dir = vms_dir

    def paths(self, record: VmRecord) -> dict[str, Path]:
        return {
            volume.name: self._vms_dir / record.uid / f"seed-{volume.name}.iso"
            for volume in record.spec.volumes
            if volume.is_iso
        }

    def stand(self, record: VmRecord) -> bool:
        return all(path.exists() for path in self.paths(record).values())

    async def write(
        self, record: VmRecord, secrets: VmSecrets | None, interfaces: Sequence[InterfaceStatus]
    ) -> None:
        """Write each ISO anew, 0600 (SEC-03): it may hold passwords; libvirt hands it to QEMU."""
        secret = secrets or VmSecrets(uid=record.uid)
        paths = self.paths(record)

        def write_all() -> None:
            """In a thread: a tenant's YAML may take a while."""
            for volume in record.spec.volumes:
                if not volume.is_iso:
                    continue
                path = paths[volume.name]
                files, label = _contents(record, volume, secret, interfaces)
                path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
                path.parent.chmod(0o711)  # QEMU's user must pass through, whatever the umask
                replace(path, iso(files, label), durable=False)

        with writing(self._vms_dir):
            await in_thread(write_all)


def _contents(
    record: VmRecord, volume: Volume, secrets: VmSecrets, interfaces: Sequence[InterfaceStatus]
) -> tuple[dict[str, bytes], str]:
    """Path to contents of a volume, and its label."""
    if volume.files is not None:
        files = secrets.files.get(volume.name, volume.files)
        return files.contents, files.volume_label
    seed = secrets.cloud_init.get(volume.name, volume.cloud_init)
    assert seed is not None  # noqa: S101  `is_iso`
    if volume.cloud_init_config_drive is not None:
        return config_drive_files(record, seed, interfaces), CONFIG_DRIVE
    return seed_files(record, seed, interfaces), NO_CLOUD
