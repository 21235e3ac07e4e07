"""A plain nginx in front of processes of ours, as a user without rights runs it."""

import os
import shutil
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.ports import free_port
from tests.support.require import require
from tests.support.wait import until

_CONFIG = """
daemon off;
{user}
pid nginx.pid;
error_log error.log warn;
events {{}}
http {{
  log_format upstream '$upstream_addr $upstream_status $status';
  access_log access.log upstream;
  client_body_temp_path temp; proxy_temp_path temp; fastcgi_temp_path temp; uwsgi_temp_path temp; scgi_temp_path temp;
  upstream pods {{
    {servers}
    keepalive 32;
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://pods;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_next_upstream {next};
    }}
  }}
}}
"""
# A failed server is tried again at once: only one of its processes was restarting.
_SERVER = "server 127.0.0.1:{} max_fails=0;"
NO_SERVER = "server 127.0.0.1:1 down;"
OK = ("200", "202")


class Nginx(AbstractContextManager["Nginx"]):
    """It sends requests to the ports of the last reload; *next* states when it tries another server."""

    def __init__(self, folder: Path, *, next: str) -> None:  # noqa: A002 - nginx's own word
        program = shutil.which("nginx")
        if program is None:
            require("nginx")
        self._program = program
        self._folder = folder
        self._next = next
        self.port = free_port()
        (folder / "temp").mkdir(parents=True)
        self._access = folder / "access.log"

    def use(self, ports: Collection[int]) -> None:
        """From a moment later on send requests there."""
        user = "user root;" if os.getuid() == 0 else ""
        servers = " ".join(map(_SERVER.format, sorted(ports))) or NO_SERVER
        new = self._folder / "nginx.new"
        new.write_text(_CONFIG.format(user=user, servers=servers, port=self.port, next=self._next))
        new.replace(self._folder / "nginx.conf")
        if (self._folder / "nginx.pid").exists():
            self._process.send_signal(signal.SIGHUP)

    def __enter__(self) -> Self:
        command = [self._program, "-p", str(self._folder), "-c", "nginx.conf", "-e", "error.log"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._is_there, "nginx listens")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)

    def _is_there(self) -> bool:
        assert self._process.poll() is None, self.errors()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def answered(self, since: int = 0) -> Counter[int]:
        """How many requests each port answered, of those in the log after *since*."""
        with self._access.open() as log:
            log.seek(since)
            # Of several that were asked the last one answered.
            return Counter(int(line.split(" ")[-3].rpartition(":")[2]) for line in log if line[-4:-1] in OK)

    @property
    def reloads(self) -> int:
        """How long the log of requests is now."""
        return self._access.stat().st_size

    def errors(self) -> str:
        """The end of what it complained of."""
        log = self._folder / "error.log"
        return log.read_text()[-3000:] if log.exists() else ""
