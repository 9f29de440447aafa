"""Loads a service's settings: default < /etc/virtbus/<service>.toml < VIRTBUS_* < flags.

Each service has a subclass of `ServiceSettings`. A field's description states unit and reason.
`--help` and docs/reference/settings.md are generated from the fields.
"""

import socket
import sys
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.schemas.ids import Id, is_id
from virtbus.schemas.wire import problems

CONFIG_DIR = Path("/etc/virtbus")
EXIT_USAGE = 2
NODE_FILE = "node"


def node_slug(hostname: str) -> str:
    """Return a node id from a hostname's first label. Invalid characters become '-'.

    If the result is no valid id, return "node".
    """
    label = hostname.split(".", maxsplit=1)[0].lower()
    slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in label).strip("-")[:63]
    return slug if is_id(slug) else "node"


class ServiceSettings(BaseSettings):
    """The settings that all services share."""

    service: ClassVar[str] = "service"
    model_config = SettingsConfigDict(
        env_prefix="VIRTBUS_",
        frozen=True,
        extra="ignore",
        cli_hide_none_type=True,
        defer_build=True,
    )

    node: Id = Field(
        "",
        validate_default=False,
        description=(
            "this host's node id; empty: the one saved in state_dir, otherwise the hostname's slug"
        ),
    )
    server: str = Field("", description="NATS URL; empty: as written by `virtbus up` in run_dir")
    creds: Path | None = Field(None, description="file with user and password of this service")
    state_dir: Path = Field(Path("/var/lib/virtbus"), description="files that survive a reboot")
    run_dir: Path = Field(Path("/run/virtbus"), description="sockets and files of this boot")
    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="log level")
    log_format: str = Field(
        "auto",
        pattern="^(auto|json|text)$",
        description="auto: text on a terminal, otherwise JSON lines",
    )
    otlp_endpoint: str = Field("", description="OTLP/HTTP endpoint for traces; empty: none")

    @model_validator(mode="before")
    @classmethod
    def _settle_node(cls, data: Any) -> Any:
        """Set a missing node id. A saved id outlives a change of the hostname."""
        if isinstance(data, dict) and not data.get("node"):
            state_dir = data.get("state_dir") or cls.model_fields["state_dir"].default
            return {**data, "node": node_id(Path(state_dir))}
        return data

    @property
    def bus_user(self) -> str:
        """Return the service's user on the bus: `node-<id>` or, for example, `imaged-<id>`."""
        return f"{'node' if self.service == 'nodeagent' else self.service}-{self.node}"

    def bus(self) -> BusSettings:
        """Return the settings of the connection to the bus.

        The default of `creds` is the credentials file that `virtbus up` writes into `run_dir`.
        """
        creds = self.creds or self.run_dir / f"{self.bus_user}.creds"
        return BusSettings(url=self.server, creds=creds)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources by priority: flags (init), environment, TOML file."""
        del dotenv_settings, file_secret_settings
        toml = TomlConfigSettingsSource(settings_cls, CONFIG_DIR / f"{cls.service}.toml")
        return (init_settings, env_settings, toml)


def node_id(state_dir: Path) -> str:
    """Return the node id in the state folder, or without a saved id, the hostname's `node_slug`."""
    try:
        kept = (state_dir / NODE_FILE).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        kept = ""
    return kept if is_id(kept) else node_slug(socket.gethostname())


S = TypeVar("S", bound=ServiceSettings)


def _flags(cls: type[ServiceSettings], arguments: list[str]) -> dict[str, Any]:
    """Return the settings in the flags. Building the parser takes 6 ms."""
    return CliSettingsSource[Any](
        cls,
        cli_prog_name=f"virtbus-{cls.service}",
        cli_kebab_case=True,
        cli_parse_args=arguments,
        cli_exit_on_error=True,
    )()


def load(cls: type[S], argv: list[str] | None = None) -> S:
    """Return the settings of this process.

    For invalid settings, print each problem with its field and exit with 2. For `--check-config`,
    print the effective settings and exit with 0.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    check = "--check-config" in arguments
    if check:
        arguments.remove("--check-config")
    try:
        settings = cls(**(_flags(cls, arguments) if arguments else {}))
    except ValidationError as error:
        for detail in problems(error):
            sys.stderr.write(f"error: {cls.service}: {detail.path}: {detail.message}\n")
        raise SystemExit(EXIT_USAGE) from None
    except (SettingsError, ValueError) as error:
        sys.stderr.write(f"error: {cls.service}: {error}\n")
        raise SystemExit(EXIT_USAGE) from None
    if check:
        for name, value in settings.model_dump(mode="json").items():
            sys.stdout.write(f"{name} = {value!r}\n")
        raise SystemExit(0)
    return settings
