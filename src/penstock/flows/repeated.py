"""F2: what JSON would forgive, and a flow must not: a name that comes twice, of which only the last would count."""

import json
from collections import Counter
from typing import Any

from penstock.kernel.errors import Invalid


def refuse_repeated(body: bytes) -> None:
    """Invalid DUPLICATE_STEP, or DUPLICATE_NAME elsewhere; what cannot be read at all is for others to refuse."""
    repeated: list[tuple[dict[str, Any], str]] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = Counter(name for name, _ in pairs)
            repeated.append((found, names.most_common(1)[0][0]))
        return found

    try:
        document = json.loads(body, object_pairs_hook=noted)
    except (ValueError, RecursionError):
        return
    steps = document.get("steps") if isinstance(document, dict) else None
    _refuse_listed(steps)
    for within, name in repeated:
        if within is steps:
            raise _duplicate_step(name)
    if repeated:
        said = f"{repeated[0][1][:100]!r} comes twice in one object"
        raise Invalid("DUPLICATE_NAME", said, hint="name it once", name=repeated[0][1][:100])


def _refuse_listed(steps: Any) -> None:
    """The same for steps given as a list."""
    if not isinstance(steps, list):
        return
    seen: set[str] = set()
    for step in steps:
        name = step.get("id") if isinstance(step, dict) else None
        if isinstance(name, str):
            if name in seen:
                raise _duplicate_step(name)
            seen.add(name)


def _duplicate_step(name: str) -> Invalid:
    told = name[:100]
    return Invalid("DUPLICATE_STEP", f"there are two steps {told!r}", hint="each step has an id of its own", step=told)
