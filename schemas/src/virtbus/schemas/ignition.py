"""The configuration that Ignition reads at the first boot of Fedora CoreOS or Flatcar."""

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, StringConstraints

from virtbus.schemas.model import StrictModel

CONFIG_CHARACTERS = 512 * 1024
_VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}(-[A-Za-z0-9.-]{1,32})?")


def check_config(text: str) -> str:
    """Return `text` if it is JSON that names a version of Ignition's format, or raise ValueError.

    The rest of the configuration is not checked.
    """
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        msg = "must be JSON; `butane FILE.bu` makes it from a Butane file"
        raise ValueError(msg) from None
    header = value.get("ignition") if isinstance(value, dict) else None
    version = header.get("version") if isinstance(header, dict) else None
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        msg = 'must be a JSON object with the version, as in {"ignition": {"version": "3.4.0"}}'
        raise ValueError(msg)
    return text


IgnitionConfig = Annotated[
    str, StringConstraints(max_length=CONFIG_CHARACTERS), AfterValidator(check_config)
]


class Ignition(StrictModel):
    """Ignition's configuration, as the JSON text that the guest gets.

    The configuration is a secret input: a record has this object without `config`.
    """

    config: IgnitionConfig | None = None

    def without_secrets(self) -> "Ignition":
        return Ignition()
