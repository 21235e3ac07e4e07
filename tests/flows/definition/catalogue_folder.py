"""A folder of flow files with a catalogue."""

from datetime import timedelta
from pathlib import Path

from penstock.flows.config import FlowsSection
from penstock.flows.definition.catalogue import FlowCatalogue
from penstock.kernel.clock import ManualClock

SECOND = timedelta(seconds=1)
GOOD = "name: {name}\nsteps:\n  a: {{kind: http}}\n  b: {{kind: http, dependsOn: [a]}}\n"


class CatalogueFolder:
    """A folder of flow files, and catalogues that read it."""

    def __init__(self, path: Path, clock: ManualClock) -> None:
        self.path, self._clock = path, clock

    def write(self, file: str, text: str) -> Path:
        (self.path / file).write_text(text)
        return self.path / file

    def write_valid(self, name: str) -> Path:
        return self.write(f"{name}.yaml", GOOD.format(name=name))

    def open_catalogue(self, **section: object) -> FlowCatalogue:
        return FlowCatalogue(FlowsSection.model_validate({"folder": self.path, **section}), self._clock)

    def advance_to_next_scan(self) -> None:
        self._clock.advance(SECOND)
