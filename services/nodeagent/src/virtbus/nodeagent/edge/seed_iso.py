"""Seeds as ISO 9660 images with the label `cidata`; the only importer of pycdlib."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import pycdlib

from virtbus.nodeagent.core.seed import seed_files
from virtbus.nodeagent.edge.durable import in_thread, replace, writing
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.vm import VmRecord, VmSecrets

LABEL = "cidata"


def iso(files: Mapping[str, bytes]) -> bytes:
    """An ISO with Joliet and Rock Ridge names, so that any guest reads them as they are."""
    image = pycdlib.PyCdlib()
    image.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident=LABEL)
    for index, (name, data) in enumerate(files.items()):
        image.add_fp(
            io.BytesIO(data),
            len(data),
            f"/FILE{index}.;1",
            rr_name=name,
            joliet_path=f"/{name}",
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
            if volume.cloud_init_no_cloud is not None
        }

    def stand(self, record: VmRecord) -> bool:
        return all(path.exists() for path in self.paths(record).values())

    async def write(
        self, record: VmRecord, secrets: VmSecrets | None, interfaces: Sequence[InterfaceStatus]
    ) -> None:
        """Write each seed anew, 0600 (SEC-03): it may hold passwords; libvirt hands it to QEMU."""
        secret = secrets.cloud_init if secrets else {}
        paths = self.paths(record)

        def write_all() -> None:
            """In a thread: a tenant's YAML may take a while."""
            for volume in record.spec.volumes:
                if volume.cloud_init_no_cloud is None:
                    continue
                path, seed = paths[volume.name], secret.get(volume.name, volume.cloud_init_no_cloud)
                files = seed_files(record, seed, interfaces)
                path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
                path.parent.chmod(0o711)  # QEMU's user must pass through, whatever the umask
                replace(path, iso(files), durable=False)

        with writing(self._vms_dir):
            await in_thread(write_all)
