"""Files of delimited text for tests."""

from pathlib import Path


def write_file(file: Path, text: str, encoding: str = "utf-8") -> Path:
    file.write_bytes(text.encode(encoding))
    return file
