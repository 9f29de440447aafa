"""Separates the secret inputs of a VM from its record."""

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, TypeGuard

from virtbus.controller.core.seed_changes import SEED_HOLDERS
from virtbus.schemas.bounds import SECRET
from virtbus.schemas.image import is_sealed, sealed_ref
from virtbus.schemas.seed import TEXTS as SEED_TEXTS
from virtbus.schemas.vm import ImageVolume, VmSecrets, VmSpec, Volume
from virtbus.schemas.wire import encode

MAX_BYTES = SECRET.written_bytes
"""Size limit of one entry of `$KV.sec`."""
_TEXTS = (
    "meta_data",
    *(f"{name}{form}" for name in SEED_TEXTS for form in ("", "_base64")),
    "image_pull_secret",
)
_HOLDERS = (*SEED_HOLDERS, "container_disk", "image")


def split_secrets(spec: VmSpec, uid: str) -> tuple[VmSpec, VmSecrets | None]:
    """Return the spec without its secrets, and the secrets (None if the spec has none)."""
    bare = without_secrets(spec, _HOLDERS)
    held = [old for old, new in zip(spec.volumes, bare.volumes, strict=True) if old is not new]
    if not held and spec.ignition is None:
        return spec, None
    return bare, VmSecrets(
        uid=uid,
        ignition=spec.ignition,
        cloud_init={v.name: v.cloud_init for v in held if v.cloud_init is not None},
        files={v.name: files for v in held if (files := v.file_set) is not None},
        image_pull={v.name: secret for v in held if (secret := _of_pull(v))},
    )


def _of_pull(volume: Volume) -> str:
    """Return the VM's own secret for pulling a volume's image; empty if it has none."""
    if volume.image is not None:
        return sealed_ref(volume.image.ref)[1]
    disk = volume.container_disk
    return (disk.image_pull_secret or "") if disk is not None else ""


def without_secrets(spec: VmSpec, holders: Sequence[str] = SEED_HOLDERS) -> VmSpec:
    """Return the spec without the secrets in its Ignition and in its volumes' `holders` fields.

    It is the same object if it contains none.
    """
    volumes = tuple(_bare(volume, holders) for volume in spec.volumes)
    if spec.ignition is None and all(map(is_, volumes, spec.volumes)):
        return spec
    ignition = spec.ignition.without_secrets() if spec.ignition is not None else None
    return spec.model_copy(update={"volumes": volumes, "ignition": ignition})


def _bare(volume: Volume, holders: Sequence[str]) -> Volume:
    """Return the volume without secrets; the same object if it contains none."""
    update = {}
    for kind in holders:
        holder = getattr(volume, kind)
        if holder is not None and (bare := holder.without_secrets()) != holder:
            update[kind] = bare
    return volume.model_copy(update=update) if update else volume


def secret_bytes(secrets: VmSecrets) -> bytes:
    """Return the value for `$KV.sec`. Its SHA-256 is the record's `sec_digest`."""
    return encode(secrets)


def secret_paths(spec: VmSpec) -> tuple[str, ...]:
    """Return the paths in a record's spec from which secrets may have been removed."""
    ignition = ("spec.ignition",) if spec.ignition is not None else ()
    return ignition + tuple(
        f"spec.volumes[{index}].{kind}"
        for index, volume in enumerate(spec.volumes)
        for kind in _HOLDERS
        if _may_hold(getattr(volume, kind))
    )


def _may_hold(holder: object) -> bool:
    if isinstance(holder, ImageVolume):
        return is_sealed(holder.without_secrets().ref)
    return holder is not None and getattr(holder, "image_pull_secret", "") is not None


def secret_size(volumes: list[Mapping[str, Any]]) -> int:
    """Estimate the bytes of secrets in a request's raw volumes."""
    return sum(text_size(text) for volume in volumes for text in _texts(volume))


def text_size(value: Any) -> int:
    """Return the bytes of a text; 0 for any other value."""
    return len(value.encode(errors="replace")) if isinstance(value, str) else 0


def _of_maps(values: Any, names: tuple[str, ...]) -> list[Any]:
    """Return the values of the fields `names` in each map of a list."""
    found = [one for one in values if isinstance(one, Mapping)] if _is_list(values) else []
    return [one.get(name) for one in found for name in names]


def _is_list(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def _texts(volume: Mapping[str, Any]) -> Iterator[Any]:
    for kind in _HOLDERS:
        holder = volume.get(kind)
        if not isinstance(holder, Mapping):
            continue
        found = [holder.get(name) for name in _TEXTS]
        found += [str(holder.get("ref", "")).partition("?")[2]]
        keys = holder.get("ssh_keys")
        found += keys if _is_list(keys) else ()
        found += _of_maps(holder.get("user_data_parts"), ("data", "data_base64"))
        found += _of_maps(holder.get("write_files"), ("path", "content", "content_base64"))
        for names in _of_maps(holder.get("host_aliases"), ("hostnames",)):
            found += names if _is_list(names) else ()
        for name in ("data", "binary_data", "environment"):
            files = holder.get(name)
            if isinstance(files, Mapping):
                found += [*files, *files.values()]
        yield from found
