"""Declares the fields of placement, termination and naming: the rest of the VMI's spec.

Node affinity with one term and single values becomes a node selector.
"""

from collections.abc import Iterator

from virtbus.kubebridge.core.fields.row import FieldType, below, ignored, mapped, refused
from virtbus.kubebridge.core.objects.unstructured import Object, at, items, part, text
from virtbus.schemas.vm import EvictionStrategy

EVERY_NODE = {
    "kubevirt.io/schedulable": "true",
    "kubernetes.io/arch": "amd64",
    "kubernetes.io/os": "linux",
}
"""Labels of Kubernetes nodes that every schedulable virtbus node implicitly has."""


NAMES = "a guest gets the DNS of its network"
PROBES = "probes are not supported"

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
TERMS = f"affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms"
EMPTIEST = "only a preference; virtbus takes the emptiest node"
OTHERS = "placement considers nodes, not the VMs that run there"
AFFINITY = (
    below("affinity"),
    below("affinity.nodeAffinity"),
    below(f"affinity.nodeAffinity.{REQUIRED}", "the same as nodeSelector"),
    below(f"{TERMS}[]"),
    below(f"{TERMS}[].matchExpressions[]"),
    mapped(f"{TERMS}[].matchExpressions[].key", FieldType.TEXT, "", "a label of virtbus nodes"),
    mapped(
        f"{TERMS}[].matchExpressions[].operator",
        FieldType.TEXT,
        values=("In",),
        instead="write In with one value, or label the nodes and use nodeSelector",
    ),
    mapped(f"{TERMS}[].matchExpressions[].values", FieldType.ANY, "", "one value"),
    refused(
        f"{TERMS}[].matchFields[]",
        "nodes are selected by labels only",
        "give the nodes a label, and use nodeSelector",
    ),
    ignored(f"affinity.nodeAffinity.{PREFERRED}[]", EMPTIEST),
    *(
        row
        for other in ("podAffinity", "podAntiAffinity")
        for row in (
            below(f"affinity.{other}"),
            refused(f"affinity.{other}.{REQUIRED}[]", OTHERS, "use nodeSelector"),
            ignored(f"affinity.{other}.{PREFERRED}[]", EMPTIEST),
        )
    ),
)

PLACEMENT = (
    mapped(
        "architecture",
        FieldType.TEXT,
        "",
        "the architecture of the nodes",
        values=("amd64",),
        instead="write amd64",
    ),
    mapped(
        "nodeSelector",
        FieldType.MAP,
        "spec.node_selector",
        "labels of virtbus nodes; every node implicitly has "
        + ", ".join(f"`{k}={v}`" for k, v in EVERY_NODE.items()),
        make=lambda value: {k: want for k, want in value.items() if EVERY_NODE.get(k) != want},
    ),
    *AFFINITY,
    refused(
        "topologySpreadConstraints[]",
        "placement prefers the emptiest node and does not count VMs by label",
        "use nodeSelector; several nodes fill evenly by themselves",
    ),
    ignored("tolerations[]", "virtbus nodes have no taints"),
    mapped(
        "schedulerName",
        FieldType.TEXT,
        "",
        values=("default-scheduler",),
        instead="leave it out: virtbus places VMs itself",
    ),
    ignored("priorityClassName", "virtbus does not preempt VMs"),
    ignored("serviceAccountName", "it is the identity of a pod, and there is no pod"),
    refused("resourceClaims[]", "no device is passed through", "leave it out"),
    mapped(
        "evictionStrategy",
        FieldType.TEXT,
        "spec.eviction_strategy",
        values=tuple(str(one) for one in EvictionStrategy),
        instead="write " + ", ".join(EvictionStrategy),
    ),
)

LIFE = (
    mapped(
        "startStrategy",
        FieldType.TEXT,
        "spec.start_strategy",
        values=("Paused",),
        instead="write Paused, or leave it out",
    ),
    mapped(
        "terminationGracePeriodSeconds",
        FieldType.NUMBER,
        "spec.termination_grace_s",
        "seconds that a guest has for its shutdown; 0 stops it at once",
    ),
    refused("livenessProbe", PROBES, "leave it out; watch the guest from outside"),
    refused("readinessProbe", PROBES, "leave it out; a VM is Ready once its guest runs"),
)

NAMING = (
    mapped(
        "hostname",
        FieldType.TEXT,
        "",
        "the host name in the seed; the default is the VMI's name",
        pattern=r"(?!-)[a-z0-9-]{1,63}(?<!-)",
        instead="write 1-63 characters of a-z, 0-9 and '-'",
    ),
    refused("subdomain", NAMES, "leave it out"),
    mapped(
        "dnsPolicy",
        FieldType.TEXT,
        "",
        "DHCP gives the network's name servers",
        values=("Default",),
        instead="leave it out, and name servers in cloud-init's network data",
    ),
    refused("dnsConfig", NAMES, "set name servers in cloud-init's network data"),
)

ALL = (below(""), *PLACEMENT, *LIFE, *NAMING)


# --- node affinity -----------------------------------------------------------------------------
Expression = tuple[str, Object]
"""The path of a match expression below the spec, and the expression."""


def terms(spec: Object) -> list[Object]:
    """Return the node selector terms. A node must match one of them."""
    return items(spec, *TERMS.split("."))


def expressions(spec: Object) -> Iterator[Expression]:
    """Yield the expressions of the first term, all of which a node must match.

    A rule refuses a second term.
    """
    for index, one in enumerate(items(next(iter(terms(spec)), {}), "matchExpressions")):
        yield f"{TERMS}[0].matchExpressions[{index}]", one


def value_of(expression: Object) -> str | None:
    """Return the only value of an expression, or None."""
    values = at(expression, "values")
    if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return None


def selector(spec: Object) -> dict[str, str]:
    """Return the labels that the affinity requires in addition to nodeSelector."""
    asked = {
        text(one, "key"): value
        for _, one in expressions(spec)
        if (value := value_of(one)) is not None
    }
    selected = {**EVERY_NODE, **part(spec, "nodeSelector")}
    return {key: value for key, value in asked.items() if selected.get(key) != value}
