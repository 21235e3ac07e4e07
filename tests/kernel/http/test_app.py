"""The HTTP application around every route: tokens and the page of the API."""

import httpx
import jwt

from tests.kernel.http.routes_app import SECRET


async def test_a_token_is_valid_for_its_tenant_only(http: httpx.AsyncClient) -> None:
    """R25: no token and an invalid token are 401, the token of another tenant is 403, the right token is 200."""
    token = jwt.encode({"tenant_id": "a", "sub": "ann", "exp": 4_000_000_000}, SECRET, algorithm="HS256")
    mine = {"authorization": f"Bearer {token}"}
    missing, bad = await http.get("/tenants/a"), await http.get("/tenants/a", headers={"authorization": "Bearer x"})
    assert (missing.status_code, missing.headers["www-authenticate"]) == (401, "Bearer")
    assert bad.status_code == 401
    assert (await http.get("/tenants/b", headers=mine)).status_code == 403
    assert (await http.get("/tenants/a", headers=mine)).status_code == 200


async def test_the_page_of_the_api_needs_no_internet(http: httpx.AsyncClient) -> None:
    """The page of the API loads scripts from this server only."""
    assert (await http.get("/openapi.json")).json()["openapi"].startswith("3.1")
    page = (await http.get("/docs")).text
    assert "https://" not in page
    for name in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert (await http.get(f"/swagger/{name}")).status_code == 200
