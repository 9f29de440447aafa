"""Reads the annotations of Virtlet's pods, and reports all problems of a pod together.

The keys, defaults and rules are Virtlet's. A pod is a Virtlet pod if it has one of the `Virtlet…`
keys, or names `virtlet.cloud` as its target runtime. ConfigMaps and Secrets are read only when the
VM is made. Earlier, only the references to these objects are checked.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from virtbus.cri.core import virtlet_sources
from virtbus.cri.core.json_text import json_text
from virtbus.cri.core.virtlet_sources import Contents, Source
from virtbus.schemas.disk import DiskBus
from virtbus.schemas.errors import Detail
from virtbus.schemas.guest_files import GuestFile
from virtbus.schemas.ids import check_host_name, check_uid
from virtbus.schemas.quantity import parse_bytes
from virtbus.schemas.seed import META_BYTES
from virtbus.schemas.vm import Cpu, CpuFeature
from virtbus.schemas.wire import problems
from virtbus.schemas.yaml_text import YamlError, read_yaml

TARGET, TARGET_RUNTIME = "kubernetes.io/target-runtime", "virtlet.cloud"
VCPUS, CPU_MODEL, CPU = "VirtletVCPUCount", "VirtletCPUModel", "VirtletLibvirtCPUSetting"
DRIVER, ROOT_SIZE = "VirtletDiskDriver", "VirtletRootVolumeSize"
IMAGE_TYPE, META_DATA = "VirtletCloudInitImageType", "VirtletCloudInitMetaData"
USER_DATA, SCRIPT = "VirtletCloudInitUserData", "VirtletCloudInitUserDataScript"
OVERWRITE = "VirtletCloudInitUserDataOverwrite"
SOURCE, SOURCE_KEY = "VirtletCloudInitUserDataSource", "VirtletCloudInitUserDataSourceKey"
SOURCE_ENCODING = "VirtletCloudInitUserDataSourceEncoding"
SSH_KEYS, SSH_SOURCE = "VirtletSSHKeys", "VirtletSSHKeySource"
FILES_SOURCE, CHOWN = "VirtletFilesFromDataSource", "VirtletChown9pfsMounts"
SYSTEM_UUID, FORCE_DHCP = "VirtletSystemUUID", "VirtletForceDHCPNetworkConfig"

KEYS = frozenset(
    {
        *(TARGET, VCPUS, CPU_MODEL, CPU, DRIVER, ROOT_SIZE, IMAGE_TYPE, META_DATA, USER_DATA),
        *(SCRIPT, OVERWRITE, SOURCE, SOURCE_KEY, SOURCE_ENCODING, SSH_KEYS, SSH_SOURCE),
        *(FILES_SOURCE, CHOWN, SYSTEM_UUID, FORCE_DHCP),
    }
)
"""Virtlet's annotations. CHOWN and FORCE_DHCP have no effect, because virtbus has no 9p, and always
uses DHCP."""
FROM_CLUSTER = (SOURCE, SSH_SOURCE, FILES_SOURCE)
"""The annotations that name a ConfigMap or a Secret."""
MOUNT_SCRIPT = "@virtlet-mount-script@"
"""A word in scripts that Virtlet replaces with mount commands. virtbus-cri removes this word: the
volumes are mounted by cloud-init."""

MOST_VCPUS = 255
YAML_CHARS = 32 * 1024
YAML_VALUES = 2000
DRIVERS = {"scsi": DiskBus.SCSI, "virtio": DiskBus.VIRTIO}
IMAGE_TYPES = ("nocloud", "configdrive")
HOST_MODEL = "host-model"
COUNTS = ("sockets", "cores", "threads")
TRUE = "true"
HOSTNAMES = ("local-hostname", "hostname")
INSTANCE_ID = "instance-id"
"""A key of meta-data without effect, because the instance id of a guest is the VM's uid."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """The VM that the annotations describe. None or an empty value means the default."""

    vcpus: int | None = None
    sockets: int = 1
    threads: int = 1
    """Threads of each core. The number of cores follows from `vcpus`, `sockets` and `threads`."""
    cpu_model: str | None = None
    cpu_features: tuple[CpuFeature, ...] = ()
    disk_bus: DiskBus = DiskBus.VIRTIO
    root_bytes: int = 0
    config_drive: bool = False
    user_data: str | None = None
    meta_data: str | None = None
    ssh_keys: tuple[str, ...] = ()
    hostname: str = ""
    system_uuid: str | None = None
    files: tuple[GuestFile, ...] = ()


