"""States kubebridge's validation rules in CEL, so that API servers check them (ADR 0025).

Each `Cel` below states one rule of kubebridge in CEL, and has the message of that rule. A CEL
expression cannot name the index of a list item, so a rule about several items reports the list.
https://kubernetes.io/docs/reference/using-api/cel/

An API server evaluates all rules at each write of an object, including writes of its status. For
each step of a path, the server copies all that the schema declares at this step. Rules that match
disks with volumes, or interfaces with networks, cost 0.7 ms each. So only the webhooks check these
rules (ADR 0025).
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from virtbus.kubebridge.core.objects.status_errors import Reason
from virtbus.kubebridge.core.validation.rules import (
    CROWD_RULES,
    RUN_RULES,
    SPEC_RULES,
    VM_RULES,
    Rule,
)
from virtbus.kubebridge.core.validation.rules_checks import BINDINGS, DISKS, NICS, RESERVED_MAC

BY_SCHEMA = frozenset(
    {(1, "template"), (47, "volumes[]"), *((rule.number, rule.field) for rule in CROWD_RULES)}
)
"""Rules that schema keywords check: `required`, `maxItems` and `maxProperties`."""
NAME_LENGTH = 63
NAMES = ("volumes[]", "networks[]", "domain.devices.disks[]", "domain.devices.interfaces[]")
"""Lists whose names the rules compare. An API server estimates the cost of a comparison from the
maximum length of a name."""
SEVERAL = "'none, or more than one'"


class Cel(NamedTuple):
    """A rule on `self`, the value at the path `at`. A violation is reported at `path` below `at`.

    `shown` has a value for each `{}` in the rule's message: quoted text, or a CEL expression. The
    API server limits the estimated cost of an expression. So an expression cannot search for the
    faulty item.
    """

    number: int
    field: str
    at: str
    rule: str
    path: str = ""
    shown: tuple[str, ...] = ()

    def validation(self) -> dict[str, Any]:
        """Return an item of `x-kubernetes-validations`."""
        rule = _RULES[self.number, self.field]
        plain = [one[1:-1] if one.startswith("'") else "…" for one in self.shown]
        made = {"rule": self.rule, "message": rule.message.format(*plain)}
        if "…" in plain:
            made["messageExpression"] = _filled(rule.message, self.shown)
        if self.path:
            made["fieldPath"] = self.path
        # with CEL's reason Duplicate, the API server would drop the message
        told = Reason.REQUIRED if rule.reason is Reason.REQUIRED else Reason.INVALID
        return {**made, "reason": str(told)}


_RULES: Mapping[tuple[int, str], Rule] = {
    (rule.number, rule.field): rule for rule in (*VM_RULES, *CROWD_RULES, *RUN_RULES, *SPEC_RULES)
}


def _filled(message: str, shown: Iterable[str]) -> str:
    """Return a CEL expression that builds the message with the values of `shown`."""
    values = iter(shown)
    texts = message.replace("{{", "\0").replace("}}", "\1").split("{}")
    quoted = [repr(one.replace("\0", "{").replace("\1", "}")) for one in texts]
    parts = [quoted[0]]
    for text in quoted[1:]:
        parts += [f"({next(values)})", text]
    return " + ".join(part for part in parts if part != "''")


def _one_of(names: Iterable[str]) -> str:
    return f"[{', '.join(f'has(self.{name})' for name in names)}].exists_one(x, x)"


def _both(holder: str, left: str, right: str, key: str, limits: str) -> str:
    """Return a CEL rule: if both quantities are given, `left` is not greater than `right`."""
    there = f"{holder} && has({limits}) && '{key}' in {limits}"
    return f"!({there}) || quantity(string({left})).compareTo(quantity(string({right}))) <= 0"


ONCE = "self.size() < 2 || self.all(a, self.exists_one(b, b.name == a.name))"
_RESOURCES = "domain.resources"


def _over_limit(number: int, key: str) -> Cel:
    asked, limits = f"self.requests['{key}']", "self.limits"
    there = f"has(self.requests) && '{key}' in self.requests"
    rule = _both(there, asked, f"{limits}['{key}']", key, limits)
    field = f"{_RESOURCES}.requests.{key}"
    return Cel(number, field, _RESOURCES, rule, f".requests.{key}", (f"string({asked})",))


def _seed(kind: str) -> tuple[Cel, ...]:
    """Return the rules of cloud-init's data in a volume."""
    users = ("userData", "userDataBase64", "secretRef")
    nets = ("networkData", "networkDataBase64", "networkDataSecretRef")

    def given(name: str) -> str:
        return f"has(self.{name})" + ("" if name.endswith("Ref") else f" && self.{name} != ''")

    def count(names: tuple[str, ...]) -> str:
        return f"[{', '.join(given(name) for name in names)}].filter(x, x).size()"

    def long(plain: str, encoded: str) -> str:
        return (
            f"has(self.{plain}) && size(self.{plain}) > 2048"
            f" || has(self.{encoded}) && size(self.{encoded}) > 2731"
        )

    field = f"volumes[].{kind}"
    twice = f"{count(users)} > 1 ? 'userdata' : 'networkdata'"
    rows = (
        Cel(64, field, field, f"{count(users)} <= 1 && {count(nets)} <= 1", "", (twice,)),
        Cel(65, field, field, f"{count(users)} + {count(nets)} > 0"),
    )
    too_long = long(*users[:2])
    return (
        *rows,
        Cel(
            66,
            field,
            field,
            f"!({too_long} || {long(*nets[:2])})",
            "",
            (
                f"{too_long} ? 'userdata' : 'networkdata'",
                f"{too_long} ? 'secretRef' : 'networkDataSecretRef'",
            ),
        ),
    )


