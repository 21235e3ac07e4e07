"""Pieces of SVG: numbers short, text safe."""

import re
from xml.sax.saxutils import escape, quoteattr

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML, even escaped


def num(value: float) -> str:
    """A coordinate: a tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")


def safe(text: str) -> str:
    """Any text, as the content of an element."""
    return escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text))


def element(name: str, content: str = "", **attributes: str | float) -> str:
    """An element; underscores in the names of attributes stand for hyphens."""
    given = "".join(f" {key.replace('_', '-')}={_quoted(value)}" for key, value in attributes.items())
    return f"<{name}{given}>{content}</{name}>" if content else f"<{name}{given}/>"


def text(x: float, y: float, content: str, **attributes: str | float) -> str:
    """A line of text that begins, ends or has its middle at *x*."""
    return element("text", safe(content), x=x, y=y, **attributes)


def box(x: float, y: float, width: float, height: float) -> str:
    """A rectangle, as part of a path."""
    return f"M{num(x)} {num(y)}h{num(width)}v{num(height)}h-{num(width)}z"


def _quoted(value: str | float) -> str:
    return quoteattr(value) if isinstance(value, str) else f'"{num(value)}"'
