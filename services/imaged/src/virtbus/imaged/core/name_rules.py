"""Reads the rules of a file in `images.d`: translations of image names, and transports.

All problems of a file are reported together. An invalid entry with a readable name or pattern
becomes a rule that refuses the matching names. Without that rule, another rule could match these
names.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from virtbus.imaged.core.name_patterns import NamePattern
from virtbus.imaged.core.transports import PLAIN, Transport
from virtbus.schemas.errors import Detail
from virtbus.schemas.image import check_plain_name, parse_image_ref
from virtbus.schemas.model import StrictModel
from virtbus.schemas.wire import problems

DEFAULT_TRANSPORT = "default"
"""The transport of rules that name no transport, if their file defines a transport `default`."""
MAX_RULES = 10_000


class Translation(StrictModel):
    """`[[image]]`: the URL of a name, or of all names that a regular expression matches.

    The context of pydantic's validation has the file's transports by name; None stands for a
    transport with problems.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, str_max_length=2048)

    name: str | None = Field(None, description="a plain name, after the prefix")
    regexp: str | None = Field(
        None,
        validate_default=True,
        description="an RE2 expression that matches a whole name, after the prefix",
    )
    digest: str | None = Field(
        None,
        pattern=r"^sha256:[0-9a-f]{64}$",
        description="digest of the image: `sha256:` and 64 digits",
    )
    url: str = Field(description="URL; with regexp it may use groups: $1, ${1}, ${name}")
    transport: str | None = Field(
        None,
        validate_default=True,
        description=f"a transport of this file; without it `{DEFAULT_TRANSPORT}`, if defined",
    )
    pin: bool = Field(
        False, description="keep the image on the node: neither age nor quota removes it"
    )

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str | None) -> str | None:
        return None if name is None else check_plain_name(name)

    @field_validator("regexp")
    @classmethod
    def _one_of(cls, regexp: str | None, info: ValidationInfo) -> str | None:
        if "name" in info.data and (info.data["name"] is None) == (regexp is None):
            msg = "an entry needs either name or regexp"
            raise ValueError(msg)
        if regexp is not None:
            NamePattern.of(regexp, "")
        return regexp

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str, info: ValidationInfo) -> str:
        if "regexp" not in info.data:
            return url  # without a valid regexp, the groups are unknown
        regexp = info.data["regexp"]
        checked = url if regexp is None else NamePattern.of(regexp, url).example()
        digest = info.data.get("digest")
        source = parse_image_ref(f"{checked}@{digest}" if digest else checked)
        if not source.is_url or source.digest != digest:
            msg = "must be a URL; a digest belongs in the field digest"
            raise ValueError(msg)
        return url if regexp is not None else source.locator

    @field_validator("transport")
    @classmethod
    def _known(cls, name: str | None, info: ValidationInfo) -> str | None:
        transports: Mapping[str, Transport | None] = info.context or {}
        if name is None and DEFAULT_TRANSPORT not in transports:
            return None
        found = transports.get(name or DEFAULT_TRANSPORT, PLAIN)
        if found is PLAIN:
            known = ", ".join(sorted(transports)[:10]) or "none"
            msg = f"this file has no such transport; it has: {known}"
            raise ValueError(msg)
        if found is None:
            msg = f"the transport {(name or DEFAULT_TRANSPORT)[:64]!r} has problems"
            raise ValueError(msg)
        if found.login_file and info.data.get("url", "").startswith("docker://"):
            msg = "logins of registries are in registry_auth_file, not in login_file"
            raise ValueError(msg)
        return name or DEFAULT_TRANSPORT


class Layer(IntEnum):
    """The sources of rules. The rules of a lower number have precedence."""

    CLUSTER_MAPPING = 0
    """A VirtletImageMapping that the node's `virtbus-cri` follows in the cluster."""
    MAPPING = 1
    """A VirtletImageMapping in a file of `images.d`."""
    FILE = 2
    CLUSTER_FILE = 3
    """The ConfigMap `virtlet-image-translations`, which `virtbus-cri` follows in the cluster."""
    SETTING = 4
    OWN = 5
    """The images of virtbus itself."""


IN_CLUSTER = {Layer.MAPPING: Layer.CLUSTER_MAPPING, Layer.FILE: Layer.CLUSTER_FILE}


@dataclass(frozen=True, slots=True)
class NameRule:
    """One translation. `name` or `pattern` applies to the part of image names after the prefix."""

    where: str
    """The file and the entry, for people."""
    prefix: str = ""
    name: str = ""
    pattern: NamePattern | None = None
    url: str = ""
    digest: str | None = None
    transport: Transport = PLAIN
    pin: bool = False
    layer: Layer = Layer.FILE
    problem: str = ""
    """The reason why the rule refuses its names; empty for a valid rule."""

    @property
    def full_name(self) -> str:
        return f"{self.prefix}/{self.name}" if self.prefix else self.name

    def rest_of(self, name: str) -> str | None:
        if not self.prefix:
            return name
        start = f"{self.prefix}/"
        return name[len(start) :] if name.startswith(start) else None


