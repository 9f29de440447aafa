"""Computes changes of a VM's first-boot data: its seeds, files and Ignition."""

import re
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

from virtbus.schemas.errors import Detail
from virtbus.schemas.seed import TEXTS, CloudInit, FilesVolume
from virtbus.schemas.vm import VmRecord, VmSecrets, VmSpec, Volume

OF_A_SEED = re.compile(
    r"spec\.(volumes\[[0-9]+\]\.(cloud_init_no_cloud|cloud_init_config_drive|files|sysprep)"
    r"|ignition)[.\[]"
)
"""Fields of first-boot data that exists; none comes to a volume of another kind."""
KINDS = ("cloud_init_no_cloud", "cloud_init_config_drive", "files", "sysprep")
SeedT = TypeVar("SeedT", CloudInit, FilesVolume)


def without_seed_secrets(spec: VmSpec) -> VmSpec:
    """Return the spec without the secrets of first-boot data. Those of images stay."""
    volumes = tuple(_bare(volume) for volume in spec.volumes)
    ignition = spec.ignition.without_secrets() if spec.ignition is not None else None
    return spec.model_copy(update={"volumes": volumes, "ignition": ignition})


def _bare(volume: Volume) -> Volume:
    update = {
        kind: holder.without_secrets()
        for kind in KINDS
        if (holder := getattr(volume, kind)) is not None
    }
    return volume.model_copy(update=update) if update else volume


def merged(record: VmRecord, old: VmSecrets | None, spec: VmSpec) -> VmSecrets:
    """Return the secret inputs of a VM for a changed spec.

    A secret that the spec leaves out keeps its value, because records do not show it.
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
    """Return `new` with the secrets of `old` that it leaves out."""
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
    """Return True if a text is given in its other form: as base64, or not."""
    plain = name.removesuffix("_base64")
    other = plain if plain != name else f"{name}_base64"
    return plain in TEXTS and getattr(seed, other, None) is not None


def network_problems(spec: VmSpec) -> Iterator[Detail]:
    """Yield the problems of the network data that a spec gives."""
    for index, volume in enumerate(spec.volumes):
        for kind in KINDS[:2]:
            seed = getattr(volume, kind)
            for problem in seed.network_findings().problems if seed is not None else ():
                yield Detail(path=f"spec.volumes[{index}].{kind}.network_data", message=problem)
