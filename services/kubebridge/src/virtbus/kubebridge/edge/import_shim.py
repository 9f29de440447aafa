"""Import of kubernetes_asyncio without its models and APIs, which the bridge does not use.

A plain import of the login and the HTTP client also loads all models and APIs. These are 840
modules, which take 66 MB and two seconds.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

PACKAGE = "kubernetes_asyncio"


@contextmanager
def lean_import() -> Iterator[None]:
    """While the context is open, replace the packages that import all their modules by stubs.

    Modules that the caller imports through a stub are the library's own modules. At the end, the
    stubs are removed from `sys.modules`. If the library is already loaded, no stubs are used.
    """
    if PACKAGE in sys.modules:
        yield
        return
    found = importlib.util.find_spec(PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    package, client = ModuleType(PACKAGE), ModuleType(f"{PACKAGE}.client")
    package.__path__ = folders
    client.__path__ = [f"{folder}/client" for folder in folders]
    models = ModuleType(f"{PACKAGE}.client.models")
    package.__dict__["client"] = client
    client.__dict__["models"] = models
    stand_ins = {one.__name__: one for one in (package, client, models)}
    sys.modules.update(stand_ins)
    try:
        for module, name in (("configuration", "Configuration"), ("api_client", "ApiClient")):
            loaded = importlib.import_module(f"{PACKAGE}.client.{module}")
            client.__dict__[name] = getattr(loaded, name)
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)
