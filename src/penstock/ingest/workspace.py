"""Ingest put together: its tree, and the database where there is one; and the daemon that watches all inboxes."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.app.factories import make_tree
from penstock.app.platform import known_migrations, open_database
from penstock.ingest import paths, store
from penstock.ingest.async_bridge import Bridge
from penstock.ingest.deliver.deliveries import Deliveries
from penstock.ingest.model import Failed, Standing, checked_supplier, no_supplier, supplier_of
from penstock.ingest.run.hooks import Hooks, Outcome
from penstock.ingest.run.recorder import DatabaseRecorder
from penstock.ingest.run.run import Ingestion
from penstock.ingest.state import reader
from penstock.ingest.state.diff import Comparison, compare_runs
from penstock.ingest.state.retention import Swept, sweep
from penstock.ingest.state.supplier_status import standing
from penstock.ingest.supplier import Supplier, load_supplier
from penstock.ingest.tree.port import Tree
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig, Invalid, NotFound
from penstock.kernel.ids import worker_name
from penstock.settings import Settings, load_settings

_AT_ONCE = 1_000


def settings_for(
    root: str | None, config: Path | None, overrides: Mapping[str, Any] | None = None
) -> tuple[Settings, bool]:
    """The settings with the root that is meant, and whether the database is told of what happens there.

    It is where the root is configured. One that is named on the command line, or that we stand in, is just a folder.
    """
    given = dict(overrides or {})
    settings = load_settings(config, overrides={**given, "ingest.root": root})
    if settings.ingest.root is not None:
        return settings, root is None
    if any(Path(name).is_dir() for name in ("etl_data", paths.OPS)):
        return load_settings(config, overrides={**given, "ingest.root": "."}), False
    hint = "name it with --root DIR, or as ingest.root in penstock.yaml"
    raise BadConfig("NO_ROOT", "which folder holds etl_data/ and etl_ops/?", hint=hint)


@contextmanager
def workplace(settings: Settings, *, uses_database: bool) -> Iterator["Workplace"]:
    """Everything a command of ingest needs, closed at the end."""
    with closing(Bridge()) as bridge, closing(make_tree(settings.ingest.root or ".", settings.ingest)) as tree:
        yield Workplace(settings, tree, bridge, uses_database=uses_database)


class Workplace:
    """What can be done with one tree."""

    def __init__(self, settings: Settings, tree: Tree, bridge: Bridge, *, uses_database: bool) -> None:
        self.tree = tree
        self._settings = settings
        self._section = settings.ingest
        self._bridge = bridge
        self._uses_database = uses_database
        self._holder = worker_name("ingest")
        self._clock: Clock = SystemClock()

    def run(self, supplier: str, hooks: Hooks, *, waits: bool) -> Outcome:
        """One run, and then whoever is to be told of what is published."""
        checked_supplier(supplier)
        with ExitStack() as stack:
            if self._uses_database:
                recorder = stack.enter_context(self._recorder())
                stack.enter_context(recorder.lock(self._section.root or ".", supplier))
                hooks = replace(hooks, recorder=recorder)
            outcome = Ingestion(self.tree, self._holder, hooks, self._clock).run(supplier, waits=waits)
        return replace(outcome, deliveries=self.deliver(supplier))

    def deliver(self, supplier: str) -> dict[str, str]:
        """I23: what came of telling the targets of the current state that have not been told."""
        try:
            config = self.config(supplier)
        except Failed:
            return {}
        return Deliveries(self.tree, supplier, config, self._bridge, self._clock).deliver()

    def config(self, supplier: str) -> Supplier:
        """The supplier's configuration; Failed when there is none that can be used."""
        with self.tree.config(supplier) as file:
            return load_supplier(file, self.tree.uri(paths.config(supplier)))[0]

    def compare(self, supplier: str, before: str | None, after: str | None, limit: int) -> Comparison:
        """I21: what one publication changed against another, by default the current one against the one before."""
        checked_supplier(supplier)
        after = after or reader.current(self.tree, supplier).run_id
        before = before or reader.manifest_of(self.tree, after)["previous_run"]
        if before is None:
            raise NotFound("NO_PREVIOUS_RUN", f"{after} is the first publication", hint="all of it is new")
        if other := [one for one in (before, after) if supplier_of(one) != supplier]:
            raise Invalid(
                "OTHER_SUPPLIER", f"{other[0]} is not a run of {supplier}", hint="compare runs of one supplier"
            )
        try:
            return compare_runs(self.tree, self.config(supplier), before, after, limit)
        except Failed as failed:
            raise BadConfig(failed.code.value, failed.message, hint=failed.hint) from failed

    def sweep(self, *, is_dry: bool) -> Swept:
        """I12: remove what is too old."""
        return sweep(self.tree, self._section.retention, self._clock, self._holder, is_dry=is_dry)

    def suppliers(self, only: str | None = None) -> list[str]:
        """All suppliers, or the *only* one that is meant; NotFound when nobody has that name."""
        known = self.tree.suppliers()
        if only is not None and checked_supplier(only) not in known:
            raise no_supplier(only, known)
        return known if only is None else [only]

    def standings(self, supplier: str | None = None) -> list[Standing]:
        """Where suppliers stand."""
        now = self._clock.now()
        return [standing(self.tree, one, self._section.alerts, now) for one in self.suppliers(supplier)]

    def quarantined(self, supplier: str | None = None) -> list[dict[str, Any]]:
        """The files that were set aside, why, and by which run."""
        return [told for one in self.suppliers(supplier) for told in reader.quarantined(self.tree, one)]

    @contextmanager
    def _recorder(self) -> Iterator[DatabaseRecorder]:
        with self._bridge.entered(open_database(self._settings)) as db:
            self._bridge.call(migrate.migrate(db, known_migrations(self._settings)))
            yield DatabaseRecorder(self._bridge, db, self._holder)


async def forget_old_runs(settings: Settings, db: Database) -> None:
    """What the database tells of runs goes when what they left behind goes."""
    before = db.clock.now() - settings.ingest.retention.runs
    forgotten = _AT_ONCE
    while forgotten >= _AT_ONCE:
        async with db.transaction() as tx:
            forgotten = await store.prune(tx, before, _AT_ONCE)
