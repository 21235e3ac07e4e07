"""R21: the history of writes, reads and outages of pods, and the check of every response."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import orjson

from penstock.refdata.model import DictionaryKey

SLOWEST_RESPONSE = 15.0  # seconds; for a pod without an outage
SOURCES = ("memory", "postgres_fallback")
Content = Mapping[str, Any]
_MISSING = object()
DATA = (200, 304, 404)


@dataclass
class Write:
    """A command: its puts and deletes, the time when it was sent, and the time when its version was known."""

    target: DictionaryKey
    puts: Content
    deletes: Sequence[str] = ()
    is_snapshot: bool = False
    sent_at: float = 0.0
    version: int = 0
    known_at: float = inf

    def apply_to(self, content: Content) -> Content:
        """Return the content after this command."""
        kept = {} if self.is_snapshot else {key: value for key, value in content.items() if key not in self.deletes}
        return {**kept, **self.puts}


@dataclass(frozen=True)
class Read:
    """A request to a pod and its response; *status* is None without a response.

    *what* is `item`, `items`, `version`, `all` or `page`. Pages with the same *walk* belong together. *holds* is the
    value whose entity tag was sent.
    """

    pod: int
    target: DictionaryKey
    what: str
    min_version: int | None
    began: float
    ended: float
    keys: tuple[str, ...] = ()
    status: int | None = None
    version: int | None = None
    source: str | None = None
    body: Any = None
    holds: Any = None
    walk: int = 0
    has_cursor: bool = False  # a cursor names the version of its walk, so it is a barrier too

    def answered(self, ended: float, status: int, headers: Mapping[str, str], raw: bytes) -> "Read":
        """Return the read with its response: status, headers and body."""
        version, source = headers.get("X-Dict-Version"), headers.get("X-Data-Source")
        lines = raw.splitlines() if self.what == "all" and status == 200 else None
        body = [orjson.loads(line) for line in lines] if lines is not None else orjson.loads(raw or b"null")
        named = None if version is None else int(version)
        return replace(self, ended=ended, status=status, version=named, source=source, body=body)


@dataclass
class Hold:
    """A time in which a pod may fail to answer, because its processes are frozen, dead or starting."""

    pod: int
    since: float
    until: float = inf


@dataclass
class History:
    """All events of a campaign; `lies` must be empty."""

    writes: list[Write] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)

    def figures(self) -> Mapping[str, Any]:
        """Return the number of commits, and of responses by kind, with and without a barrier."""
        kinds = Counter((read.min_version is not None, read.status, read.source) for read in self.reads)
        return {
            "commits": len(self.writes),
            "barrier_reads": {kind[1:]: number for kind, number in kinds.most_common() if kind[0]},
            "other_reads": {kind[1:]: number for kind, number in kinds.most_common() if not kind[0]},
            "slowest": max((read.ended - read.began for read in self.reads), default=0.0),
        }

    def violations(self) -> list[str]:
        """Return every response that violates a guarantee, with the reason."""
        return list(_Checker(self).violations())


class _Checker:
    def __init__(self, history: History) -> None:
        self._history = history
        self._writes: dict[DictionaryKey, list[Write]] = defaultdict(list)
        for write in sorted(history.writes, key=lambda write: write.version):
            self._writes[write.target].append(write)
        pages = [read for read in history.reads if read.what == "page" and read.status == 200]
        self._begun = {page.walk: page.version or 0 for page in reversed(pages)}  # version of the first page
        self._contents = {target: _contents(writes) for target, writes in self._writes.items()}

    def violations(self) -> Iterator[str]:
        yield from self._gaps()
        walks: dict[int, list[Read]] = defaultdict(list)
        for read in self._history.reads:
            yield from (f"{why}: {read}" for why in self._lies_in(read))
            if read.what == "page" and read.status == 200:
                walks[read.walk].append(read)
        for pages in walks.values():
            yield from (f"{why}: {pages}" for why in self._check_walk(pages))

    def _gaps(self) -> Iterator[str]:
        for target, writes in self._writes.items():
            versions = [write.version for write in writes]
            if versions != list(range(1, len(versions) + 1)):
                yield f"the versions of {target} have gaps, or one was given twice: {versions}"

    def _lies_in(self, read: Read) -> Iterator[str]:
        if not self._was_held(read):
            yield from _check_availability(read)
        if read.status in DATA:
            yield from self._check_data(read)
        elif read.status == 409:
            yield from self._check_refusal(read)
        elif read.status not in (None, 503) and (read.status, read.what) != (410, "page"):
            yield f"status {read.status} is no answer"

    def _check_data(self, read: Read) -> Iterator[str]:
        """Check that a response has a version and the content of that version."""
        if read.version is None or read.source not in SOURCES:
            yield "it does not tell its version and source"
            return
        if read.min_version is not None and read.version < read.min_version:
            yield "R21: less than was asked for"
        content = self._at(read.target, read.version)
        if content is None or self._sent_at(read.target, read.version) > read.ended:
            yield "a version that was not committed"
        elif not _has_content(read, content):
            yield f"not what version {read.version} is: {content}"

    def _check_refusal(self, read: Read) -> Iterator[str]:
        """R21: check that a 409 is for a version not known to be committed, or for a cursor that is too old."""
        if read.body.get("code") == "CURSOR_TOO_OLD":
            if read.min_version is None or self._begun.get(read.walk, read.min_version) >= read.min_version:
                yield "a cursor that is not too old"
        elif read.min_version is None or read.version is None or read.body.get("code") != "VERSION_NOT_COMMITTED":
            yield "a refusal without a reason"
        elif read.version >= read.min_version or self._sent_at(read.target, read.version) > read.ended:
            yield "a refusal that names a version as it cannot be"
        elif read.version < (known := self._known_before(read)):
            yield f"R21: version {known} was known to be committed before the question"

    def _check_walk(self, pages: Sequence[Read]) -> Iterator[str]:
        """R17, R18: check that the pages of a walk belong to one version, and are complete at the end."""
        if len({page.version for page in pages}) > 1:
            yield "pages of several versions"
            return
        content = self._at(pages[0].target, pages[0].version or 0)
        found = [(item["key"], item["value"]) for page in pages for item in page.body["items"]]
        whole = _in_order(content or {})
        is_last = pages[-1].body["next"] is None
        if found != (whole if is_last else whole[: len(found)]):
            yield f"pages that together are not what version {pages[0].version} is: {whole}"

    def _at(self, target: DictionaryKey, version: int) -> Content | None:
        contents = self._contents.get(target, [{}])
        return contents[version] if 0 <= version < len(contents) else None

    def _sent_at(self, target: DictionaryKey, version: int) -> float:
        """Return the time when the command of *version* was sent; it cannot have been committed before."""
        writes = self._writes.get(target, ())
        if not 0 <= version <= len(writes):
            return inf
        return writes[version - 1].sent_at if version else -inf

    def _known_before(self, read: Read) -> int:
        """Return the last version whose commit was known when *read* started."""
        known = [write.version for write in self._writes.get(read.target, ()) if write.known_at <= read.began]
        return max(known, default=0)

    def _was_held(self, read: Read) -> bool:
        return any(
            hold.pod == read.pod and hold.since <= read.ended and read.began <= hold.until
            for hold in self._history.holds
        )


def _contents(writes: Sequence[Write]) -> list[Content]:
    """Return the content of a dictionary at each version; version 0 is empty."""
    contents: list[Content] = [{}]
    for write in writes:
        contents.append(write.apply_to(contents[-1]))
    return contents


def _check_availability(read: Read) -> Iterator[str]:
    """Check a read of a pod that had no outage."""
    if read.status is None:
        yield "no response without an outage of the pod"
    elif read.ended - read.began > SLOWEST_RESPONSE:
        yield f"an answer after {read.ended - read.began:.1f} s"
    if read.status == 503 and read.min_version is None and not read.has_cursor:
        yield "R23: no data for a read without a version"


def _has_content(read: Read, content: Content) -> bool:
    """Return whether the body of a response equals the content of its version."""
    if read.what == "item":
        return _has_item(read, content.get(read.keys[0], _MISSING))
    if read.status != 200:
        return False
    if read.what == "items":
        found = {key: content[key] for key in read.keys if key in content}
        missing = [key for key in read.keys if key not in content]
        return bool(read.body == {"version": read.version, "items": found, "missing": missing})
    if read.what == "version":
        return _has_version(read, content)
    if read.what == "all":
        return [(line["key"], line["value"]) for line in read.body] == _in_order(content)
    return bool(read.body["version"] == read.version)  # the items are checked with all pages of the walk


def _has_item(read: Read, value: Any) -> bool:
    if read.status == 404:
        return value is _MISSING and read.body["code"] == "UNKNOWN_KEY"
    return bool(value == (read.holds if read.status == 304 else read.body))


def _has_version(read: Read, content: Content) -> bool:
    named = {"tenantId": read.target.tenant_id, "dictCode": read.target.dict_code, "version": read.version}
    counted = {"items": len(content)} if read.source == "memory" else {}
    return bool({**read.body, **named, **counted} == read.body)


def _in_order(content: Content) -> list[tuple[str, Any]]:
    return sorted(content.items(), key=lambda item: item[0].encode())