@dataclass(slots=True)
class _Reader:
    notes: Mapping[str, str]
    contents: Contents | None
    """The contents of the objects that the annotations name; None before they are read."""
    problems: list[Detail] = field(default_factory=list)

    def text(self, key: str) -> str:
        return self.notes.get(key, "")

    def refuse(self, key: str, message: str) -> None:
        self.problems.append(Detail(path=f"annotations.{key}", message=f"{key} {message}"))

    def mapping(self, key: str) -> dict[str, Any]:
        """Return the YAML mapping of an annotation; empty if it is missing or invalid."""
        text = self.text(key)
        if not text.strip():
            return {}
        if len(text) > YAML_CHARS:
            self.refuse(key, f"has more than {YAML_CHARS} characters; give the guest less data")
            return {}
        try:
            value = read_yaml(text, max_values=YAML_VALUES)
        except YamlError as error:
            self.refuse(key, f"is no YAML: {error}")
            return {}
        if not isinstance(value, dict):
            self.refuse(key, "is no YAML mapping; write `name: value`")
            return {}
        return {str(name): one for name, one in value.items()}


def is_virtlets(notes: Mapping[str, str]) -> bool:
    """Return True for the annotations of a pod that was written for Virtlet."""
    return notes.get(TARGET) == TARGET_RUNTIME or bool(notes.keys() & (KEYS - {TARGET}))


def named_sources(notes: Mapping[str, str]) -> dict[str, Source]:
    """Return the objects that a pod's annotations name, by annotation; leave out invalid names."""
    found = {}
    for note in FROM_CLUSTER:
        with suppress(ValueError):
            if notes.get(note, "").strip():
                found[note] = virtlet_sources.parse(notes[note], with_key=note == SSH_SOURCE)
    return found


def wishes(
    notes: Mapping[str, str], contents: Contents | None = None
) -> tuple[Wishes, list[Detail]]:
    """Return the wishes in a pod's annotations, and all problems of the annotations.

    `contents` has the contents of the objects that the annotations name; None before they are read.
    """
    if not is_virtlets(notes):
        return Wishes(), []
    reader = _Reader(notes, contents)
    for key in FROM_CLUSTER:
        try:
            if reader.text(key).strip():
                virtlet_sources.parse(reader.text(key), with_key=key == SSH_SOURCE)
        except ValueError as error:
            reader.refuse(key, str(error))
    meta, cpu, vcpus = reader.mapping(META_DATA), _cpu(reader), _vcpus(reader)
    if vcpus is not None and cpu.vcpus not in {1, vcpus}:
        reader.refuse(CPU, f"has a topology of {cpu.vcpus} vCPUs, and {VCPUS} means {vcpus}")
    found = Wishes(
        vcpus=vcpus,
        sockets=cpu.sockets,
        threads=cpu.threads,
        cpu_model=cpu.model,
        cpu_features=cpu.features,
        disk_bus=_disk_bus(reader),
        root_bytes=_root_bytes(reader),
        config_drive=_config_drive(reader),
        user_data=_user_data(reader),
        ssh_keys=(*_ssh_keys(reader), *_public_keys(reader, meta)),
        hostname=_hostname(reader, meta),
        meta_data=_meta_data(reader, meta),
        system_uuid=_system_uuid(reader),
        files=_files(reader),
    )
    return found, reader.problems


def _vcpus(reader: _Reader) -> int | None:
    text = reader.text(VCPUS).strip()
    if not text:
        return 1
    try:
        count = int(text) if len(text) <= 10 else MOST_VCPUS + 1
    except ValueError:
        reader.refuse(VCPUS, "is no whole number")
        return None
    if count > MOST_VCPUS:
        reader.refuse(VCPUS, f"is more than {MOST_VCPUS}")
        return None
    return max(1, count)


