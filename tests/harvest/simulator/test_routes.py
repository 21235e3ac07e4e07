"""H17: paths, methods and the admin routes of the simulator."""

import orjson

from penstock.harvest.simulator.server import LocalSource
from tests.harvest.simulator.client import LocalSourceClient


async def test_paths_and_methods(client: LocalSourceClient) -> None:
    """H17: what is not there is 404, what is done the wrong way 405; the root tells what there is."""
    assert (await client.get("/diamonds", status=404))["error"]["code"] == "NO_SUCH_PATH"
    assert (await client.get("/graphql", status=405))["error"]["code"] == "WRONG_METHOD"
    assert (await client.post("/records", {}, status=405))["error"]["code"] == "WRONG_METHOD"
    async with client.session.get("/") as answer:
        assert "/records" in await answer.text()


async def test_faults_are_set_over_http_and_spare_the_admin(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: admin requests never fail; what is not told is as without faults; what makes no sense is refused."""
    assert (await client.post("/admin/faults", {"rate_500": 1}))["rate_500"] == 1
    await client.get("/records", status=500)
    assert (await client.get("/admin/stats"))["faults"] == {"500": 1}
    for wrong in ({"rate_500": 2}, {"rate_418": 1}, {"latency_ms": -1}):
        await client.post("/admin/faults", wrong, status=400)
    await client.get("/records", status=500)
    await client.post("/admin/faults", {})
    await client.get("/records")


async def test_changes_over_http(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: random changes are told by id, counted by generation, and visible at once to everybody."""
    before = source.truth()
    told = await client.post("/admin/changes", {"updates": 3, "inserts": 2, "deletes": 4})
    assert (len(told["updated"]), len(told["inserted"]), len(told["deleted"])) == (3, 2, 4)
    assert set(told["deleted"]) == before.keys() - source.truth().keys()
    assert (await client.get("/records"))["total"] == 398
    stats = await client.get("/admin/stats")
    assert (stats["total"], stats["generation"]) == (398, 1)
    await client.post("/admin/changes", {"updates": -1}, status=400)


async def test_the_whole_truth_can_be_read(client: LocalSourceClient, source: LocalSource) -> None:
    """H17: all records as they are now, a line each."""
    async with client.session.get("/admin/records") as answer:
        lines = (await answer.text()).splitlines()
    told = [orjson.loads(line) for line in lines]
    assert {record["id"]: record for record in told} == source.truth()
