"""F17: workers beside the database: they claim and report without a server between."""

from collections.abc import Mapping, Sequence

from penstock.flows import artifacts
from penstock.flows.contract import StepReportAnswer, StepReportKind
from penstock.flows.engine.engine import STEPS, FlowEngine
from penstock.flows.model import ClaimedStep, Prefetch, StepReport
from penstock.kernel.storage import Storage


class LocalWorkSource:
    """Steps straight from the engine."""

    def __init__(self, engine: FlowEngine, storage: Storage) -> None:
        self._engine = engine
        self._storage = storage
        self._hurried = 0

    async def claim(self, worker: str, rooms: Mapping[str, int], limit: int, wait: float) -> Sequence[ClaimedStep]:
        hurried = self._hurried

        async def is_hurried() -> bool:
            return self._hurried > hurried

        return await self._engine.claim(worker, rooms, limit=limit, wait=wait, is_gone=is_hurried)

    def hurry(self) -> None:
        self._hurried += 1
        self._engine.notifier.notify(STEPS)

    async def settle(
        self, worker: str, done: Sequence[tuple[ClaimedStep, StepReport]], kinds: Sequence[str], room: int
    ) -> tuple[Sequence[StepReportAnswer], Sequence[ClaimedStep]]:
        section = self._engine.section
        free = [kind for kind in kinds if kind not in section.limits]
        appetite = Prefetch(free, room, worker, self._engine.db.clock.now() + section.lease)
        with_check = self._engine.report_checks
        # `succeed` neither checks a document nor publishes artifacts.
        plain = [
            n
            for n, (held, report) in enumerate(done)
            if report.outcome is StepReportKind.SUCCEEDED and not report.artifacts and held.kind not in with_check
        ]
        answers: dict[int, StepReportAnswer] = {}
        handed: list[ClaimedStep] = []
        # Those that may fail first: what is handed over by the others must not be forgotten.
        if rest := [n for n in range(len(done)) if n not in plain]:
            said = await self._engine.report([done[n][1] for n in rest], worker)
            answers.update(zip(rest, said, strict=True))
        if plain:
            told, settled = await self._engine.succeed([done[n] for n in plain], appetite)
            answers.update(zip(plain, told, strict=True))
            handed = settled.prefetched
        return [answers[n] for n in range(len(done))], handed

    async def heartbeat(self, held: Sequence[tuple[str, str, int]]) -> Mapping[tuple[str, str, int], bool]:
        return await self._engine.heartbeat(held)

    async def log(self, held: ClaimedStep, level: str, message: str) -> None:
        await self._engine.log(held.run_id, held.step_id, held.fence, [(level, message)])

    async def write(self, held: ClaimedStep, name: str, data: bytes) -> None:
        await artifacts.write(self._storage, held.run_id, held.step_id, held.fence, name, data)

    async def read(self, run_id: str, step_id: str, name: str) -> bytes:
        return await self._engine.read(run_id, step_id, name)
