"""References of a VMI to Secrets and ConfigMaps, and the transfer of their contents to its VM.

The objects are read when the VMI starts. Their contents become seeds, files, registry logins and
SSH keys.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import NamedTuple

from virtbus.kubebridge.core.fields.translator import Translation
from virtbus.kubebridge.core.objects.status_errors import Cause, Reason
from virtbus.kubebridge.core.objects.unstructured import Object, at, items, part, text
from virtbus.schemas.base64_text import FILE_CHARACTERS
from virtbus.schemas.seed import FILES

# --- references --------------------------------------------------------------------------------
SECRET, CONFIG_MAP = "Secret", "ConfigMap"
SEEDS = {
    "cloudInitNoCloud": "cloud_init_no_cloud",
    "cloudInitConfigDrive": "cloud_init_config_drive",
}
"""The kinds of cloud-init seeds in a manifest, with their names in a VM's spec."""


class Use(Enum):
    """The use of the contents of a Secret or ConfigMap."""

    SEED = auto()
    NETWORK = auto()
    FILES = auto()
    ANSWERS = auto()
    """An answer file for Windows setup."""
    LOGIN = auto()
    KEYS = auto()


class Need(NamedTuple):
    """A reference to an object in the VMI's namespace. `field` is the path of the reference.

    `place` is an index: of the credential for `Use.KEYS`, of the volume otherwise.
    """

    kind: str
    name: str
    field: str
    use: Use
    place: int
    optional: bool = False


Given = Mapping[tuple[str, str], Object]
"""The objects that were read, by kind and name. Missing objects are absent."""

IN_VOLUMES: tuple[tuple[tuple[str, ...], str, Use], ...] = (
    (("containerDisk", "imagePullSecret"), SECRET, Use.LOGIN),
    *(((seed, "secretRef", "name"), SECRET, Use.SEED) for seed in SEEDS),
    *(((seed, "networkDataSecretRef", "name"), SECRET, Use.NETWORK) for seed in SEEDS),
    (("configMap", "name"), CONFIG_MAP, Use.FILES),
    (("secret", "secretName"), SECRET, Use.FILES),
    (("sysprep", "configMap", "name"), CONFIG_MAP, Use.ANSWERS),
    (("sysprep", "secret", "name"), SECRET, Use.ANSWERS),
)
"""Paths below a volume that name an object, with the object's kind and use."""
OF_KEYS = ("sshPublicKey", "source", "secret", "secretName")


def needs(spec: Object, prefix: str = "spec") -> Iterator[Need]:
    """Yield all references of the spec: those of volumes in their order, then those of SSH keys."""
    for index, volume in enumerate(items(spec, "volumes")):
        for path, kind, use in IN_VOLUMES:
            if name := text(volume, *path):
                field = f"{prefix}.volumes[{index}].{'.'.join(path)}"
                optional = at(volume, path[0], "optional") is True
                yield Need(kind, name, field, use, index, optional)
    for index, credential in enumerate(items(spec, "accessCredentials")):
        if name := text(credential, *OF_KEYS):
            field = f"{prefix}.accessCredentials[{index}].{'.'.join(OF_KEYS)}"
            yield Need(SECRET, name, field, Use.KEYS, index)


# --- contents ----------------------------------------------------------------------------------
SEED_KEYS = {"user_data": ("userdata", "userData"), "network_data": ("networkdata", "networkData")}
ANSWERS = frozenset({"autounattend.xml", "unattend.xml"})
ANSWERS_LABEL = "unattendCD"
LOGIN = ".dockerconfigjson"
MAX_NAME = 64
_NAME = re.compile(rf"\.?[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")
Key = tuple[str, str]
"""An SSH key, and the manifest field that refers to its Secret."""


def fill(walked: Translation, spec: Object, given: Given, prefix: str) -> dict[str, list[Key]]:
    """Put the contents into the translated VM. Return the SSH keys by kind of seed.

    The caller writes the keys, because it may first add a seed.
    """
    keys: dict[str, list[Key]] = {seed: [] for seed in SEEDS}
    for need in needs(spec, prefix):
        found = given.get((need.kind, need.name))
        if found is None and not need.optional:
            message = f"{need.kind} {need.name} does not exist; create it: the VMI waits for it"
            walked.causes.append(Cause(need.field, message, Reason.NOT_FOUND))
            continue
        data = _data(walked, need, found or {})
        match need.use:
            case Use.KEYS:
                for seed in _seeds_of(items(spec, "accessCredentials")[need.place]):
                    keys[seed] += [(key, need.field) for key in _keys(walked, need, data)]
            case Use.SEED | Use.NETWORK:
                _seed(walked, need, items(spec, "volumes")[need.place], data)
            case Use.FILES | Use.ANSWERS:
                _files(walked, need, data)
            case Use.LOGIN:
                _login(walked, need, data)
    _whole(walked, f"{prefix}.volumes")
    return keys


def _data(walked: Translation, need: Need, found: Object) -> dict[str, bytes]:
    encoded = "data" if need.kind == SECRET else "binaryData"
    data = {}
    for key, value in part(found, encoded).items():
        try:
            data[key] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError, TypeError):
            walked.causes.append(Cause(need.field, f"{_named(need, key)} is not in Base64"))
    if need.kind != SECRET:
        texts = part(found, "data").items()
        data |= {key: value.encode() for key, value in texts if isinstance(value, str)}
    return data


