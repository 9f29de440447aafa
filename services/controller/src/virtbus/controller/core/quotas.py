"""Limits the number of objects of a kind, such as volumes."""

from typing import NamedTuple, Protocol


class Counted(Protocol):
    """The cached objects of a kind."""

    def count(self, namespace: str | None = None) -> int:
        """Return the number of objects of a namespace; None: of all namespaces."""


class Quota(NamedTuple):
    """The largest number of objects of a namespace, and of all namespaces."""

    per_namespace: int
    in_all: int

    def full(
        self,
        objects: Counted,
        namespace: str,
        what: str,
        whole: str = "the fleet",
        one: str | None = None,
        more: int = 1,
    ) -> str:
        """Return why `more` objects would exceed the quota; empty if they would not.

        `what`, `whole` and `one` are words in the text: for the objects, for all namespaces
        together, and for this namespace.
        """
        for count, most, where in (
            (objects.count(namespace), self.per_namespace, one or f"namespace {namespace}"),
            (objects.count(), self.in_all, whole),
        ):
            if count + more > most:
                return f"{where} has {count} {what} of {most} at most"
        return ""
