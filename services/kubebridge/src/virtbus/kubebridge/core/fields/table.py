"""Looks up KubeVirt's fields in tables, by path."""

from virtbus.kubebridge.core.fields import devices, machine, placement, vm, volumes
from virtbus.kubebridge.core.fields.row import Field


class Table:
    """Rows by path, in their order."""

    def __init__(self, rows: tuple[Field, ...]) -> None:
        self.rows = rows
        self.by_path = {row.path: row for row in rows}
        self.place = {row.path: place for place, row in enumerate(rows)}
        """Position of each row. If several rows have the same `to`, the earliest row counts."""
        if len(self.place) != len(rows):
            msg = "a field has two rows"
            raise ValueError(msg)

    def beside(self, path: str) -> tuple[str, ...]:
        parent = path.rpartition(".")[0]
        return tuple(
            name.removesuffix("[]")
            for above, _, name in (row.path.rpartition(".") for row in self.rows)
            if above == parent and name
        )


VMI = Table((*placement.ALL, *machine.MACHINE, *devices.ALL, *volumes.ALL))
"""Fields below a VMI's `spec`, or below a VM's `spec.template.spec`."""
VM = Table(vm.VM)
"""Fields below a VM's `spec`."""
ANNOTATIONS = {row.path: row for row in vm.ANNOTATIONS}
