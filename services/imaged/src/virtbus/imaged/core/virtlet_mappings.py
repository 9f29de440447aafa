"""Reads Virtlet's translations of image names: YAML files in `images.d`.

A file has a configuration as in Virtlet's folder of translations, or an object that `kubectl get -o
yaml` writes. The object is a VirtletImageMapping, the ConfigMap `virtlet-image-translations`, or a
list of such objects.

If two rules had the same name, Virtlet used a random rule. In virtbus, rules of a
VirtletImageMapping precede rules of a file, and two rules for one name in the same layer are a
problem (`image_aliases`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from virtbus.imaged.core.name_rules import (
    DEFAULT_TRANSPORT,
    MAX_RULES,
    Layer,
    NameRule,
    RuleFile,
    rules_from,
)
from virtbus.schemas.errors import Detail

MAX_VALUES = 8 * MAX_RULES
_Config = tuple[str, Any, Layer]
"""The file and entry of a configuration, the configuration itself, and its layer."""
_CONFIG = frozenset({"prefix", "translations", "transports"})
_RULE = ("name", "regexp", "url", "transport")
VIRTLET_REDIRECTS = 9
"""Number of redirects that Virtlet follows by default, as Go's HTTP client does."""
_TRANSPORT = frozenset({"timeout", "maxRedirects", "proxy", "tls"})
_TIMEOUT_MS = range(10, 7 * 86_400_000 + 1)
_REFUSED = {
    "tls": "has certificates in the file itself, or `insecure`; write the transport in a TOML file "
    "with ca_file, client_certificate_file and client_key_file",
    "timeout": "must be a whole number of milliseconds, from 10 to 7 days; 0 stands for the "
    "default",
}
"""The reasons why values of these fields of a transport are refused."""


def read_mappings(text: str, origin: str) -> RuleFile:
    """Return the rules and problems of a YAML text; `origin` is the file's name."""
    # Imported here because it takes 0.6 MiB of memory, and few hosts need it.
    from virtbus.schemas.yaml_text import YamlError, read_yaml

    try:
        value = read_yaml(text, max_values=MAX_VALUES)
    except YamlError as error:
        return RuleFile(problems=[Detail(path=origin, message=f"is no YAML: {error}")])
    whole = RuleFile()
    for where, config, layer in _configs(value, origin, whole):
        found = _read(config, where)
        whole.rules += [_as_in_virtlet(rule, layer) for rule in found.rules]
        whole.problems += found.problems
        whole.transports |= found.transports
    return whole


def _as_in_virtlet(rule: NameRule, layer: Layer) -> NameRule:
    pattern = rule.pattern.of_parts() if rule.pattern is not None else None
    return replace(rule, layer=layer, pattern=pattern)


def _configs(value: Any, origin: str, found: RuleFile) -> Iterator[_Config]:
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind is None:
        yield origin, value, Layer.FILE
    elif kind == "VirtletImageMapping":
        yield origin, value.get("spec"), Layer.MAPPING
    elif kind == "ConfigMap":
        yield from _of_config_map(value.get("data"), origin, found)
    elif str(kind).endswith("List"):
        yield from _of_list(value.get("items"), origin, found)
    else:
        message = f"has the kind {kind!r:.80}; only VirtletImageMapping and ConfigMap are read"
        found.problems.append(Detail(path=origin, message=message))


def _of_list(items: Any, origin: str, found: RuleFile) -> Iterator[_Config]:
    for number, item in enumerate(items if isinstance(items, list) else []):
        where = f"{origin}: items[{number}]"
        if not isinstance(item, dict) or str(item.get("kind", "List")).endswith("List"):
            message = "must be a VirtletImageMapping or a ConfigMap"
            found.problems.append(Detail(path=where, message=message))
        else:
            yield from _configs(item, where, found)


def _of_config_map(data: Any, origin: str, found: RuleFile) -> Iterator[_Config]:
    from virtbus.schemas.yaml_text import YamlError, read_yaml

    texts = data if isinstance(data, dict) else {}
    for name in sorted(texts, key=str):
        where = f"{origin}: data.{name}"
        try:
            yield where, read_yaml(str(texts[name]), max_values=MAX_VALUES), Layer.FILE
        except YamlError as error:
            found.problems.append(Detail(path=where, message=f"is no YAML: {error}"))


def _read(config: Any, where: str) -> RuleFile:
    if not isinstance(config, dict):
        message = "must have prefix, translations and transports, as in Virtlet"
        return RuleFile(problems=[Detail(path=where, message=message)])
    problems = [
        Detail(path=f"{where}: {key}", message="unknown field of Virtlet's translations")
        for key in sorted(map(str, config.keys() - _CONFIG))[:10]
    ]
    transports = config.get("transports") or {}
    named = {}
    if isinstance(transports, dict):
        named = {_name(name): _transport(one) for name, one in transports.items()}
    problems += [
        Detail(path=f"{where}: transports.{name}.{key}", message=why)
        for name, one in named.items()
        for key, why in _REFUSED.items()
        if isinstance(one, dict) and key in one
    ]
    document = {
        "prefix": config.get("prefix") or "",
        "image": _rules(config.get("translations") or []),
        "transports": named if isinstance(transports, dict) else transports,
    }
    found = rules_from(document, where)
    found.problems[:0] = problems
    return found


def _rules(entries: Any) -> Any:
    """Return Virtlet's entries with the fields of a TOML file's entries.

    A value of another type is returned unchanged, so that `rules_from` refuses it.
    """
    if not isinstance(entries, list):
        return entries
    return [
        {
            **{key: one for key, one in entry.items() if key not in _RULE},
            **{key: entry[key] for key in _RULE if entry.get(key)},
            **({"transport": _name(entry["transport"])} if entry.get("transport") else {}),
        }
        if isinstance(entry, dict)
        else entry
        for entry in entries
    ]


def _name(name: Any) -> str:
    """Return the name of a transport. Virtlet's default transport has an empty name."""
    return str(name) or DEFAULT_TRANSPORT


def _transport(fields: Any) -> Any:
    """Return a transport of Virtlet with the fields of `Transport`.

    Unknown fields and unusable values stay in the result, so that later checks refuse them.
    """
    if not isinstance(fields, dict):
        return fields
    made = {str(key): one for key, one in fields.items() if key not in _TRANSPORT}
    timeout_ms, tls = fields.get("timeout"), fields.get("tls")
    if isinstance(timeout_ms, int) and timeout_ms in _TIMEOUT_MS:
        made["timeout_s"] = timeout_ms / 1000
    elif timeout_ms is not None and timeout_ms != 0:
        made["timeout"] = timeout_ms
    redirects = fields.get("maxRedirects")
    made["max_redirects"] = VIRTLET_REDIRECTS if redirects is None else redirects
    if fields.get("proxy"):
        made["proxy"] = fields["proxy"]
    return made | _tls(tls) if tls else made


def _tls(tls: Any) -> dict[str, Any]:
    if not isinstance(tls, dict) or tls.get("certificates") or tls.get("insecure"):
        return {"tls": tls}
    return {"server_name": tls["serverName"]} if tls.get("serverName") else {}
