"""deploy/istio: what Istio would take, and what it makes of every request of the product."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jsonschema
import jwt
import pytest
from ruamel.yaml import YAML

from penstock.app.apis import Parts, PublicApis, make_api, make_command_api
from penstock.app.factories import make_telemetry
from penstock.flows.contract import WAIT_LIMIT as FLOWS_WAIT
from penstock.kernel.errors import Unauthorized
from penstock.kernel.http.auth import JwtAuthenticator, JwtSection, NoAuthenticator
from penstock.kernel.http.health import ALIASES, LivenessPulse
from penstock.kernel.http.keys import SharedSecret
from penstock.refdata.commands.service import Refdata
from penstock.refdata.config import QuerySection
from penstock.settings import Settings
from penstock.tracking.contract import WAIT_LIMIT as TRACKING_WAIT
from tests.deploy.kubernetes.istio_envoy import BREAKS, Envoy, envoy
from tests.deploy.kubernetes.istio_policies import IstioRequest, is_let_in
from tests.deploy.kubernetes.istio_routes import FOLDER, chosen, objects, of_kind, patterns, table
from tests.support.require import require

ROOT = Path(__file__).parents[3]
CRDS = ROOT / ".build" / "tools" / "istio-crds-v1.31.1.json"
HELM = ROOT / ".build" / "tools" / "bin" / "helm"
CHART = ROOT / "deploy" / "helm" / "penstock"
NAMESPACE = "penstock"
GATEWAY = "cluster.local/ns/istio-ingress/sa/istio-ingress"
PROMETHEUS = "cluster.local/ns/monitoring/sa/prometheus"
ROLES = ["api", "command-api", "query", "apply", "relay", "kafka-adapter", "harvest", "flows", "ingest"]
READS = {"GET", "HEAD"}
SAFE_TO_REPEAT = {"connect-failure", "refused-stream", "reset-before-request"}
_METHODS = ("get", "head", "post", "put", "delete", "patch", "options")
_SAMPLES = {"tenantId": "acme", "key": "a%2Fb", "name": "charts/one.png", "transition": "start"}
_STREAMED = {"text/event-stream", "application/x-ndjson", "application/octet-stream", "*/*"}
_SECRET = "0123456789abcdef0123456789abcdef"
_PAGE = ROOT / "docs" / "deploy" / "istio.md"
_DURATION_RULE = "duration(self) >= duration('1ms')"

# --- what Istio would take ---


@pytest.mark.parametrize("name", ["kustomization.yaml", "tenant.example.yaml"])
def test_every_object_is_as_istios_own_schemas_say(name: str) -> None:
    """R27: each object of deploy/istio is of a served version, has no unknown field, and every value is allowed."""
    found = objects() if name == "kustomization.yaml" else objects(name)
    for resource in found:
        if resource["kind"] == "NetworkPolicy":  # Kubernetes' own
            continue
        schema = _schema(resource["apiVersion"], resource["kind"])
        jsonschema.validate({"spec": resource["spec"]}, schema)
        assert _broken_rules(resource["spec"], schema["properties"]["spec"]) == [], resource["metadata"]["name"]
        assert resource["metadata"]["namespace"] == NAMESPACE


def test_the_schemas_refuse_what_istio_refuses() -> None:
    """R27: a field misspelt, or a time-out of nothing, is found by the test above."""
    schema = _schema("networking.istio.io/v1", "VirtualService")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"spec": {"http": [{"timeOut": "1s"}]}}, schema)
    assert _broken_rules({"http": [{"timeout": "0s"}]}, schema["properties"]["spec"]) == ["http.timeout"]


def test_kustomize_applies_every_file() -> None:
    """R27: what lies in the folder is applied, but for the example and what belongs to Prometheus."""
    applied = set(YAML(typ="safe").load(FOLDER / "kustomization.yaml")["resources"])
    left = {file.name for file in FOLDER.glob("*.yaml")} - applied
    assert left == {"kustomization.yaml", "tenant.example.yaml", "prometheus-scrape.yaml"}


def test_mutual_tls_is_strict_without_exception() -> None:
    """R27: the whole namespace, every port, both ways."""
    [found] = of_kind("PeerAuthentication")
    assert found["spec"] == {"mtls": {"mode": "STRICT"}}
    for rule in of_kind("DestinationRule"):
        assert rule["spec"]["trafficPolicy"]["tls"] == {"mode": "ISTIO_MUTUAL"}


def test_every_service_has_a_circuit_breaker_and_they_are_those_routed_to() -> None:
    """R27: a connection pool and the ejection of pods, but never of all pods."""
    rules = {rule["spec"]["host"]: rule["spec"]["trafficPolicy"] for rule in of_kind("DestinationRule")}
    assert set(rules) == {route.host for route in table() if route.host}
    for policy in rules.values():
        assert policy["connectionPool"]["http"]["http1MaxPendingRequests"] > 0
        assert policy["outlierDetection"]["maxEjectionPercent"] <= 50
        assert policy["loadBalancer"] == {"simple": "LEAST_REQUEST", "localityLbSetting": {"enabled": True}}


def test_a_proxy_lets_go_of_idle_connections_before_penstock_does() -> None:
    """R27: no write meets a connection that is being closed: Penstock keeps one for 75 s."""
    [found] = of_kind("Sidecar")
    assert _seconds(found["spec"]["inboundConnectionPool"]["http"]["idleTimeout"]) < 75


# --- who answers what ---


def test_every_path_goes_to_the_role_that_serves_it() -> None:
    """R27: what the applications and the pod declare is led to one that has it; health and metrics are not."""
    for role, method, path, _ in _operations():
        route = chosen(method, path)
        if path.startswith("/actuator") or path in ALIASES:
            assert route is None or route.host is None, path
        else:
            assert route is not None, path
            assert role in _served(route.role, method, path), f"{method} {path} goes to {route.role}"


@pytest.mark.parametrize(
    "path",
    ["/", "/docs", "/openapi.json", "/actuator", "/actuator/prometheus", "/%61ctuator/prometheus", "/v1", *ALIASES],
)
def test_nothing_else_is_led_anywhere(path: str) -> None:
    """R27: there is no route for the rest: what Penstock would decode into /actuator finds none either."""
    route = chosen("GET", path)
    assert route is None or route.host is None


def test_no_write_is_tried_again() -> None:
    """R8: a command may come without an eventId, and only Penstock sees it: its sender repeats it, not the mesh."""
    for route in table():
        taken = {
            method
            for _, method, path, _ in _operations()
            if route.takes(method, path) and chosen(method, path) == route
        }
        if route.host and not taken <= READS:
            assert route.attempts == 0, route.name
        elif route.host:
            assert route.attempts == 2, route.name
            assert route.conditions
            assert route.conditions <= SAFE_TO_REPEAT | {"reset"}


def test_streams_have_no_time_out_and_all_else_has() -> None:
    """R27, R31: server-sent events and NDJSON go on for as long as they like."""
    for _, method, path, streams in _operations():
        route = chosen(method, path)
        if route is None:
            assert path in ALIASES, path
        elif method == "GET" and streams:
            assert route.timeout is None, path
            assert route.conditions <= SAFE_TO_REPEAT, path  # a request that was processed is not sent again
        elif route.host and method != "HEAD" and not path.endswith("/audit"):  # which reads all there is
            assert route.timeout is not None, path


def test_time_outs_leave_penstock_its_own() -> None:
    """R6, R21: who waits for a commit, a version or a claim is answered by Penstock, not cut off by the mesh."""
    waits = {
        ("POST", "/v1/tenants/acme/updates"): 1.0,
        ("GET", "/v1/tenants/acme/dictionaries/RATES/items/EUR"): _longest_barrier(),
        ("POST", "/api/v1/flow_steps/claim"): FLOWS_WAIT,
        ("POST", "/api/v1/pipeline/queues/parse/claim"): TRACKING_WAIT,
    }
    for (method, path), within in waits.items():
        route = chosen(method, path)
        assert route is not None
        assert route.timeout is not None
        assert route.timeout > within


def test_a_real_envoy_reads_the_routes_as_we_do(behind_envoy: Envoy) -> None:
    """R27: role, time-out and 404 of every operation of the product, asked of Envoy itself."""
    with httpx.Client(base_url=behind_envoy.url) as client:
        for _, method, path, _ in _operations():
            route, answer = chosen(method, path), client.request(method, path)
            if route is None or route.host is None:
                assert answer.status_code == 404, path
                assert path.startswith("/actuator") or path in ALIASES
                continue
            assert answer.headers["x-role"] == route.role, path
            assert (answer.headers["x-within"] == "ever") == (route.timeout is None), path
        for path in ("/", "/docs", "/%61ctuator/prometheus", "/v1/tenants/../../actuator/health", "/v1", "/apiary"):
            assert client.get(path).status_code == 404, path


@pytest.mark.parametrize(
    ("method", "path", "times"),
    [
        ("GET", "/v1/tenants/acme/dictionaries/RATES/items/EUR", 3),
        ("GET", "/v1/tenants/acme/history/RATES", 3),
        ("POST", "/v1/tenants/acme/updates", 1),
        ("PUT", "/v1/tenants/acme/pins/RATES", 1),
        ("POST", "/api/v1/flow_runs", 1),
        ("GET", "/v1/tenants/acme/dictionaries/RATES/changes", 1),
    ],
)
def test_a_broken_answer_is_asked_for_again_only_by_reads(
    behind_envoy: Envoy, method: str, path: str, times: int
) -> None:
    """R27: Envoy itself repeats a read whose connection broke, and never a write or a stream."""
    route = chosen(method, path)
    assert route is not None
    role = behind_envoy.roles[str(route.host)]
    before = role.broken
    assert httpx.request(method, behind_envoy.url + path, headers={BREAKS: "1"}).status_code == 503
    assert role.broken - before == times


def test_patterns_are_such_that_re2_and_python_agree() -> None:
    """R27: letters, classes, groups and repetition; nothing that only one of them knows."""
    for pattern in patterns():
        assert re.fullmatch(r"(?:[\w/|]|\[\^/\]\+|\.\+|\((?!\?)|\))+", pattern), pattern


# --- who is let in ---


def test_a_valid_token_with_a_tenant_comes_in_through_the_gateway() -> None:
    """R25: to the roles that serve tenants, by the paths they have."""
    for component, method, path in [
        ("query", "GET", "/v1/tenants/acme/dictionaries/RATES/items/EUR"),
        ("command-api", "POST", "/v1/tenants/acme/updates"),
        ("api", "GET", "/api/v1/whoami"),
        ("api", "POST", "/api/v1/pipeline/files/register"),
    ]:
        assert _is_let_in(component, method, path, claims=_token(tenant_id="acme"))


def test_every_operation_is_let_in_for_a_token_that_may() -> None:
    """R25: no rule is narrower than the product; the tenants' paths want a tenant, the house's want none."""
    for _, method, path, _ in _operations():
        route = chosen(method, path)
        if route is None or route.role is None:
            continue
        claims = _token(tenant_id="acme") if path.startswith("/v1/") else _token()
        assert _is_let_in(route.role, method, path, claims=claims) or method == "HEAD", f"{method} {path}"
        assert not _is_let_in(route.role, method, path, claims={}), path
        assert not _is_let_in(route.role, method, path, peer="cluster.local/ns/other/sa/other", claims=claims), path


def test_a_token_without_a_tenant_reads_no_dictionary_and_one_with_a_tenant_no_feed() -> None:
    """R25: the tenant's claim has to be there for tenants' paths, and must not be for the house's own."""
    assert not _is_let_in("query", "GET", "/v1/tenants/acme/dictionaries/RATES/version", claims=_token())
    assert not _is_let_in("command-api", "POST", "/v1/tenants/acme/updates", claims=_token())
    for path in ("/api/v1/harvest/feeds", "/api/v1/flow_runs", "/api/v1/ingest/suppliers"):
        assert not _is_let_in("api", "GET", path, claims=_token(tenant_id="acme"))
        assert _is_let_in("api", "GET", path, claims=_token())