@dataclass(frozen=True, slots=True)
class KnownTransport:
    """A transport of a file, for image names of the bus."""

    where: str
    """The file and the table, for people."""
    transport: Transport = PLAIN
    problem: str = ""
    """The reason why the transport cannot be used; empty for a valid transport."""


@dataclass(slots=True)
class RuleFile:
    """The rules of a file in the file's order, with the file's problems and transports."""

    rules: list[NameRule] = field(default_factory=list)
    problems: list[Detail] = field(default_factory=list)
    transports: dict[str, KnownTransport] = field(default_factory=dict)


def read_rules(text: str, origin: str) -> RuleFile:
    """Return the rules and problems of a TOML text; `origin` is the file's name."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        return RuleFile(problems=[Detail(path=origin, message=f"is no TOML: {error}")])
    return rules_from(document, origin)


def rules_from(document: Mapping[str, Any], origin: str) -> RuleFile:
    """Return the rules and problems of a document with the fields of a TOML file."""
    found = RuleFile()
    hint = "a file has prefix, [[image]] and [transports.NAME]"
    for key in sorted(set(document) - {"prefix", "image", "transports"})[:10]:
        found.problems.append(Detail(path=f"{origin}: {key}", message="unknown field", hint=hint))
    prefix = _prefix(document.get("prefix", ""), origin, found)
    if prefix is None:
        return found
    transports = _transports(document.get("transports", {}), origin, found)
    entries = document.get("image", [])
    if not isinstance(entries, list) or len(entries) > MAX_RULES:
        message = f"must be a list of at most {MAX_RULES} tables"
        found.problems.append(Detail(path=f"{origin}: image", message=message))
        return found
    for number, entry in enumerate(entries):
        _add(entry, f"{origin}: image[{number}]", found, transports, prefix)
    return found


def rules_of(names: Iterable[tuple[str, str]], layer: Layer) -> RuleFile:
    """Return exact rules from (name, `url[@sha256:…]`) pairs."""
    found = RuleFile()
    for name, ref in names:
        url, _, digest = ref.rpartition("@sha256:")
        entry = {"url": url, "digest": f"sha256:{digest}"} if url else {"url": ref}
        _add(entry | {"name": name}, f"the setting names: {name}", found, {}, "")
    found.rules = [replace(rule, layer=layer) for rule in found.rules]
    return found


def _prefix(value: object, origin: str, found: RuleFile) -> str | None:
    """Return the prefix; None if it is invalid. Then the names of all rules are unknown."""
    if value == "":
        return ""
    try:
        prefix = check_plain_name(value) if isinstance(value, str) else ":"
    except ValueError:
        prefix = ":"
    if ":" in prefix:
        message = "must be the first parts of names, such as prod or prod/linux"
        found.problems.append(Detail(path=f"{origin}: prefix", message=message))
        return None
    return prefix


def _transports(value: object, origin: str, found: RuleFile) -> Mapping[str, Transport | None]:
    if not isinstance(value, dict):
        message = "must be tables [transports.NAME]"
        found.problems.append(Detail(path=f"{origin}: transports", message=message))
        return {}
    transports: dict[str, Transport | None] = {}
    for name, fields in value.items():
        transports[name] = None
        where = f"{origin}: transports.{name}"
        try:
            transports[name] = transport = Transport.model_validate(fields)
            found.transports[name] = KnownTransport(where, transport)
        except ValidationError as error:
            found.problems += problems(error, where, model=Transport)
            found.transports[name] = KnownTransport(where, problem="has problems")
    return transports


def _add(
    entry: object,
    where: str,
    found: RuleFile,
    transports: Mapping[str, Transport | None],
    prefix: str,
) -> None:
    """Add an entry's rule, or its problems and a rule that refuses its names."""
    try:
        read = Translation.model_validate(entry, context=transports)
    except ValidationError as error:
        details = problems(error, where, model=Translation)
        found.problems += details
        refusing = _refusing(entry if isinstance(entry, dict) else {})
        if refusing is not None:
            why = f"{details[0].path}: {details[0].message}"
            found.rules.append(replace(refusing, where=where, prefix=prefix, problem=why))
        return
    rule = NameRule(
        where=where,
        prefix=prefix,
        name=read.name or "",
        pattern=NamePattern.of(read.regexp, read.url) if read.regexp is not None else None,
        url=read.url,
        digest=read.digest,
        transport=transports.get(read.transport or "") or PLAIN,
        pin=read.pin,
    )
    found.rules.append(rule)


def _refusing(entry: Mapping[str, Any]) -> NameRule | None:
    """Return a rule for the names of an invalid entry; None if the names cannot be read."""
    try:
        if isinstance(entry.get("name"), str):
            return NameRule("", name=check_plain_name(entry["name"]))
        if isinstance(entry.get("regexp"), str):
            return NameRule("", pattern=NamePattern.of(entry["regexp"], ""))
    except ValueError:
        pass
    return None
