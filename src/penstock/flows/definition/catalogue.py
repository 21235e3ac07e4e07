"""F15: the flows there are by name: from files that may change at any time, and from Python modules."""

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from penstock.flows.config import FlowsSection
from penstock.flows.definition.graph import find_recursion, suggest_name
from penstock.flows.definition.loader import FlowModule, build_workers, load_file, load_module
from penstock.flows.definition.spec import FlowSpec
from penstock.flows.definition.validation import KindChecks
from penstock.flows.step import KindContext, ReportCheck, Workers
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import NotFound, PenstockError

SUFFIXES = (".yaml", ".yml")
_EVERY = timedelta(seconds=1)
_NO_CHECKS: KindChecks = {}
Stamp = tuple[int, ...]


@dataclass(frozen=True)
class _FlowFile:
    """What became of a file: the flow it held when it was good last, and what is wrong with it now."""

    stamp: Stamp
    flow: FlowSpec | None
    trouble: str | None


class FlowCatalogue:
    """All named flows. A file that turns bad keeps the flow it had; a flow goes when its file does."""

    def __init__(
        self,
        section: FlowsSection,
        clock: Clock | None = None,
        *,
        kind_checks: KindChecks = _NO_CHECKS,
        built_in_modules: Sequence[str] = (),
    ) -> None:
        self._folder, self._clock = section.folder, clock or SystemClock()
        self.input_checks, self.report_checks = kind_checks, dict[str, ReportCheck]()
        loaded = {name: self._load(name) for name in (*built_in_modules, *section.modules)}
        unique = {id(worker): worker for module in loaded.values() for worker in module.workers}
        self.workers: Sequence[Workers] = list(unique.values())
        self._makers = {module.make_workers: name for name, module in loaded.items() if module.make_workers}
        self._fixed = {flow.name: flow for module in loaded.values() for flow in module.flows}
        for flow in self._fixed.values():
            if error := find_recursion(flow, self._fixed):
                raise error
        self._files: dict[Path, _FlowFile] = {}
        self._flows: Mapping[str, FlowSpec] = {}
        self._errors: Mapping[str, str] = {}
        self._look()

    def _load(self, name: str) -> FlowModule:
        module = load_module(name, self.input_checks)
        # The checks of built-in kinds stay: a module cannot weaken them.
        self.input_checks = {**module.input_checks, **self.input_checks}
        self.report_checks = {**module.report_checks, **self.report_checks}
        return module

    def make_workers(self, context: KindContext) -> Sequence[Workers]:
        """Return the workers of the modules, with those that `make_workers` returns for *context*."""
        return [*self.workers, *(build_workers(name, make, context) for make, name in self._makers.items())]

    def get_flow(self, name: str) -> FlowSpec:
        """The flow of that name; NotFound when there is none."""
        flows = self.list_flows()
        if name not in flows:
            raise NotFound("FLOW_NOT_FOUND", f"there is no flow {name!r}", hint=suggest_name(name, sorted(flows)))
        return flows[name]

    def list_flows(self) -> Mapping[str, FlowSpec]:
        """All of them, by name."""
        self._look_again()
        return self._flows

    def list_errors(self) -> Mapping[str, str]:
        """Files that cannot be used as they are, and why."""
        self._look_again()
        return self._troubles

    def _look_again(self) -> None:
        if self._clock.now() - self._looked_at >= _EVERY:
            self._look()

    def _look(self) -> None:
        self._looked_at = self._clock.now()
        if self._folder is None:
            self._flows = self._fixed
            return
        try:
            found = dict(_stamps(self._folder))
        except OSError as error:  # the flows that were there stay: a folder may be away for a moment
            self._troubles = {str(self._folder): f"cannot be read: {error.strerror}"}
            self._flows = self._flows or self._fixed
            return
        self._files = {path: self._read(self._folder, path, stamp) for path, stamp in found.items()}
        self._take_stock()

    def _read(self, folder: Path, path: Path, stamp: Stamp) -> _FlowFile:
        known = self._files.get(path)
        if known is not None and known.stamp == stamp:
            return known
        kept = known.flow if known is not None else None
        if not path.resolve().is_relative_to(folder.resolve()):
            return _FlowFile(stamp, None, "leads out of the folder")
        try:
            return _FlowFile(stamp, load_file(path, self.input_checks), None)
        except PenstockError as error:
            return _FlowFile(stamp, kept, error.message)

    def _take_stock(self) -> None:
        flows, troubles, holders = dict(self._fixed), dict[str, str](), dict[str, str]()
        for path, file in self._files.items():
            if file.trouble is not None:
                troubles[str(path)] = file.trouble
            if file.flow is None:
                continue
            if (name := file.flow.name) in flows:
                troubles[str(path)] = f"there is a flow {name!r} in {holders.get(name, 'a module')} already"
                continue
            if error := find_recursion(file.flow, flows):
                troubles[str(path)] = error.message
                continue
            flows[name], holders[name] = file.flow, path.name
        self._flows, self._troubles = flows, troubles


def flow_files(folder: Path) -> list[Path]:
    """The files of *folder* that should hold flows."""
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))


def _stamps(folder: Path) -> Iterator[tuple[Path, Stamp]]:
    for path in flow_files(folder):
        try:
            found = path.stat()
        except OSError:  # went just now, or leads nowhere: reading it tells
            yield path, ()
            continue
        if stat.S_ISREG(found.st_mode):
            yield path, (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
