"""Checks of the rules about volumes' contents: seeds, files and keys."""

from collections.abc import Iterable

from virtbus.kubebridge.core.objects.plain import Object, at, items, part, text
from virtbus.kubebridge.core.validation.rules_checks import (
    Check,
    Found,
    given,
    inside,
    other_than_one,
    when,
)

INLINE_BYTES = 2048
_DATA = {
    "userdata": ("userData", "userDataBase64", "secretRef"),
    "networkdata": ("networkData", "networkDataBase64", "networkDataSecretRef"),
}
_OF_WAYS = {"noCloud": "cloudInitNoCloud", "configDrive": "cloudInitConfigDrive"}
"""The kind of seed that carries keys, for each propagation method."""


def data_twice(seed: Object) -> list[Found]:
    """Find user data or network data from several sources."""
    counts = {kind: sum(bool(at(seed, one)) for one in fields) for kind, fields in _DATA.items()}
    return [("", kind) for kind, count in counts.items() if count > 1]


def no_data(seed: Object) -> list[Found]:
    """Find a seed without user data and network data."""
    return when(not any(at(seed, one) for fields in _DATA.values() for one in fields), "")


def inline_size(seed: Object) -> list[Found]:
    """Find data that is too large for the manifest."""
    return [
        ("", kind, ref)
        for kind, (inline, encoded, ref) in _DATA.items()
        if len(text(seed, inline).encode()) > INLINE_BYTES
        or len(text(seed, encoded)) * 3 // 4 > INLINE_BYTES
    ]


def unnamed(kind: str, name: str) -> Check:
    """Find volumes that do not name their object."""
    return inside("volumes", kind, lambda one: when(not text(one, name), f".{name}"))


def answers(sysprep: Object) -> list[Found]:
    """Find a volume of answers with other than one source."""
    named = [kind for kind in ("configMap", "secret") if text(sysprep, kind, "name")]
    return other_than_one(named, " and ")


def kinds_of_credential(credential: Object) -> list[Found]:
    """Find a credential with other than one kind."""
    return other_than_one(given(credential, "sshPublicKey", "userPassword"), " and ")


def keys_without_source(keys: Object) -> list[Found]:
    """Find keys without a Secret."""
    return when(not text(keys, "source", "secret", "secretName"), ".source")


def ways_of_keys(keys: Object) -> list[Found]:
    """Find keys with other than one propagation method."""
    ways = part(keys, "propagationMethod")
    found = other_than_one(given(ways, *ways), " and ")
    return [(".propagationMethod", *shown) for _, *shown in found]


def keys_without_seed(spec: Object) -> Iterable[Found]:
    """Find keys for a seed that no volume has."""
    volumes = items(spec, "volumes")
    seeds = {seed for volume in volumes for seed in given(volume, *_OF_WAYS.values())}

    def check(keys: Object) -> list[Found]:
        ways = given(part(keys, "propagationMethod"), *_OF_WAYS)
        missing = [way for way in ways if _OF_WAYS[way] not in seeds]
        return [(".propagationMethod", _OF_WAYS[way], way) for way in missing]

    return inside("accessCredentials", "sshPublicKey", check)(spec)
