"""What one would write with FastAPI: the same checks and the same headers as a pod, from a dict, under uvicorn."""

import argparse
import json
import os
import socket
import time
from typing import Annotated, Any

import jwt
import uvicorn
from fastapi import FastAPI, Header, HTTPException, Response

TENANT, DICTIONARY = "bench", "RATES"
SECRET = "BENCH_JWT_SECRET"  # the variable that has it
VERSION = 1


def make_app(secret: str, items: dict[str, bytes]) -> FastAPI:
    app = FastAPI()
    known: dict[str, dict[str, Any]] = {}  # tokens that were verified before

    def tenant_of(authorization: str | None) -> object:
        claims = known.get(authorization or "")
        if claims is None or claims["exp"] < time.time():
            try:
                claims = jwt.decode((authorization or "").removeprefix("Bearer "), secret, algorithms=["HS256"])
            except jwt.PyJWTError as error:
                raise HTTPException(401, "the token is not accepted") from error
            known[authorization or ""] = claims
        return claims.get("tenant_id")

    @app.get("/v1/tenants/{tenant_id}/dictionaries/{dict_code}/items/{key}")
    async def item(
        tenant_id: str,
        dict_code: str,
        key: str,
        authorization: Annotated[str | None, Header()] = None,
        x_min_version: Annotated[int, Header()] = 0,
    ) -> Response:
        if tenant_of(authorization) != tenant_id:
            raise HTTPException(403, "this token does not act for that tenant")
        if x_min_version > VERSION:
            raise HTTPException(409, "VERSION_NOT_COMMITTED")
        body = items.get(key) if dict_code == DICTIONARY else None
        if body is None:
            raise HTTPException(404, "no such item")
        headers = {
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
            "X-Dict-Version": str(VERSION),
            "X-Data-Source": "memory",
            "ETag": '"0123456789abcdef"',
        }
        return Response(body, media_type="application/json", headers=headers)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, required=True)
    parser.add_argument("--body", required=True)
    args = parser.parse_args()
    items = {f"{number:08}": args.body.encode() for number in range(args.items)}
    app = make_app(os.environ[SECRET], items)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(json.dumps({"api": f"http://127.0.0.1:{listening.getsockname()[1]}"}), flush=True)
        config = uvicorn.Config(app, http="httptools", loop="uvloop", access_log=False, log_level="error")
        uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main()
