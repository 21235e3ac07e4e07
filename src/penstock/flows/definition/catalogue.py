"""F15: the catalogue of named flows: from files, which are read again when they change, and from Python modules."""

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import structlog

from penstock.flows.config import FlowsSection
from penstock.flows.definition.graph import find_recursion, suggest_name
from penstock.flows.definition.loader import FlowModule, build_workers, load_file, load_module
from penstock.flows.definition.spec import FlowSpec
from penstock.flows.definition.validation import KindChecks
from penstock.flows.step import KindContext, ReportCheck, Workers
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import NotFound, PenstockError

SUFFIXES = (".yaml", ".yml")
_SCAN_INTERVAL = timedelta(seconds=1)
_NO_CHECKS: KindChecks = {}
Stamp = tuple[int, ...]
_log = structlog.get_logger()


@dataclass(frozen=True)
class FlowFileError:
    """The reason why a flow file, or the folder of flow files, cannot be used."""

    message: str
    line: int | None = None


@dataclass(frozen=True)
class _FlowFile:
    """A flow file: the flow of its last valid version, and its present error."""

    stamp: Stamp
    flow: FlowSpec | None
    error: FlowFileError | None


class FlowCatalogue:
    """All named flows. A file that becomes invalid keeps its last valid flow; a deleted file removes its flow."""

    def __init__(
        self,
        section: FlowsSection,
        clock: Clock | None = None,
        *,
        kind_checks: KindChecks = _NO_CHECKS,
        built_in_modules: Sequence[str] = (),
    ) -> None:
        self.folder, self._clock = section.folder, clock or SystemClock()
        self.input_checks, self.report_checks = kind_checks, dict[str, ReportCheck]()
        loaded = {name: self._load_module(name) for name in (*built_in_modules, *section.modules)}
        unique = {id(worker): worker for module in loaded.values() for worker in module.workers}
        self.workers: Sequence[Workers] = list(unique.values())
        self._makers = {module.make_workers: name for name, module in loaded.items() if module.make_workers}
        self._module_flows = {flow.name: flow for module in loaded.values() for flow in module.flows}
        for flow in self._module_flows.values():
            if error := find_recursion(flow, self._module_flows):
                raise error
        self._files: dict[Path, _FlowFile] = {}
        self._flows: Mapping[str, FlowSpec] = {}
        self._errors: Mapping[str, FlowFileError] = {}
        self._scan()

    def _load_module(self, name: str) -> FlowModule:
        module = load_module(name, self.input_checks)
        # The checks of built-in kinds have priority: a module cannot weaken them.
        self.input_checks = {**module.input_checks, **self.input_checks}
        self.report_checks = {**module.report_checks, **self.report_checks}
        return module

    def make_workers(self, context: KindContext) -> Sequence[Workers]:
        """Return the workers of the modules, with those that `make_workers` returns for *context*."""
        return [*self.workers, *(build_workers(name, make, context) for make, name in self._makers.items())]

    def get_flow(self, name: str) -> FlowSpec:
        """Return the flow *name*; raise NotFound if it does not exist."""
        flows = self.list_flows()
        if name not in flows:
            raise NotFound("FLOW_NOT_FOUND", f"flow {name!r} does not exist", hint=suggest_name(name, sorted(flows)))
        return flows[name]

    def list_flows(self) -> Mapping[str, FlowSpec]:
        """Return all flows by name."""
        self._scan_if_due()
        return self._flows

    def list_errors(self) -> Mapping[str, FlowFileError]:
        """Return the errors of flow files by path; an error of the folder has the path of the folder."""
        self._scan_if_due()
        return self._errors

    def _scan_if_due(self) -> None:
        if self._clock.now() - self._scanned_at >= _SCAN_INTERVAL:
            self._scan()

    def _scan(self) -> None:
        self._scanned_at = self._clock.now()
        flows, errors = self._flows, self._errors
        if self.folder is None:
            self._flows = self._module_flows
        else:
            self._scan_folder(self.folder)
        self._log_changes(flows, errors)

    def _scan_folder(self, folder: Path) -> None:
        try:
            stamps = dict(_list_stamps(folder))
        except OSError as error:  # flows stay loaded: a folder may be unavailable for a moment
            self._errors = {str(folder): FlowFileError(_describe_folder_error(folder, error))}
            self._flows = self._flows or self._module_flows
            return
        self._files = {path: self._read(folder, path, stamp) for path, stamp in stamps.items()}
        self._merge()

    def _read(self, folder: Path, path: Path, stamp: Stamp) -> _FlowFile:
        previous = self._files.get(path)
        if previous is not None and previous.stamp == stamp:
            return previous
        if not path.resolve().is_relative_to(folder.resolve()):
            return _FlowFile(stamp, None, FlowFileError(f"the link leads out of the folder {folder}"))
        try:
            return _FlowFile(stamp, load_file(path, self.input_checks), None)
        except PenstockError as error:
            last_valid = previous.flow if previous is not None else None
            return _FlowFile(stamp, last_valid, FlowFileError(error.message, _find_line(error)))

    def _merge(self) -> None:
        flows, errors, origins = dict(self._module_flows), dict[str, FlowFileError](), dict[str, str]()
        for path, file in self._files.items():
            if file.error is not None:
                errors[str(path)] = file.error
            if file.flow is None:
                continue
            if (name := file.flow.name) in flows:
                origin = origins.get(name, "a module")
                errors[str(path)] = FlowFileError(f"flow {name!r} is already defined in {origin}")
                continue
            if error := find_recursion(file.flow, flows):
                errors[str(path)] = FlowFileError(error.message)
                continue
            flows[name], origins[name] = file.flow, path.name
        self._flows, self._errors = flows, errors

    def _log_changes(self, flows: Mapping[str, FlowSpec], errors: Mapping[str, FlowFileError]) -> None:
        """Log the differences to the *flows* and *errors* of the previous scan."""
        for path, error in self._errors.items():
            if errors.get(path) == error:
                continue
            if path == str(self.folder):
                _log.warning("flows_folder_missing", folder=path, error=error.message)
            else:
                _log.warning("flow_file_invalid", file=path, line=error.line, error=error.message)
        changed = [name for name, flow in self._flows.items() if flows.get(name) is not flow]
        removed = sorted(set(flows) - set(self._flows))
        if changed or removed:
            _log.info("flows_loaded", flows=len(self._flows), changed=sorted(changed), removed=removed)


def list_flow_files(folder: Path) -> list[Path]:
    """Return the flow files of *folder*, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))


def _list_stamps(folder: Path) -> Iterator[tuple[Path, Stamp]]:
    for path in list_flow_files(folder):
        try:
            status = path.stat()
        except OSError:  # deleted meanwhile, or a dead link: reading it reports the error
            yield path, ()
            continue
        if stat.S_ISREG(status.st_mode):
            yield path, (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def _describe_folder_error(folder: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"the folder {folder} of `flows.folder` does not exist"
    return f"the folder {folder} of `flows.folder` cannot be read: {error.strerror}"


def _find_line(error: PenstockError) -> int | None:
    """Return the line of the first problem in a flow file; its location is file:line:column."""
    location = next((problem["location"] for problem in error.details.get("problems", ())), "")
    line = location.split(":")[-2:-1]
    return int(line[0]) if line and line[0].isdigit() else None
