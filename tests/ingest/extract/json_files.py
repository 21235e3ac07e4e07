"""Files of JSON for tests."""

import json
from pathlib import Path
from typing import Any

A = {"sku": "A", "qty": 1, "price_minor": 1050}
B = {"sku": "B", "qty": 2, "price_minor": 700}
LIST: list[dict[str, Any]] = [{"sku": "A", "qty": 1, "price": 10.5}, {"sku": "B", "qty": "2", "price": "7,00"}]


def write_file(file: Path, content: Any) -> Path:
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content, ensure_ascii=False).encode())
    return file
