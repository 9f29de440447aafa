"""Print a service's settings as TOML, all commented out: `defaults.py controller`.

Run with the interpreter of the environment in which virtbus is installed.
"""

import importlib
import json
import sys
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from virtbus.bus.runtime.settings import ServiceSettings


def settings_class(service: str) -> type[ServiceSettings]:
    """The settings that `virtbus-<service>` loads."""
    module = "bus_server" if service == "nats" else f"virtbus.{service}.settings"
    found: type[ServiceSettings] = importlib.import_module(module).Settings
    return found


def lines(settings: type[ServiceSettings]) -> Iterator[str]:
    """The file, line by line: what a knob does, then its default."""
    name = f"virtbus-{settings.service}"
    yield f"# Settings of {name}. Flags and VIRTBUS_* variables come before this file."
    yield f"# Look at what is in force with: {name} --check-config"
    for field, info in settings.model_fields.items():
        yield ""
        yield f"# {info.description}"
        yield f"# {field} = {_toml(info)}"


def _toml(info: FieldInfo) -> str:
    # Strings, numbers, booleans, lists and the empty table are the same in JSON.
    value = info.get_default(call_default_factory=True)
    plain = isinstance(value, bool | int | float | str | list | dict)
    return json.dumps(value if plain else "" if value is None else str(value))


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in lines(settings_class(sys.argv[1])))
