"""An image with a signed URL: a guest boots from it, and no file contains the signature."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.e2e.platform import Stage, tiny_image

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

QUERY = "X-Amz-Signature=canary-of-a-signature"


class Bucket(BaseHTTPRequestHandler):
    """Serves its one file to requests with the signature."""

    def do_GET(self) -> None:
        body = tiny_image().read_bytes() if self.path.endswith(f"?{QUERY}") else b""
        self.send_response(200 if body else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Bucket) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/tiny.qcow2?{QUERY}"
        server.shutdown()
        thread.join()


def telling(folder: Path) -> list[str]:
    """Return the files below a folder that contain the signature, or have it in their name."""
    canary = QUERY.partition("=")[2]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [
        str(path) for path in files if canary in path.name or canary.encode() in path.read_bytes()
    ]


def test_a_guest_boots_from_a_signed_url_that_is_in_no_file_except_the_bus(
    stage: Stage, url: str
) -> None:
    with stage.apart({"VIRTBUS_IMAGE_ADDRESSES": '["127.0.0.0/8"]'}) as platform:
        view = platform.create("web", "--image", url, "--timeout", "90", wait="ready")
        assert "canary" not in str(view) + platform.cli("image", "list", "-o", "json")
        at_rest = telling(platform.base)
        assert all("/nats/" in path for path in at_rest), at_rest
        records = platform.base / "records"
        platform.cli("bus", "backup", "--without-secrets", str(records))
        assert b"canary" not in records.read_bytes()
        platform.cli("vm", "restart", "web")
        platform.delete("web")
