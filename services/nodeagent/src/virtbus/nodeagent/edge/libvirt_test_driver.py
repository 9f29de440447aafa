"""XML files that describe hosts to libvirt's test driver."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

EMPTY = "<node><cpu><mhz>2000</mhz><model>x86_64</model></cpu></node>\n"


def test_host(path: Path) -> str:
    """Return the URI of libvirt's test driver with an empty host."""
    path.write_text(EMPTY)
    return f"test://{path.absolute()}"


@contextmanager
def scratch() -> Iterator[Path]:
    """Provide a folder for such files while the context is open."""
    with TemporaryDirectory(prefix="virtbus-simulate-") as folder:
        yield Path(folder)
