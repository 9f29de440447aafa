"""Reads the files of image names, `<config_dir>/images.d/*.toml`, for each pull."""

import logging
from pathlib import Path

from virtbus.imaged.core.image_aliases import AliasRule, ImageAliases, read_rules, rules_of
from virtbus.schemas.errors import Code, VirtbusError

MAX_FILE_BYTES = 1024**2
DEFAULT_NAMES = ("tiny", "debian")
"""The images of the folder `images/`, which `make setup` and `make debian-image` build."""

log = logging.getLogger(__name__)


class AliasFiles:
    """The sources of names, in order: files, settings (`extra`), and virtbus' own images."""

    def __init__(
        self, directory: Path, extra: dict[str, str], allowed_roots: tuple[str, ...]
    ) -> None:
        self._directory = directory
        self._extra = extra
        self._roots = allowed_roots

    def read(self) -> ImageAliases:
        """Return the current rules. Blocks on the disk.

        Raises:
            VirtbusError: 503 `image_names_invalid`, naming the file and the entry.
        """
        rules: list[AliasRule] = []
        try:
            for path in sorted(self._directory.glob("*.toml")):
                with path.open("rb") as file:
                    text = file.read(MAX_FILE_BYTES + 1)
                if len(text) > MAX_FILE_BYTES:
                    msg = f"{path}: larger than {MAX_FILE_BYTES} bytes"
                    raise ValueError(msg)  # noqa: TRY301  one translation for all
                rules += read_rules(text.decode(), str(path))
            rules += rules_of(sorted(self._extra.items()))
        except (ValueError, OSError) as error:
            raise VirtbusError(
                Code.UNAVAILABLE,
                "image_names_invalid",
                f"the image names cannot be read: {error}; fix that file, then it is retried",
            ) from error
        return ImageAliases((*rules, *rules_of(map(self._default, DEFAULT_NAMES))))

    def _default(self, name: str) -> tuple[str, str]:
        paths = [Path(root) / f"{name}.qcow2" for root in self._roots]
        found = next((path for path in paths if path.exists()), paths[0])
        return name, f"file://{found}"
