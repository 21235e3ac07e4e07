"""Elements of SVG, with short numbers and escaped text."""

import re
from xml.sax.saxutils import escape, quoteattr

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML, even if escaped


def format_px(value: float) -> str:
    """Return a coordinate, rounded to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def escape_text(text: str) -> str:
    """Return a text as the content of an element."""
    return escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text))


def make_element(name: str, content: str = "", **attributes: str | float) -> str:
    """Return an element; underscores in the names of attributes become hyphens."""
    encoded = "".join(f" {key.replace('_', '-')}={_quote_value(value)}" for key, value in attributes.items())
    return f"<{name}{encoded}>{content}</{name}>" if content else f"<{name}{encoded}/>"


def make_text(x: float, y: float, content: str, **attributes: str | float) -> str:
    """Return a line of text at *x*; its `text_anchor` decides which part of it is at *x*."""
    return make_element("text", escape_text(content), x=x, y=y, **attributes)


def make_box_path(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as part of a path."""
    return f"M{format_px(x)} {format_px(y)}h{format_px(width)}v{format_px(height)}h-{format_px(width)}z"


def _quote_value(value: str | float) -> str:
    return quoteattr(value) if isinstance(value, str) else f'"{format_px(value)}"'
