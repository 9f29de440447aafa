"""Refuses user input that is too large to store, and names its largest field."""

from collections.abc import Iterator, Mapping
from typing import Any

from virtbus.schemas.bounds import LOGINS_BYTES, RECORD_ACCEPTED_BYTES, SECRET
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.fitting import cut_text
from virtbus.schemas.vm import VmRecord, VmSecrets, VmSpec
from virtbus.schemas.wire import encode

KEY_BYTES = 64
MOST_GROWTH = 4
"""Upper bound of the growth from input to record.

It is the number of the record's bytes for each byte of the spec's JSON, or for each character of
labels and annotations. For example, a short query of a URL becomes a long digest.
"""
_SEEDS = ("cloud_init_no_cloud", "cloud_init_config_drive")


def refuse_large(
    record: VmRecord, secrets: VmSecrets | None = None, *, spec_bytes: int = RECORD_ACCEPTED_BYTES
) -> None:
    """Raise 413 if a record or its secret inputs are larger than users may send.

    The limit leaves space for data that later writes add. `spec_bytes` is the size of the spec's
    canonical JSON. With it, a clearly small record need not be encoded.
    """
    resolved = (record.image_targets, record.volume_refs, record.network_targets)
    targets = (one for by_name in resolved for one in by_name.values())
    most = size_estimate(record, spec_bytes) + sum(len(encode(one)) for one in targets)
    small = most < RECORD_ACCEPTED_BYTES // 2
    size = 0 if small else len(encode(record))
    if size > RECORD_ACCEPTED_BYTES:
        shown = {"labels", "annotations", "spec", "image_targets", "network_targets"}
        given = record.model_dump(exclude_defaults=True, include=shown)
        raise _too_large("record", size, RECORD_ACCEPTED_BYTES, largest(given))
    if secrets is None:
        return
    parts = dict(_secret_parts(record.spec, secrets))
    for kind, held, most in (
        ("pull secrets", secrets.image_pull, LOGINS_BYTES),
        (SECRET.kind, secrets, SECRET.written_bytes),
    ):
        size = len(encode(held))
        if size > most:
            path = max(parts, key=lambda one: len(encode(parts[one])), default="spec.volumes")
            raise _too_large(kind, size, most, largest(parts.get(path), path))


def size_estimate(record: VmRecord, spec_bytes: int) -> int:
    """Return an upper bound of the record's size, without the fields that are always short."""
    chars = sum(len(key) + len(text) for key, text in record.annotations.items())
    chars += sum(len(key) + len(text) for key, text in record.labels.items())
    return MOST_GROWTH * (spec_bytes + chars)


def largest(value: Any, path: str = "") -> str:
    """Return the path of the field that makes up most of a value.

    The search descends while one child has at least half of the size of all children.
    """
    while True:
        sizes = {where: len(encode(one)) for where, one in _children(value, path).items()}
        if not sizes:
            return path
        most = max(sizes, key=sizes.__getitem__)
        if 2 * sizes[most] < sum(sizes.values()):
            return path
        value, path = _children(value, path)[most], most


def _children(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        dot = "." if path else ""
        return {f"{path}{dot}{cut_text(str(key), KEY_BYTES)}": one for key, one in value.items()}
    if isinstance(value, list | tuple):
        return {f"{path}[{index}]": one for index, one in enumerate(value)}
    return {}


def _secret_parts(spec: VmSpec, secrets: VmSecrets) -> Iterator[tuple[str, Any]]:
    """Yield each secret with its path in the request."""
    if secrets.ignition is not None:
        yield "spec.ignition", secrets.ignition.model_dump(exclude_defaults=True)
    for index, volume in enumerate(spec.volumes):
        where, name = f"spec.volumes[{index}]", volume.name
        if name in secrets.cloud_init:
            kind = next(one for one in _SEEDS if getattr(volume, one) is not None)
            seed = secrets.cloud_init[name].model_dump(exclude_defaults=True)
            yield f"{where}.{kind}", seed
        if name in secrets.files:
            kind = "files" if volume.files is not None else "sysprep"
            yield f"{where}.{kind}", secrets.files[name].model_dump(exclude_defaults=True)
        if name in secrets.image_pull:
            field = "image.ref" if volume.image else "container_disk.image_pull_secret"
            yield f"{where}.{field}", secrets.image_pull[name]


def _too_large(kind: str, size: int, most: int, path: str) -> VirtbusError:
    message = f"the VM's {kind} would have {size} bytes; at most {most} are stored"
    detail = Detail(path=path, message=f"is the largest part of {size} bytes", hint="shorten it")
    where = f"{message}; the largest field is {path or 'the request'}"
    return VirtbusError(Code.TOO_LARGE, "too_large", where, details=(detail,))
