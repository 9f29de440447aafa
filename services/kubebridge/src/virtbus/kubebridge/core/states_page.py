"""docs/reference/kubevirt-states.md: phases, run strategies and verbs, from their tables."""

from virtbus.kubebridge.core.page import table
from virtbus.kubebridge.core.phases import PHASE_OF
from virtbus.kubebridge.core.run_strategies import TABLE, Asked, Do, Has
from virtbus.kubebridge.core.subresources import GROUP, VERBS
from virtbus.kubebridge.core.vm_status import PRINTABLE
from virtbus.schemas.vm import RunStrategy


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            "# KubeVirt's states and verbs",
            "",
            "## The phase of a VirtualMachineInstance",
            "",
            "By the state of its VM of virtbus. `Succeeded` and `Failed` are for good, and no phase"
            " leads back to an earlier one; a start that failed is no end: it is tried again, and"
            " the condition `Synchronized` says why it failed.",
            "",
            *table(
                ("State of the VM", "Phase"),
                ((str(state), str(phase or "as before")) for state, phase in PHASE_OF.items()),
            ),
            "## printableStatus of a VirtualMachine",
            "",
            "The first that holds, in this order: "
            + ", ".join(f"`{name}`" for name, _ in PRINTABLE)
            + "; `Unknown` where none does.",
            "",
            "## Run strategies",
            "",
            "By the strategy, its VirtualMachineInstance, and the first request in"
            " `status.stateChangeRequests` that is not met yet. What is not here: nothing is done.",
            "",
            *table(("Strategy", "Instance", "Asked", "What is done"), _strategies()),
            "## Verbs",
            "",
            f"Of `{GROUP}`. A verb to come answers 501 with what is said here.",
            "",
            *table(
                ("Verb", "Method", "Answer"),
                (
                    (
                        f"`{verb.resource}/{verb.name}`",
                        verb.method,
                        f"501: {verb.missing}" if verb.missing else str(verb.success),
                    )
                    for verb in VERBS
                ),
            ),
        ]
    )


def _strategies() -> list[tuple[str, ...]]:
    return [
        (str(strategy), str(has), str(asked), str(do))
        for strategy in RunStrategy
        for has in Has
        for asked in Asked
        if (do := TABLE.get((strategy, has, asked), Do.NOTHING)) is not Do.NOTHING
    ]