def _cpu(reader: _Reader) -> Cpu:
    """Return the guest's CPU. Only the mode `custom` names a model.

    Without a model, the guest gets the best model of the host.
    """
    if reader.text(CPU_MODEL) not in {"", HOST_MODEL}:
        reader.refuse(CPU_MODEL, f"must be empty or {HOST_MODEL}")
    wanted = _lowered(reader.mapping(CPU))
    model = wanted.pop("model", None)
    mode = wanted.pop("mode", "custom" if model else HOST_MODEL)
    features = wanted.pop("features", None) or []
    topology = wanted.pop("topology", None) or {}
    wanted.pop("match", None)
    if wanted or mode not in ("custom", HOST_MODEL, "host-passthrough"):
        known = "mode, match, model, features and topology"
        reader.refuse(CPU, f"has other fields than {known}, which a VM here cannot have")
        return Cpu()
    named = _lowered(model).get("value", "") if isinstance(model, dict) else model
    try:
        found = [CpuFeature.model_validate(_lowered(one)) for one in features]
        named = named if mode == "custom" else None
        return Cpu.model_validate({**_counts(topology), "model": named, "features": tuple(found)})
    except ValidationError as error:
        wrong = problems(error, model=Cpu)[0]
        reader.refuse(CPU, f"is not usable: {wrong.path}: {wrong.message:.200}")
    except (ValueError, TypeError, AttributeError) as error:
        reader.refuse(CPU, f"is not usable: {error!s:.200}")
    return Cpu()