@pytest.mark.parametrize("tenant", [42, True, {"id": "acme"}, [42]], ids=repr)
async def test_a_tenant_that_is_no_text_is_none_to_istio_and_no_token_to_penstock(tenant: object) -> None:
    """R25: the mesh, for which such a claim is not there, would let it to the house's paths; Penstock does not."""
    claims = _token(tenant_id=tenant)
    assert not _is_let_in("query", "GET", "/v1/tenants/acme/dictionaries/RATES/version", claims=claims)
    assert _is_let_in("api", "GET", "/api/v1/harvest/feeds", claims=claims)
    token = jwt.encode({**claims, "exp": 4_000_000_000}, _SECRET, algorithm="HS256")
    authenticator = JwtAuthenticator(SharedSecret(_SECRET), algorithms=["HS256"])
    with pytest.raises(Unauthorized, match="tenant_id"):
        await authenticator.authenticate(f"Bearer {token}")


def test_a_list_of_tenants_is_each_of_them_to_istio() -> None:
    """R25: to the mesh, that is; Penstock takes a text only."""
    assert _is_let_in("query", "GET", "/v1/tenants/acme/dictionaries/RATES/version", claims=_token(tenant_id=["acme"]))
    assert not _is_let_in("api", "GET", "/api/v1/harvest/feeds", claims=_token(tenant_id=["acme"]))


