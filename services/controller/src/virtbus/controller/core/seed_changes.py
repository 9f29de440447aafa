"""Computes changes of a VM's first-boot data: its seeds, files and Ignition."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

from virtbus.controller.core.disk_serials import SEEDS
from virtbus.schemas.network_findings import Findings
from virtbus.schemas.seed import TEXTS, CloudInit, FilesVolume
from virtbus.schemas.vm import VmRecord, VmSecrets, VmSpec, Volume

SEED_HOLDERS = (*SEEDS, "files", "sysprep")
"""The fields of first-boot data. A volume with such a field is an ISO (`Volume.is_iso`)."""
OF_A_SEED = rf"spec\.(volumes\[[0-9]+\]\.({'|'.join(SEED_HOLDERS)})|ignition)[.\[]"
"""Matches paths inside first-boot data that the VM already has. The path of a whole new seed does
not match."""
SeedT = TypeVar("SeedT", CloudInit, FilesVolume)


def merged(record: VmRecord, old: VmSecrets | None, spec: VmSpec) -> VmSecrets:
    """Return the secret inputs of a VM for a changed spec.

    A secret that the spec leaves out keeps its value. A client that reads and then updates a VM
    cannot send secrets back, because records do not show them.
    """
    old = old or VmSecrets(uid=record.uid)
    cloud_init, files = dict(old.cloud_init), dict(old.files)
    for volume in spec.volumes:
        if volume.cloud_init is not None:
            seed = _kept(old.cloud_init.get(volume.name), volume.cloud_init)
            if seed != seed.without_secrets():
                cloud_init[volume.name] = seed
        elif (held := volume.file_set) is not None:
            found = _kept(old.files.get(volume.name), held)
            if found != found.without_secrets():
                files[volume.name] = found
    ignition = old.ignition
    if spec.ignition is not None and spec.ignition.config is not None:
        ignition = spec.ignition
    update = {"cloud_init": cloud_init, "files": files, "ignition": ignition, "replaced": b""}
    return old.model_copy(update=update)


def _kept(old: SeedT | None, new: SeedT) -> SeedT:
    """Return `new`, completed with the secrets of `old` that `new` leaves out."""
    if old is None:
        return new
    bare_old, bare_new = old.without_secrets(), new.without_secrets()
    update: dict[str, Any] = {}
    for name in type(old).model_fields:
        secret = getattr(old, name) != getattr(bare_old, name)
        if secret and getattr(new, name) == getattr(bare_new, name) and not _given(new, name):
            update[name] = getattr(old, name)
    return new.model_copy(update=update)


def _given(seed: BaseModel, name: str) -> bool:
    """Return True if the seed gives a field's text in its other form: plain or base64."""
    plain = name.removesuffix("_base64")
    other = plain if plain != name else f"{name}_base64"
    return plain in TEXTS and getattr(seed, other, None) is not None


def network_findings(volumes: Iterable[Volume]) -> Iterator[tuple[str, Findings]]:
    """Yield the path of each seed's network data, with its problems and unknown keys."""
    for index, volume in enumerate(volumes):
        for kind in SEEDS:
            seed = getattr(volume, kind)
            if seed is not None:
                yield f"spec.volumes[{index}].{kind}.network_data", seed.network_findings()
