"""Type aliases that tests of every part share."""

from typing import Any

Json = dict[str, Any]
