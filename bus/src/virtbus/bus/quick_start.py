"""Makes the start of a process faster. A process imports this module before all others.

Garbage collection is postponed during imports. Imported objects are permanent, so a collection
finds almost no garbage among them. Collections would take 45 ms of the 570 ms that a service needs
to start. A controller has 100,000 objects after its imports. `runtime.process.run` sets the
threshold of a running service.

pydantic finds no plugins, because virtbus has none. The search reads the metadata of every
installed distribution and imports `importlib.metadata`, which takes 20 ms.

pydantic's core schema has some 80 TypedDicts that serve as annotations only. Their annotations are
not compiled, which would take 12 ms.
"""

import gc
import sys
from types import ModuleType

import typing_extensions

OBJECTS_OF_AN_IMPORT = 200_000


class _Annotation(dict[str, object]):
    """Stands in for TypedDict, and accepts its argument `total`."""

    def __init_subclass__(cls, *, total: bool = True) -> None: ...


def _find_no_plugins() -> None:
    loader = ModuleType("pydantic.plugin._loader")
    loader.__dict__["get_plugins"] = tuple
    sys.modules.setdefault(loader.__name__, loader)


def _import_core_schema() -> None:
    names = typing_extensions.__dict__
    given, names["TypedDict"] = names["TypedDict"], _Annotation
    try:
        import pydantic_core.core_schema  # noqa: F401  with the stand-in
    finally:
        names["TypedDict"] = given


gc.set_threshold(OBJECTS_OF_AN_IMPORT)
_find_no_plugins()
_import_core_schema()
