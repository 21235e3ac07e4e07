"""Descriptions of failed connections."""

import os

import aiohttp


def describe_connection_error(error: Exception) -> str | None:
    """Return why a server could not be reached, in words that do not depend on the HTTP library; None if unknown."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host name is unknown"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionResetError):
        return "the connection was closed"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number).lower() if number and number > 0 else None
