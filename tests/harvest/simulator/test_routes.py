"""H17: paths, methods and the admin routes of the simulator."""

import orjson

from penstock.harvest.simulator.server import LocalSource
from tests.harvest.simulator.client import LocalSourceClient


async def test_paths_and_methods(client: LocalSourceClient) -> None:
    """H17: an unknown path is 404, a wrong method 405, and the root lists the paths."""
    assert (await client.get("/diamonds", status=404))["error"]["code"] == "NO_SUCH_PATH"
    assert (await client.get("/graphql", status=405))["error"]["code"] == "WRONG_METHOD"
    assert (await client.post("/records", {}, status=405))["error"]["code"] == "WRONG_METHOD"
    async with client.session.get("/") as response:
        assert "/records" in await response.text()


async def test_faults_are_set_by_http(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: admin requests have no faults; missing fields have their defaults; invalid values are errors."""
    assert (await client.post("/admin/faults", {"rate_500": 1}))["rate_500"] == 1
    await client.get("/records", status=500)
    assert (await client.get("/admin/stats"))["faults"] == {"500": 1}
    for wrong in ({"rate_500": 2}, {"rate_418": 1}, {"latency_ms": -1}):
        await client.post("/admin/faults", wrong, status=400)
    await client.get("/records", status=500)
    await client.post("/admin/faults", {})
    await client.get("/records")


async def test_changes_by_http(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: random changes are returned by id, counted as a generation, and visible at once."""
    before = source.read_truth()
    changes = await client.post("/admin/changes", {"updates": 3, "inserts": 2, "deletes": 4})
    assert (len(changes["updated"]), len(changes["inserted"]), len(changes["deleted"])) == (3, 2, 4)
    assert set(changes["deleted"]) == before.keys() - source.read_truth().keys()
    assert (await client.get("/records"))["total"] == 398
    stats = await client.get("/admin/stats")
    assert (stats["total"], stats["generation"]) == (398, 1)
    await client.post("/admin/changes", {"updates": -1}, status=400)


async def test_all_records_can_be_read(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: the response has all present records, one per line."""
    async with client.session.get("/admin/records") as response:
        lines = (await response.text()).splitlines()
    records = [orjson.loads(line) for line in lines]
    assert {record["id"]: record for record in records} == source.read_truth()
