"""Compare the output that a page shows with the output of this run."""

import re
from dataclasses import dataclass, field

# What differs from run to run; a name is the same everywhere on a page.
_NAME = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{8}T\d{6}Z_[0-9a-f]{6}"
_MOMENT = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+Z)?"
_AGE = r"\d+ seconds?"
_SECONDS = r"\d+\.\d(?![\d.])"
_PROCESS = r"(?<=@)[\w.-]+:\d+"
_KINDS = (_NAME, _MOMENT, _AGE, _SECONDS, _PROCESS)
_DIFFERS = re.compile("|".join(f"({kind})" for kind in _KINDS))
_CUT = "…"


@dataclass
class Names:
    """The names of runs and events on a page, and their names in this run."""

    real: dict[str, str] = field(default_factory=dict)

    def here(self, text: str) -> str:
        """Return *text* with the names of this run."""
        for shown, real in self.real.items():
            text = text.replace(shown, real)
        return text

    def are_in(self, shown: str, output: str) -> bool:
        """Return whether *output* is as *shown*, with more only at `…`; store the names in it."""
        groups: dict[str, str] = {}
        pattern = "".join(self._line(line, groups) for line in _plain(shown).splitlines())
        match = re.fullmatch(pattern, _plain(output))
        if match:
            self.real.update({name: match[group] for name, group in groups.items()})
        return match is not None

    def _line(self, line: str, groups: dict[str, str]) -> str:
        if line == _CUT:
            return r"(?:.*\n)*?"
        start, is_cut, _ = line.partition(_CUT)
        return self._words(start.rstrip(), groups) + (r".*\n" if is_cut else r"\n")

    def _words(self, text: str, groups: dict[str, str]) -> str:
        pattern, end = "", 0
        for differs in _DIFFERS.finditer(text):
            kind = _KINDS[(differs.lastindex or 1) - 1]
            same = self._name(differs[0], groups) if kind == _NAME else kind
            pattern += re.escape(text[end : differs.start()]) + same
            end = differs.end()
        return pattern + re.escape(text[end:])

    def _name(self, name: str, groups: dict[str, str]) -> str:
        if name in self.real:
            return re.escape(self.real[name])
        if name in groups:
            return f"(?P={groups[name]})"
        groups[name] = f"name{len(groups)}"
        return f"(?P<{groups[name]}>{_NAME})"


def _plain(text: str) -> str:
    """Return *text* without padding, which depends on the length of names, and with uniform line ends."""
    return "".join(f"{re.sub(' {2,}', '  ', line.strip())}\n" for line in text.splitlines())