def _counts(topology: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the fields of a topology.

    Raises:
        ValueError: the topology has another field than COUNTS.
    """
    counts = _lowered(topology)
    if counts.keys() - set(COUNTS):
        msg = f"a topology has {', '.join(COUNTS)} only"
        raise ValueError(msg)
    return counts


def _lowered(fields: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name).lower(): value for name, value in fields.items()}


def _disk_bus(reader: _Reader) -> DiskBus:
    text = reader.text(DRIVER) or "scsi"
    if text not in DRIVERS:
        reader.refuse(DRIVER, f"must be one of {', '.join(DRIVERS)}")
    return DRIVERS.get(text, DiskBus.SCSI)


def _root_bytes(reader: _Reader) -> int:
    """Return the wished size of the root disk; 0 without a valid size.

    As in Virtlet, a negative size is ignored.
    """
    text = reader.text(ROOT_SIZE).strip()
    if not text or text.startswith("-"):
        return 0
    try:
        return parse_bytes(text)
    except ValueError as error:
        reader.refuse(ROOT_SIZE, str(error))
        return 0


def _config_drive(reader: _Reader) -> bool:
    text = reader.text(IMAGE_TYPE).lower() or IMAGE_TYPES[0]
    if text not in IMAGE_TYPES:
        reader.refuse(IMAGE_TYPE, f"must be one of {', '.join(IMAGE_TYPES)}")
    return text == IMAGE_TYPES[1]


def _user_data(reader: _Reader) -> str | None:
    """Return the user data: the pod's script or, without a script, a cloud-config.

    The cloud-config merges the mappings of SOURCE and USER_DATA, as JSON, which is also YAML. None
    means that the pod has no user data.
    """
    inline, given = reader.mapping(USER_DATA), _source_texts(reader)
    script = reader.text(SCRIPT) or _named_script(reader, given, inline)
    if script:
        return script.replace(MOUNT_SCRIPT, "")
    if reader.text(SOURCE_KEY) or (inline and reader.text(OVERWRITE) == TRUE):
        given = {}
    whole: dict[str, Any] = {}
    for name, text in given.items():
        try:
            whole[name] = read_yaml(text, max_values=YAML_VALUES)
        except YamlError as error:
            where = f"line {error.line}, column {error.column}" if error.line else "as a whole"
            secret = named_sources(reader.notes)[SOURCE].kind == virtlet_sources.SECRETS
            # kubelet shows the message in an event, so it must not quote the text of a Secret.
            why = where if secret else error
            reader.refuse(SOURCE, f"has the key {name!r:.80}, which is no YAML: {why}")
    whole = virtlet_sources.merged(whole, inline)
    try:
        return f"#cloud-config\n{json_text(whole)}\n" if whole else None
    except ValueError as error:
        reader.refuse(USER_DATA if inline else SOURCE, str(error))
        return None


def _source_texts(reader: _Reader) -> dict[str, str]:
    encoding = reader.text(SOURCE_ENCODING) or virtlet_sources.PLAIN
    if encoding not in {virtlet_sources.PLAIN, virtlet_sources.BASE64}:
        reader.refuse(SOURCE_ENCODING, "must be plain or base64")
        return {}
    found = {}
    for name, value in (reader.contents or {}).get(SOURCE, {}).items():
        try:
            found[name] = virtlet_sources.decoded(value, encoding)
        except ValueError as error:
            reader.refuse(SOURCE, f"has the key {name!r:.80}, which {error}")
    return found


def _named_script(reader: _Reader, given: Mapping[str, str], inline: Mapping[str, Any]) -> str:
    """Return the script in the user data under the key that SOURCE_KEY names.

    The script is returned unchanged. An empty text means that the pod names no script, or that the
    object is not read yet.
    """
    key = reader.text(SOURCE_KEY)
    if not key or (reader.contents is None and reader.text(SOURCE)):
        return ""
    script = given.get(key, inline.get(key))
    if isinstance(script, str) and script:
        return script
    reader.refuse(SOURCE_KEY, f"names {key!r:.80}, which is no text of the user data")
    return ""


def _ssh_keys(reader: _Reader) -> Iterator[str]:
    """Yield the keys in the object that SSH_SOURCE names, and then the inline keys.

    With OVERWRITE, inline keys replace the object's keys.
    """
    inline = reader.text(SSH_KEYS)
    source = named_sources(reader.notes).get(SSH_SOURCE)
    if source is not None and reader.contents is not None:
        value = reader.contents.get(SSH_SOURCE, {}).get(source.key)
        if value is None:
            reader.refuse(SSH_SOURCE, f"names an object without the key {source.key!r:.80}")
        elif not (inline and reader.text(OVERWRITE) == TRUE):
            inline = f"{value.decode(errors='replace')}\n{inline}"
    yield from filter(None, map(str.strip, inline.splitlines()))


def _files(reader: _Reader) -> tuple[GuestFile, ...]:
    try:
        return virtlet_sources.files((reader.contents or {}).get(FILES_SOURCE, {}))
    except ValueError as error:
        reader.refuse(FILES_SOURCE, str(error))
        return ()


def _public_keys(reader: _Reader, meta: dict[str, Any]) -> Iterator[str]:
    keys = meta.pop("public-keys", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        reader.refuse(META_DATA, "has public-keys that are no list of keys")
        return
    yield from filter(None, map(str.strip, keys))


def _hostname(reader: _Reader, meta: dict[str, Any]) -> str:
    """Remove the host name from `meta`, and return it; empty without a valid name."""
    named = [str(meta.pop(key)) for key in HOSTNAMES if key in meta]
    if not named:
        return ""
    with suppress(ValueError):
        return check_host_name(named[0])
    reader.refuse(META_DATA, "has an invalid host name; use a-z, 0-9 and '-'")
    return ""


def _meta_data(reader: _Reader, meta: dict[str, Any]) -> str | None:
    """Return the rest of the meta-data as JSON for the guest; None if nothing is left."""
    more = {key: value for key, value in meta.items() if key not in {*HOSTNAMES, INSTANCE_ID}}
    try:
        text = json_text(more) if more else None
    except ValueError as error:
        reader.refuse(META_DATA, str(error))
        return None
    if text is not None and len(text) > META_BYTES:
        reader.refuse(META_DATA, f"has more than {META_BYTES} characters as JSON")
        return None
    return text


def _system_uuid(reader: _Reader) -> str | None:
    text = reader.text(SYSTEM_UUID).strip()
    if not text:
        return None
    with suppress(ValueError):
        return check_uid(text)
    reader.refuse(SYSTEM_UUID, "is no UUID")
    return None
