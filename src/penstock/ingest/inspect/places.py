"""Where the records of a JSON or XML document are: in the place that holds the most."""

from collections import Counter
from itertools import islice

import ijson  # type: ignore[import-untyped]
from lxml import etree

from penstock.ingest.extract import json_stream
from penstock.ingest.extract.archives import Member
from penstock.ingest.extract.detect import encoding_of, without_mark
from penstock.ingest.supplier import Format

_EVENTS = 1_000_000
_OBJECTS = 200_000
_ITEM = "item"  # what ijson calls what is in a list


def place_of_records(member: Member, form: Format) -> str | None:
    """What `source.records` should be; None when the extractor finds it by itself, or says that it cannot."""
    if form is Format.JSON and encoding_of(member.head) == "utf-8":
        return _in_json(member)
    return _in_xml(member) if form is Format.XML else None


def _in_json(member: Member) -> str | None:
    """The list of objects, not itself in a list, that has the most of them."""
    counts: Counter[str] = Counter()
    with member.open() as content:
        content.read(len(member.head) - len(without_mark(member.head)))
        try:
            for path in islice(json_stream.objects(content), _OBJECTS):
                if path.count(_ITEM) == 1 and path[-1] == _ITEM:
                    counts[".".join(path)] += 1
        except (ijson.JSONError, ValueError):
            return None
    best = max(counts, key=lambda prefix: counts[prefix], default=_ITEM)
    return None if best == _ITEM else best.removesuffix(f".{_ITEM}")


def _in_xml(member: Member) -> str | None:
    """The element with the most attributes and children in all, if it comes more than once."""
    seen: Counter[str] = Counter()
    held: Counter[str] = Counter()
    with member.open() as content:
        # As the extractor does: what comes from outside is data, never a program.
        walk = etree.iterparse(
            content, events=("end",), resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False,
            remove_comments=True, remove_pis=True,
        )  # fmt: skip
        try:
            for _, element in islice(walk, _EVENTS):
                tag = str(etree.QName(element).localname)
                parent = element.getparent()
                if parent is not None:
                    seen[tag] += 1
                    held[tag] += len(element.attrib) + len(element)
                    _forget_before(element)
        except etree.XMLSyntaxError:
            return None
    return max((tag for tag in seen if seen[tag] > 1 and held[tag]), key=lambda tag: held[tag], default=None)


def _forget_before(element: "etree._Element") -> None:
    """Empty what was read before *element*: its parent still has to be able to count it."""
    before = element.getprevious()
    if before is not None and len(before):
        before.clear()
