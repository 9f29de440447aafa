"""Builds a `VmCreate` map from command line and file; the controller validates it."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from virtbus.cli.failures import usage

MAX_VALUES = 20_000
"""Maximum number of values in one message (`schemas/wire.py`)."""
_KEY_TYPES = ("ssh-", "ecdsa-", "sk-")


def from_file(name: str, has: str = "name, image", command: str = "vm create") -> dict[str, Any]:
    """Return the map in a YAML or JSON file; `-` is standard input.

    The error message names `command`, and `has`: some of the map's keys.

    Raises:
        CliError: the file cannot be read or is malformed; the message names the line.
    """
    text = read_text(name, "--file")
    shown = "standard input" if name == "-" else name
    if text.lstrip()[:1] == "{":
        try:
            value = json.loads(text)
        except ValueError as error:
            raise usage(f"{shown} is no JSON: {error}") from None
    else:
        from virtbus.schemas.yaml_text import YamlError, read_yaml  # this import takes 20 ms

        try:
            value = read_yaml(text, max_values=MAX_VALUES)
        except YamlError as error:
            text = error.shown.replace('"<unicode string>"', shown)
            raise usage(f"{shown} is no YAML: {text}") from None
    if not isinstance(value, dict):
        raise usage(f"{shown} must hold a map with {has}, …", f"see `virtbus {command} -h`")
    return value


def read_text(name: str, option: str) -> str:
    """Return the text of a file (`-`: standard input); raise CliError if that fails."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise usage(f"{option} {name}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise usage(f"{option} {name}: is no UTF-8 text") from None


def ssh_keys(values: Sequence[str]) -> list[str]:
    """Return the public keys in `values`: each is a key, or a file with one key per line.

    Raises:
        CliError: a file cannot be read, has no key, or has a private key.
    """
    keys: list[str] = []
    for value in values:
        if value.startswith(_KEY_TYPES):
            keys.append(value.strip())
            continue
        lines = [line.strip() for line in read_text(value, "--ssh-key").splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if any("PRIVATE KEY" in line for line in found):
            raise usage(f"--ssh-key {value} is a private key", f"give the public one: {value}.pub")
        if not found:
            raise usage(f"--ssh-key {value} holds no key")
        keys.extend(found)
    return keys


def published(values: Sequence[str]) -> list[dict[str, Any]]:
    """Return `[ADDRESS:]HOST_PORT:GUEST_PORT[/PROTOCOL]` texts as maps (a `PublishedPort` each).

    Raises:
        CliError: a text has another form, or a port is no number.
    """
    found = []
    for value in values:
        ports, _, protocol = value.partition("/")
        *address, host_port, guest_port = ports.rsplit(":", 2) if ":" in ports else ("", "")
        if not (host_port.isdecimal() and guest_port.isdecimal()):
            raise usage(
                f"--publish {value!r} must be [ADDRESS:]HOST_PORT:GUEST_PORT[/tcp|/udp]",
                "virtbus vm create web --image tiny --publish 8080:80",
            )
        port: dict[str, Any] = {"host_port": int(host_port), "guest_port": int(guest_port)}
        if protocol:
            port["protocol"] = protocol.lower()
        host = address[0].removeprefix("[").removesuffix("]") if address else ""
        if host not in {"", "0.0.0.0", "::"}:  # noqa: S104  means every address
            port["host_address"] = host
        found.append(port)
    return found


def with_nic(wanted: dict[str, Any], **lists: Sequence[Any]) -> None:
    """Add published ports or addresses to the first interface of a `VmCreate` map.

    If the map has no interface, an interface is added. An interface needs an entry in the spec's
    `networks`, so the shorthand `network` becomes such an entry. Empty lists change nothing.
    """
    if not any(lists.values()):
        return
    spec = wanted.setdefault("spec", {})
    devices = spec.setdefault("domain", {}).setdefault("devices", {})
    nics = devices.setdefault("interfaces", [])
    if not spec.get("networks"):
        network = wanted.pop("network", None)
        spec["networks"] = [{"name": "default"} | ({"network": network} if network else {})]
    if not nics:
        nics.append({"name": spec["networks"][0].get("name", "default")})
    for field, values in lists.items():
        if values:
            nics[0][field] = [*nics[0].get(field, ()), *values]


def with_directories(wanted: dict[str, Any], values: Sequence[str]) -> None:
    """Add `TAG=PATH[:ro]` texts to a `VmCreate` map; raise CliError for any other form."""
    for value in values:
        tag, _, path = value.partition("=")
        readonly = path.endswith(":ro")
        if not tag or not path.startswith("/"):
            raise usage(f"--directory {value!r} must be TAG=PATH or TAG=PATH:ro")
        one = {"name": tag, "directory": path.removesuffix(":ro"), "readonly": readonly}
        domain = wanted.setdefault("spec", {}).setdefault("domain", {})
        domain.setdefault("devices", {}).setdefault("filesystems", []).append(one)


def labels(values: Sequence[str]) -> dict[str, str]:
    """Return `KEY=VALUE` texts as a map; raise CliError for any other form."""
    found: dict[str, str] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise usage(f"--label {value!r} must be KEY=VALUE")
        found[key] = text
    return found


def with_volumes(spec: Mapping[str, Any] | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec with a disk for each --volume and --new-volume; empty if neither is given.

    Raises:
        CliError: a text is malformed, or --delete-volumes or --access lacks --new-volume.
    """
    for name in ("delete_volumes", "access"):
        if flags[name] and not flags["new_volumes"]:
            raise usage(f"--{name.replace('_', '-')} needs --new-volume")
    more = {"retention": "Delete"} if flags["delete_volumes"] else {}
    more |= {"access": flags["access"]} if flags["access"] else {}
    disks = [_held(value) for value in flags["volumes"]]
    disks += [_made(value, more) for value in flags["new_volumes"]]
    if not disks:
        return {}
    given = spec or {}
    return {**given, "volumes": [*(given.get("volumes") or ()), *disks]}


def _held(value: str) -> dict[str, Any]:
    """Return the disk of `VOLUME[=DISK]`; by default the disk has the volume's name."""
    name, equals, disk = value.partition("=")
    if not name or (equals and not disk):
        raise usage(f"--volume {value!r} must be VOLUME or VOLUME=DISK")
    return {"name": disk or name, "volume": {"name": name}}


def _made(value: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the disk of `VOLUME=SIZE[:IMAGE]`; the volume is created with the VM."""
    name, _, rest = value.partition("=")
    size, colon, image = rest.partition(":")
    if not name or not size or (colon and not image):
        raise usage(f"--new-volume {value!r} must be VOLUME=SIZE or VOLUME=SIZE:IMAGE")
    template = {"size": size, **({"source": {"image": image}} if image else {}), **more}
    return {"name": name, "volume": {"name": name, "template": template}}


def merge(base: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with its values replaced by the flags that are given; labels are merged."""
    given = {name: value for name, value in flags.items() if value not in (None, {}, [])}
    merged = {**base, **given}
    if "labels" in given and isinstance(base.get("labels"), Mapping):
        merged["labels"] = {**base["labels"], **given["labels"]}
    return merged
