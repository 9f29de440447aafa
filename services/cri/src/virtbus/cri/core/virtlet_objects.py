"""Reads Virtlet's objects of a cluster: the image translations, and the settings for nodes.

A VirtletConfigMapping may name a node, and may select nodes by labels. The mapping applies to nodes
that meet both conditions. Several mappings for a node are joined: a mapping with a higher
`priority` replaces settings of a lower one. For an equal priority, the later name wins.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from virtbus.cri.core.json_text import json_text
from virtbus.cri.core.stored_record import StoredRecord
from virtbus.schemas.errors import Detail
from virtbus.schemas.model import LenientModel
from virtbus.schemas.volume_ref import DevicePattern
from virtbus.schemas.wire import problems
from virtbus.schemas.yaml_text import YamlError, read_yaml

Json = dict[str, Any]

TRANSLATIONS = "virtlet-image-translations"
"""The ConfigMap with translations of image names."""
MAPPING_KIND, CONFIG_MAP_KIND = "VirtletImageMapping", "ConfigMap"
MOST_VALUES = 80_000
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NAME_IN_FILE = 150
"""Maximum length of an object's name in a file name. Linux limits a file name to 255 bytes."""
_PATTERN: TypeAdapter[str] = TypeAdapter(DevicePattern)


class NodeConfig(LenientModel):
    """Virtlet's settings that virtbus also has. None means that a setting is not set."""

    download_protocol: Literal["https", "http"] | None = Field(None, alias="downloadProtocol")
    raw_devices: str | None = Field(None, alias="rawDevices", max_length=2000)
    regexps: bool | None = Field(None, alias="enableRegexpImageTranslation")

    @property
    def scheme(self) -> str:
        """Return the URL scheme for an image whose name is a host and a path."""
        return self.download_protocol or "https"

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the patterns of the devices that flexvolumes of the type raw may use."""
        return tuple(one for one in self._named if _is_pattern(one))

    @property
    def wrong_devices(self) -> tuple[str, ...]:
        """Return the invalid patterns of `rawDevices`. They permit no device."""
        return tuple(one for one in self._named if not _is_pattern(one))

    @property
    def _named(self) -> tuple[str, ...]:
        parts = map(str.strip, (self.raw_devices or "").split(","))
        return tuple(f"/dev/{part}" for part in parts if part)


def _is_pattern(text: str) -> bool:
    try:
        _PATTERN.validate_python(text)
    except ValidationError:
        return False
    return True


class _Spec(LenientModel):
    node_name: str = Field("", alias="nodeName")
    node_selector: dict[str, str] = Field(default_factory=dict, alias="nodeSelector")
    priority: int = 0
    config: NodeConfig | None = None


class ClusterObjects(StoredRecord):
    """The objects of the cluster at the last read."""

    image_mappings: list[Json] = Field(default_factory=list)
    translations: list[Json] = Field(default_factory=list)
    config_mappings: list[Json] = Field(default_factory=list)
    nodes: list[Json] = Field(default_factory=list)
    """The Kubernetes node of this host; empty before it is known."""


class Settled(NamedTuple):
    """The settings of a node, and the problems of the objects."""

    config: NodeConfig
    problems: tuple[Detail, ...] = ()


def bare(obj: Mapping[str, Any]) -> Json:
    """Return the parts of an object that this module reads."""
    metadata = obj.get("metadata") or {}
    kept = {"name": str(metadata.get("name", "")), "labels": metadata.get("labels") or {}}
    parts = {name: obj[name] for name in ("spec", "data") if name in obj}
    return {"metadata": kept, **parts}


def node_config(objects: ClusterObjects) -> Settled:
    """Return the settings of this node.

    A mapping for certain nodes may forbid devices on this host. If such a mapping exists, no device
    is permitted before the Kubernetes node of this host is known.
    """
    node: Json = objects.nodes[0]["metadata"] if objects.nodes else {"name": "", "labels": {}}
    found: list[tuple[int, str, NodeConfig]] = []
    wrong: list[Detail] = []
    narrowed = False
    for one in objects.config_mappings:
        name = one["metadata"]["name"]
        spec, unreadable = _mapping(name, one.get("spec") or {})
        wrong += unreadable
        if spec is None:
            continue
        narrowed |= bool(spec.node_name or spec.node_selector)
        selected = spec.node_selector.items() <= node["labels"].items()
        if spec.config is not None and spec.node_name in {"", node["name"]} and selected:
            found.append((spec.priority, name, spec.config))
            path = f"VirtletConfigMapping {name}: spec.config.rawDevices"
            wrong += (
                Detail(path=path, message=f"{one!r:.80} is no pattern of devices: loop*, vg0/pvc-*")
                for one in spec.config.wrong_devices
            )
    joined: Json = {}
    for _, _, config in sorted(found, key=lambda each: each[:2]):
        joined |= config.model_dump(exclude_none=True, by_alias=True)
    if narrowed and not objects.nodes:
        joined.pop("rawDevices", None)
    return Settled(NodeConfig.model_validate(joined), tuple(wrong))


def _mapping(name: str, spec: Any) -> tuple[_Spec | None, tuple[Detail, ...]]:
    """Return the readable part of a VirtletConfigMapping's spec, and its problems.

    A wrong setting or a wrong priority is dropped. A mapping with any other wrong field is dropped
    as a whole, because it could apply to nodes that its author did not mean.
    """
    try:
        return _Spec.model_validate(spec), ()
    except ValidationError as error:
        wrong = problems(error, f"VirtletConfigMapping {name}: spec", model=_Spec)
        places = {one["loc"] for one in error.errors(include_url=False)}
    kept = dict(spec) if isinstance(spec, dict) else {}
    for place in places:
        match place:
            case ("config", str(setting), *_):
                kept["config"] = {**kept["config"]}
                kept["config"].pop(setting, None)
            case ("priority", *_):
                kept.pop("priority", None)
            case _:
                return None, wrong
    return _Spec.model_validate(kept), wrong


class ImageFiles(NamedTuple):
    """The files of image names (file name → content), and the problems of the objects."""

    files: dict[str, bytes]
    problems: tuple[Detail, ...] = ()


def image_files(objects: ClusterObjects, *, regexps: bool) -> ImageFiles:
    """Return the files of image names for imaged, as JSON, which is also YAML.

    Each usable object has its own file, so that a problem that imaged reports names the object.
    Without `regexps`, rules with a regular expression are left out.
    """
    found: dict[str, bytes] = {}
    wrong: list[Detail] = []
    parts = ((MAPPING_KIND, objects.image_mappings), (CONFIG_MAP_KIND, objects.translations))
    for kind, one in ((kind, one) for kind, several in parts for one in several):
        try:
            found[_file(kind, one)] = json.dumps(_body(kind, one, regexps=regexps)).encode()
        except Exception as error:  # noqa: BLE001  a bad object affects only its own names
            name = one["metadata"]["name"]
            wrong.append(Detail(path=f"{kind} {name}", message=f"cannot be used: {error!s:.200}"))
    return ImageFiles(found, tuple(wrong))


def _body(kind: str, one: Json, *, regexps: bool) -> Json:
    if kind == MAPPING_KIND:
        spec = one.get("spec")
        return {"kind": kind, "spec": spec if regexps else _without_regexps(spec)}
    data = one.get("data") or {}
    texts = data if regexps else {name: _text_without(data[name]) for name in data}
    return {"kind": kind, "data": texts}


def _file(kind: str, one: Json) -> str:
    """Return the file name of an object. An invalid object name becomes `unnamed`."""
    name = one["metadata"]["name"]
    if not _NAME.fullmatch(name):
        name = "unnamed"
    if len(name) > _NAME_IN_FILE:
        name = f"{name[:_NAME_IN_FILE]}.{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return f"{kind}.{name}.yaml"


def _without_regexps(config: Any) -> Any:
    if not isinstance(config, dict) or not isinstance(config.get("translations"), list):
        return config
    rules = [
        one for one in config["translations"] if not (isinstance(one, dict) and one.get("regexp"))
    ]
    return {**config, "translations": rules}


def _text_without(text: Any) -> Any:
    """Return a YAML text without rules that have a regular expression.

    A text that is not YAML is returned unchanged.

    Raises:
        ValueError: the text has binary data that are not text.
    """
    try:
        config = read_yaml(str(text), max_values=MOST_VALUES)
    except YamlError:
        return text
    return json_text(_without_regexps(config))
