"""nginx with a constant response: one worker, no log, no lookup."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from benchmarks.servers import SERVER_CORE, Served, free_port, listening, pinned

_CONFIG = """
worker_processes 1;
daemon off;
pid %(folder)s/nginx.pid;
error_log /dev/null crit;
events { worker_connections 1024; }
http {
    access_log off;
    keepalive_requests 1000000000;
    keepalive_timeout 600s;
    default_type application/json;
    client_body_temp_path %(folder)s/body;
    proxy_temp_path %(folder)s/proxy;
    fastcgi_temp_path %(folder)s/fastcgi;
    uwsgi_temp_path %(folder)s/uwsgi;
    scgi_temp_path %(folder)s/scgi;
    server {
        listen 127.0.0.1:%(port)d;
        location / { return 200 '%(body)s'; }
    }
}
"""


@asynccontextmanager
async def constant_reply(program: str, folder: Path, body: str) -> AsyncIterator[Served]:
    """Start nginx, and yield its address and the process id of its worker."""
    assert "'" not in body, "a body for nginx's configuration"
    assert "$" not in body, "a body for nginx's configuration"
    place = folder / "nginx"
    place.mkdir()
    port, file = free_port(), place / "nginx.conf"
    file.write_text(_CONFIG % {"folder": place, "port": port, "body": body})
    command = [program, "-p", str(place), "-c", str(file), "-e", "stderr"]
    async with listening(*pinned(SERVER_CORE, *command), port=port) as master:
        # The master listens before it has a worker.
        while not (workers := psutil.Process(master).children()):  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.02)
        yield Served(f"http://127.0.0.1:{port}", workers[0].pid)
