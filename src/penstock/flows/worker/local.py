"""F17: the work source of workers with a database connection: they claim and report without an API server."""

from collections.abc import Mapping, Sequence

from penstock.flows import artifacts
from penstock.flows.contract import StepReportAnswer, StepReportKind
from penstock.flows.engine.engine import STEPS, FlowEngine
from penstock.flows.model import ClaimedStep, Prefetch, StepReport
from penstock.kernel.storage import Storage


class LocalWorkSource:
    """A source of steps that calls the engine in this process."""

    def __init__(self, engine: FlowEngine, storage: Storage) -> None:
        self._engine = engine
        self._storage = storage
        self._wakes = 0

    async def claim(self, worker: str, capacities: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        wakes = self._wakes

        async def is_woken() -> bool:
            return self._wakes > wakes

        return await self._engine.claim(worker, capacities, limit=limit, wait=wait, is_gone=is_woken)

    def wake(self) -> None:
        self._wakes += 1
        self._engine.notifier.notify(STEPS)

    async def settle(
        self, worker: str, done: Sequence[tuple[ClaimedStep, StepReport]], kinds: Sequence[str], capacity: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        section = self._engine.section
        unlimited = [kind for kind in kinds if kind not in section.limits]
        prefetch = Prefetch(unlimited, capacity, worker, self._engine.db.clock.now() + section.lease)
        # `settle_succeeded` neither checks a document nor publishes artifacts.
        plain = [
            n
            for n, (claimed, report) in enumerate(done)
            if report.outcome is StepReportKind.SUCCEEDED
            and not report.artifacts
            and claimed.kind not in self._engine.report_checks
        ]
        answers: dict[int, StepReportAnswer] = {}
        prefetched: list[ClaimedStep] = []
        # Reports that may raise an error first: the steps that the other reports claim must not be lost.
        if rest := [n for n in range(len(done)) if n not in plain]:
            answers.update(zip(rest, await self._engine.report([done[n][1] for n in rest], worker), strict=True))
        if plain:
            settled, settlement = await self._engine.settle_succeeded([done[n] for n in plain], prefetch)
            answers.update(zip(plain, settled, strict=True))
            prefetched = settlement.prefetched
        return [answers[n] for n in range(len(done))], prefetched

    async def heartbeat(self, claims: Sequence[tuple[str, str, int]]) -> Mapping[tuple[str, str, int], bool]:
        return await self._engine.heartbeat(claims)

    async def log(self, claimed: ClaimedStep, level: str, message: str) -> None:
        await self._engine.log(claimed.run_id, claimed.step_id, claimed.fence, [(level, message)])

    async def write(self, claimed: ClaimedStep, name: str, data: bytes) -> None:
        await artifacts.write(self._storage, claimed.run_id, claimed.step_id, claimed.fence, name, data)

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        return await self._engine.read_artifact(run_id, step_id, name)