def _list(number: int, path: str) -> Cel:
    return Cel(number, f"{path}[].name", path, ONCE, "", ("'one of the names'",))


_SEED_OF = {"noCloud": "cloudInitNoCloud", "configDrive": "cloudInitConfigDrive"}
_WAY = "c.sshPublicKey.propagationMethod"


def _unseeded(way: str) -> str:
    """Return a CEL condition: credential `c` needs a seed, and no volume has one."""
    seed = f"has(self.volumes) && self.volumes.exists(v, has(v.{_SEED_OF[way]}))"
    return f"has(c.sshPublicKey) && has({_WAY}.{way}) && !({seed})"


_NO_CLOUD = f"self.accessCredentials.exists(c, {_unseeded('noCloud')})"
VM_ROWS = (
    Cel(2, "running", "", "!(has(self.running) && has(self.runStrategy))", ".running"),
    Cel(3, "running", "", "has(self.running) || has(self.runStrategy)", ".running"),
)
"""Rules on a VM's `spec`."""
RUN_ROWS = (
    Cel(
        17,
        "domain.memory.guest",
        "domain",
        "has(self.memory) && has(self.memory.guest) || has(self.resources) &&"
        " (has(self.resources.requests) && 'memory' in self.resources.requests"
        " || has(self.resources.limits) && 'memory' in self.resources.limits)",
        ".memory.guest",
    ),
)
"""Rules on a VMI's `spec` that a VM's template does not have to meet."""
SPEC_ROWS = (
    _over_limit(20, "memory"),
    _over_limit(26, "cpu"),
    _list(46, "volumes"),
    _list(51, DISKS),
    Cel(
        52,
        "domain.devices.disks[]",
        "domain.devices.disks[]",
        "[has(self.disk), has(self.cdrom), has(self.lun)].filter(x, x).size() <= 1",
        "",
        ("'several'",),
    ),
    Cel(
        55,
        "domain.devices.disks[].cdrom.bus",
        "domain.devices.disks[].cdrom",
        "!has(self.bus) || self.bus != 'virtio'",
        ".bus",
        ("self.bus",),
    ),
    Cel(
        56,
        "domain.devices.disks[].disk.readonly",
        "domain.devices.disks[].disk",
        "!(has(self.bus) && self.bus == 'sata' && has(self.readonly) && self.readonly)",
        ".readonly",
    ),
    Cel(
        58,
        "domain.devices.disks[].bootOrder",
        "domain.devices.disks",
        "self.all(a, !has(a.bootOrder) || a.bootOrder >= 1"
        " && self.exists_one(b, has(b.bootOrder) && b.bootOrder == a.bootOrder))",
        "",
        ("'a bootOrder is not right'",),
    ),
    *_seed("cloudInitNoCloud"),
    *_seed("cloudInitConfigDrive"),
    Cel(
        70,
        "volumes[].configMap.name",
        "volumes[].configMap",
        "has(self.name) && self.name != ''",
        ".name",
    ),
    Cel(
        70,
        "volumes[].secret.secretName",
        "volumes[].secret",
        "has(self.secretName) && self.secretName != ''",
        ".secretName",
    ),
    Cel(
        70,
        "volumes[].sysprep",
        "volumes[].sysprep",
        "(has(self.configMap) && has(self.configMap.name) && self.configMap.name != '')"
        " != (has(self.secret) && has(self.secret.name) && self.secret.name != '')",
        "",
        ("'none, or both'",),
    ),
    _list(74, "networks"),
    _list(75, NICS),
    Cel(
        76,
        "domain.devices.interfaces[]",
        "domain.devices.interfaces[]",
        _one_of(BINDINGS),
        "",
        ("self.name",),
    ),
    Cel(
        79,
        "domain.devices.interfaces[].macAddress",
        "domain.devices.interfaces[]",
        f"!(has(self.masquerade) && has(self.macAddress) && self.macAddress == '{RESERVED_MAC}')",
        ".macAddress",
    ),
    Cel(81, "networks[].pod", "networks", "self.filter(n, has(n.pod)).size() <= 1"),
    Cel(
        81,
        "networks[]",
        "networks[]",
        _one_of(("pod", "multus", "resourceClaim")),
        "",
        (SEVERAL,),
    ),
    Cel(
        95,
        "accessCredentials[].sshPublicKey.propagationMethod",
        "",
        "!has(self.accessCredentials) || !self.accessCredentials.exists(c,"
        f" {_unseeded('noCloud')} || {_unseeded('configDrive')})",
        ".accessCredentials",
        (
            f"{_NO_CLOUD} ? 'cloudInitNoCloud' : 'cloudInitConfigDrive'",
            f"{_NO_CLOUD} ? 'noCloud' : 'configDrive'",
        ),
    ),
    Cel(
        95,
        "accessCredentials[].sshPublicKey",
        "accessCredentials[].sshPublicKey.propagationMethod",
        _one_of(("configDrive", "noCloud", "qemuGuestAgent")),
        "",
        (SEVERAL,),
    ),
)
"""Rules on a VMI's `spec`, and on a VM's `spec.template.spec`."""


def keywords(rows: tuple[Cel, ...], prefix: str) -> dict[str, dict[str, Any]]:
    """Return the keywords that the rules add to the schema of each path."""
    added: dict[str, dict[str, Any]] = {}
    for row in rows:
        path = f"{prefix}.{row.at}".rstrip(".")
        held = added.setdefault(path, {"x-kubernetes-validations": []})
        held["x-kubernetes-validations"].append(row.validation())
    return added


def of_spec(prefix: str) -> dict[str, dict[str, Any]]:
    """Return the keywords of all rules on a VMI's spec, which is at `prefix`."""
    lengths = {f"{prefix}.{path}.name": {"maxLength": NAME_LENGTH} for path in NAMES}
    # A volume has a name and one source. A CEL rule would check 16 sources at each status write.
    one_source = {f"{prefix}.volumes[]": {"minProperties": 2, "maxProperties": 2}}
    return keywords(SPEC_ROWS, prefix) | lengths | one_source
