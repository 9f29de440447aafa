"""Limits the number of objects of a kind, such as volumes."""

from typing import NamedTuple, Protocol


class Counted(Protocol):
    """A cache that counts its objects of one kind."""

    def count(self, namespace: str | None = None) -> int:
        """Return the number of objects of a namespace; None: of all namespaces."""


class Quota(NamedTuple):
    """The largest number of objects in a namespace, and in all namespaces together."""

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
        """Return why `more` objects would exceed the quota; empty if they fit.

        The text uses `what` for the objects, `whole` for all namespaces together, and `one` for
        this namespace.
        """
        for count, most, where in (
            (objects.count(namespace), self.per_namespace, one or f"namespace {namespace}"),
            (objects.count(), self.in_all, whole),
        ):
            if count + more > most:
                return f"{where} has {count} {what} of {most} at most"
        return ""