def _named(need: Need, key: str) -> str:
    return f"key {key!r:.80} of {need.kind} {need.name}"


def _lacks(walked: Translation, need: Need, keys: str) -> None:
    """Report a missing key as a missing object: the VMI waits until a user adds the key."""
    message = f"{need.kind} {need.name} has no key {keys}; add it: the VMI waits for it"
    walked.causes.append(Cause(need.field, message, Reason.NOT_FOUND))


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


# --- seeds -------------------------------------------------------------------------------------
def _seed(walked: Translation, need: Need, volume: Object, data: Mapping[str, bytes]) -> None:
    """Put user data and network data into a seed. Values in the manifest have precedence."""
    (seed,) = (name for name in SEEDS if f"].{name}." in need.field)
    wanted = dict(SEED_KEYS)
    if need.use is Use.NETWORK:
        del wanted["user_data"]
    elif text(volume, seed, "networkDataSecretRef", "name"):
        del wanted["network_data"]
    found = {
        ours: data[key] for ours, names in wanted.items() for key in names[::-1] if key in data
    }
    if not found:
        _lacks(walked, need, " or ".join(name for names in wanted.values() for name in names))
    for ours, value in found.items():
        here = ("spec", "volumes", need.place, SEEDS[seed])
        if (*here, ours) in walked.origin or (*here, f"{ours}_base64") in walked.origin:
            continue
        plain = _text(value)
        if plain is not None:
            walked.put((*here, ours), plain, need.field)
        else:
            walked.put((*here, f"{ours}_base64"), base64.b64encode(value).decode(), need.field)


def _seeds_of(credential: Object) -> tuple[str, ...]:
    ways = part(credential, "sshPublicKey", "propagationMethod")
    by_way = {"noCloud": "cloudInitNoCloud", "configDrive": "cloudInitConfigDrive"}
    return tuple(seed for way, seed in by_way.items() if at(ways, way) is not None)


def _keys(walked: Translation, need: Need, data: Mapping[str, bytes]) -> Iterator[str]:
    """Yield each line of each value as an SSH key, as KubeVirt does."""
    for key, value in data.items():
        plain = _text(value)
        if plain is None:
            walked.causes.append(Cause(need.field, f"{_named(need, key)} is not UTF-8 text"))
        yield from (line.strip() for line in (plain or "").splitlines() if line.strip())


# --- files and logins --------------------------------------------------------------------------
def _files(walked: Translation, need: Need, data: Mapping[str, bytes]) -> None:
    if need.use is Use.ANSWERS and not any(key.lower() in ANSWERS for key in data):
        _lacks(walked, need, " or ".join(sorted(ANSWERS)))
    wrong = [
        f"{_named(need, key)} is not a valid file name; use up to {MAX_NAME} characters of A-Z,"
        " a-z, 0-9, '.', '_' and '-'"
        for key in data
        if _NAME.fullmatch(key) is None or len(key) > MAX_NAME
    ]
    if len(data) > FILES:
        wrong.append(
            f"{need.kind} {need.name} has {len(data)} keys; a disk has at most {FILES} files"
        )
    walked.causes += [Cause(need.field, message) for message in wrong]
    if wrong:
        return
    here = ("spec", "volumes", need.place, "files")
    texts = {key: _text(value) for key, value in data.items()}
    plain = {key: value for key, value in texts.items() if value is not None}
    binary = {
        key: base64.b64encode(value).decode() for key, value in data.items() if key not in plain
    }
    walked.put((*here, "data"), plain, need.field)
    walked.put((*here, "binary_data"), binary, need.field)
    if need.use is Use.ANSWERS:
        walked.put((*here, "volume_label"), ANSWERS_LABEL, need.field)


def _login(walked: Translation, need: Need, data: Mapping[str, bytes]) -> None:
    plain = _text(data.get(LOGIN, b""))
    if not plain:
        _lacks(walked, need, f"{LOGIN} (`kubectl create secret docker-registry` writes it)")
        return
    here = ("spec", "volumes", need.place, "container_disk", "image_pull_secret")
    walked.put(here, plain, need.field)


def _whole(walked: Translation, field: str) -> None:
    """Check the total size. The bus stores all contents in one entry next to the VM's record."""
    size = sum(_characters(volume) for volume in items(walked.ours, "spec", "volumes"))
    if size > FILE_CHARACTERS:
        message = (
            f"user data, network data and files have {size} bytes; a VM can have at most"
            f" {FILE_CHARACTERS} (binary data counts in Base64)"
        )
        walked.causes.append(Cause(field, message))


def _characters(volume: Object) -> int:
    texts = [value for seed in SEEDS.values() for value in part(volume, seed).values()]
    texts.append(text(volume, "container_disk", "image_pull_secret"))
    for kind in ("data", "binary_data"):
        files = part(volume, "files", kind)
        texts += [*files, *files.values()]
    return sum(len(one.encode(errors="replace")) for one in texts if isinstance(one, str))