def test_the_claim_is_the_one_penstock_reads() -> None:
    """R25: unless another one is configured."""
    conditions = [
        condition["key"]
        for policy in [*of_kind("AuthorizationPolicy"), *objects("tenant.example.yaml")]
        for rule in policy["spec"].get("rules", ())
        for condition in rule.get("when", ())
    ]
    assert set(conditions) == {f"request.auth.claims[{JwtSection.model_fields['tenant_claim'].default}]"}


def test_the_page_lists_all_values_to_adapt() -> None:
    """R27: hosts, issuer, keys, audience, the tenant's claim and principals of the files are all in the list."""
    table = re.search(r"^Adapt these values first.*?(?=^\| file)", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert table is not None
    [gateway], [authentication] = of_kind("Gateway"), of_kind("RequestAuthentication")
    [rule] = authentication["spec"]["jwtRules"]
    own = {host for server in gateway["spec"]["servers"] for host in server["hosts"]}
    own |= {rule["issuer"], *rule["audiences"], "jwksUri", "tenant_id", "auth.jwt.tenant_claim"}
    own |= {"/".join(name.split("/")[2::2]) for name in (GATEWAY, PROMETHEUS)}
    assert [word for word in own if f"`{word}`" not in table[0]] == []


def test_another_issuers_token_is_nobodys() -> None:
    """R25: the issuer of the rules is that of the RequestAuthentication, and the token goes on to Penstock."""
    [found] = of_kind("RequestAuthentication")
    [rule] = found["spec"]["jwtRules"]
    assert rule["forwardOriginalToken"] is True
    assert rule["issuer"] == _token()["iss"]
    claims = {**_token(tenant_id="acme"), "iss": "https://elsewhere.example"}
    assert not _is_let_in("query", "GET", "/v1/tenants/acme/dictionaries/RATES/version", claims=claims)


@pytest.mark.parametrize("component", ROLES)
def test_only_prometheus_reaches_metrics_and_only_kubelet_health(component: str) -> None:
    """R27: never through the gateway, with whatever token; and Prometheus gets nothing else."""
    assert _is_let_in(component, "GET", "/actuator/prometheus", peer=PROMETHEUS, claims={})
    assert _is_let_in(component, "GET", "/metrics", peer=PROMETHEUS, claims={})
    assert not _is_let_in(component, "GET", "/actuator/health", peer=PROMETHEUS, claims={})
    for claims in ({}, _token(), _token(tenant_id="acme")):
        for path in ("/actuator/prometheus", "/actuator/health", *ALIASES, "/docs", "/"):
            assert not _is_let_in(component, "GET", path, claims=claims)


def test_the_wall_around_one_tenant_lets_only_its_own_token_through() -> None:
    """R25: tenant.example.yaml compares the claim with the path, for the one tenant it names."""
    walls = [*of_kind("AuthorizationPolicy"), *objects("tenant.example.yaml")]
    path = "/v1/tenants/acme/dictionaries/RATES/version"
    assert is_let_in(walls, IstioRequest("query", "GET", path, GATEWAY, _token(tenant_id="acme")))
    assert not is_let_in(walls, IstioRequest("query", "GET", path, GATEWAY, _token(tenant_id="other")))
    elsewhere = path.replace("acme", "other")
    assert is_let_in(walls, IstioRequest("query", "GET", elsewhere, GATEWAY, _token(tenant_id="other")))


# --- as the chart has it ---


def test_selectors_hosts_and_ports_are_the_charts() -> None:
    """R27: every policy selects pods of the chart, every route leads to one of its Services and a port it has."""
    made = _rendered()
    pods = [_pod_labels(resource) for resource in made if resource["kind"] in ("Deployment", "StatefulSet")]
    for policy in [*of_kind("AuthorizationPolicy"), *of_kind("RequestAuthentication")]:
        wanted = policy["spec"].get("selector", {}).get("matchLabels", {})
        assert any(wanted.items() <= labels.items() for labels in pods), policy["metadata"]["name"]
    ports = {
        f"{resource['metadata']['name']}.{NAMESPACE}.svc.cluster.local": {
            port["port"] for port in resource["spec"]["ports"]
        }
        for resource in made
        if resource["kind"] == "Service"
    }
    [service] = of_kind("VirtualService")
    for found in service["spec"]["http"]:
        for to in found.get("route", ()):
            assert to["destination"]["port"]["number"] in ports[to["destination"]["host"]]


def test_the_network_is_open_to_the_gateway_and_to_istiod() -> None:
    """R27: the chart's NetworkPolicies close both; this one opens the ports of the Services, and istiod's."""
    [policy] = [resource["spec"] for resource in objects() if resource["kind"] == "NetworkPolicy"]
    [service] = of_kind("VirtualService")
    ports = {to["destination"]["port"]["number"] for found in service["spec"]["http"] for to in found.get("route", ())}
    [inward], [outward] = policy["ingress"], policy["egress"]
    assert {port["port"] for port in inward["ports"]} == ports
    assert GATEWAY.split("/")[2] == _namespace(inward["from"])
    assert [port["port"] for port in outward["ports"]] == [15012]


def test_prometheus_finds_in_the_mesh_what_it_finds_without() -> None:
    """R27: the scrape configuration is that of deploy/prometheus but for TLS: the same pods, with the same labels."""
    plain, meshed = (
        YAML(typ="safe").load(file)["scrape_configs"]
        for file in (ROOT / "deploy" / "prometheus" / "prometheus-kubernetes.yaml", FOLDER / "prometheus-scrape.yaml")
    )
    [job] = meshed
    assert [{key: value for key, value in job.items() if key not in ("scheme", "tls_config")}] == plain


def test_the_values_for_the_mesh_are_taken_by_the_chart() -> None:
    """R27: as docs/deploy/istio.md gives them they keep merged metrics off every role, and proxies off what ends."""
    given = re.findall(r"^```yaml\n(# values of the chart\n.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    pods = {
        resource["metadata"]["labels"]["app.kubernetes.io/component"]: resource.get("spec", {}).get(
            "template", resource
        )["metadata"]
        for resource in _rendered(*given)
        if resource["kind"] in ("Deployment", "Job", "Pod")
    }
    assert {"migrate", "doctor", "api"} < set(pods)
    for component, metadata in pods.items():
        if component in ("migrate", "doctor"):
            assert metadata["labels"]["sidecar.istio.io/inject"] == "false", component
        else:
            assert metadata["annotations"]["prometheus.istio.io/merge-metrics"] == "false", component
            assert metadata["annotations"]["sidecar.istio.io/nativeSidecar"] == "true", component


def test_prometheus_takes_the_scrape_configuration(tmp_path: Path) -> None:
    """R27: with a client's certificate; Debian's promtool has no Kubernetes in it, so that part is left out here."""
    if shutil.which("promtool") is None:
        require("promtool")
    given = YAML(typ="safe").load(FOLDER / "prometheus-scrape.yaml")
    [job] = given["scrape_configs"]
    del job["kubernetes_sd_configs"]
    assert job["scheme"] == "https"
    assert job["tls_config"].keys() >= {"cert_file", "key_file"}
    (tmp_path / "prometheus.yml").write_text(json.dumps(given))
    command = ["promtool", "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- behind the tests ---


@pytest.fixture(scope="module")
def behind_envoy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Envoy]:
    with envoy(tmp_path_factory.mktemp("envoy")) as found:
        yield found


Operation = tuple[str, str, str, bool]


@cache
def _operations() -> tuple[Operation, ...]:
    """Role, method and path of everything the product declares, and whether the answer is a stream."""
    telemetry = make_telemetry(Settings())
    web = PublicApis(Settings(), telemetry, NoAuthenticator())
    parts = cast("Parts", SimpleNamespace(**dict.fromkeys(Parts.__dataclass_fields__)))
    documents = {
        "api": make_api(web, LivenessPulse({}, needs=[]), parts).openapi(),
        "command-api": make_command_api(web, LivenessPulse({}, needs=[]), cast("Refdata", None)).openapi(),
        "query": json.loads(files("penstock.refdata.pod").joinpath("openapi.json").read_text()),
    }
    telemetry.close()
    found = [
        (role, method.upper(), _sample(path), _is_stream(operation, document))
        for role, document in documents.items()
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if method in _METHODS
    ]
    assert {"api", "command-api", "query"} == {role for role, *_ in found}
    return tuple(found)


def _served(role: str | None, method: str, path: str) -> set[str]:
    """Every role that has an operation, if *role* is among them."""
    roles = {name for name, known, place, _ in _operations() if (known, place) == (method, path)}
    return roles if role in roles else set()


def _sample(path: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: _SAMPLES.get(found[1], "x1"), path)


def _is_stream(operation: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    answer = operation["responses"].get("200", {})
    if "$ref" in answer:
        answer = document["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    return bool(_STREAMED & set(answer.get("content", {})))


def _longest_barrier() -> float:
    query = QuerySection()
    return (query.barrier_wait_ms + query.fallback_timeout_ms) / 1000


def _token(**claims: object) -> dict[str, object]:
    return {"iss": "https://issuer.example.com", "sub": "ann", **claims}


def _is_let_in(component: str, method: str, path: str, *, claims: Mapping[str, object], peer: str = GATEWAY) -> bool:
    return is_let_in(of_kind("AuthorizationPolicy"), IstioRequest(component, method, path, peer, claims))


@cache
def _crds() -> list[dict[str, Any]]:
    if not CRDS.exists():
        require("istio-crds", "Istio's schemas are not here: scripts/deploy-tools brings them")
    found: list[dict[str, Any]] = json.loads(CRDS.read_text())
    return found


@cache
def _schema(version: str, kind: str) -> dict[str, Any]:
    group, _, name = version.partition("/")
    [crd] = [crd["spec"] for crd in _crds() if (crd["spec"]["group"], crd["spec"]["names"]["kind"]) == (group, kind)]
    [served] = [version for version in crd["versions"] if version["name"] == name and version["served"]]
    schema: dict[str, Any] = served["schema"]["openAPIV3Schema"]
    _close(schema)
    return schema


def _close(schema: Any) -> None:
    """Kubernetes drops fields that a structural schema does not name; here they are errors."""
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)
        for inner in schema.values():
            _close(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _close(inner)


def _broken_rules(value: Any, schema: Mapping[str, Any], place: str = "") -> list[str]:
    """Where a value breaks a rule of x-kubernetes-validations, of which this knows those on durations."""
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        return [
            bad
            for name, resource in value.items()
            for bad in _broken_rules(resource, inner.get(name, {}), f"{place}.{name}".lstrip("."))
        ]
    if isinstance(value, list):
        return [bad for resource in value for bad in _broken_rules(resource, schema.get("items", {}), place)]
    rules = {rule["rule"] for rule in schema.get("x-kubernetes-validations", ())}
    return [place] if _DURATION_RULE in rules and _seconds(value) < 0.001 else []


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(ms|s|m|h)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit]


@cache
def _rendered(*files: str) -> list[dict[str, Any]]:
    """The chart's objects, with values of these texts."""
    helm = shutil.which("helm") or (str(HELM) if HELM.exists() else None)
    if helm is None:
        require("helm")
    values = [
        "image.repository=penstock",
        "database.url=postgresql://penstock@db/penstock",
        "auth.jwt.jwks_url=https://issuer.example.com/jwks",
        "storage.url=s3://penstock",
    ]
    sets = [word for value in values for word in ("--set", value)]
    command = [helm, "template", "penstock", str(CHART), "--namespace", NAMESPACE, "--values=-", *sets]
    done = subprocess.run(command, input="\n".join(files), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [found for found in YAML(typ="safe").load_all(done.stdout) if found]


def _namespace(peers: list[dict[str, Any]]) -> str:
    [peer] = peers
    return str(peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"])


def _pod_labels(resource: Mapping[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = resource["spec"]["template"]["metadata"]["labels"]
    return labels
