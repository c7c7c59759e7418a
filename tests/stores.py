"""An S3 server of this machine for tests: moto's, which keeps its objects in this process."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer

HOST = "127.0.0.1"


@dataclass
class S3Server:
    """Serves at one port; what it holds stays while it is stopped."""

    port: int = 0
    _server: ThreadedMotoServer | None = field(default=None, repr=False)

    def start(self) -> None:
        if self._server is None:
            self._server = ThreadedMotoServer(ip_address=HOST, port=self.port, verbose=False)
            self._server.start()
            _, self.port = self._server.get_host_and_port()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def bucket(self) -> str:
        """The URL of a new bucket."""
        url = f"s3://bucket-{uuid.uuid4().hex[:12]}"
        self.files.mkdir(url)
        return url

    @property
    def files(self) -> fsspec.AbstractFileSystem:
        return fsspec.filesystem("s3", use_listings_cache=False)

    def names(self, url: str) -> list[str]:
        """What lies below `url`."""
        root = url.removeprefix("s3://")
        return sorted(name.removeprefix(root).strip("/") for name in self.files.find(url))

    def put(self, folder: Path, url: str) -> None:
        """Upload a folder, as a user would by `aws s3 cp --recursive`."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.files.put_file(str(path), f"{url}/{path.relative_to(folder).as_posix()}")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server, and the environment by which S3 clients find it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3Server()
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:{server.port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        try:
            yield server
        finally:
            server.stop()
