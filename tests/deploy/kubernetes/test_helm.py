"""R27: the Helm chart, rendered with each of its examples."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app
from penstock.kernel.http.health import LivenessPulse, make_router
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import load_settings
from tests.deploy.kubernetes.helm_chart import (
    CHART,
    EXAMPLES,
    RELEASE,
    HelmRefused,
    Rendered,
    example,
    load,
    render,
    role_of,
    run,
    selects,
)
from tests.deploy.kubernetes.helm_kubernetes import mistakes, newest

OLDEST = "1.27"
NAMES = [file.stem for file in EXAMPLES]
MINIMAL = CHART.parent / "examples" / "minimal.yaml"
SERVING = {"api": 8080, "command-api": 8080, "query": 8081}
ALWAYS = {*SERVING, "apply", "relay", "flows"}
EVERY = {*ALWAYS, "kafka-adapter", "harvest", "ingest"}
SCALED = {"api", "command-api", "query", "apply", "harvest", "flows"}
CHECKSUM = "checksum/config-read-at-the-start"

each_example = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_helm_lint_finds_nothing(file: Path) -> None:
    """R27: `helm lint --strict` has nothing to say."""
    output = run("lint", "--strict", str(CHART), f"--values={file}")
    assert "0 chart(s) failed" in output
    assert "[WARNING]" not in output


@pytest.mark.parametrize("version", [OLDEST, newest()])
@each_example
def test_kubernetes_understands_every_object(name: str, version: str) -> None:
    """R27: every object is right by Kubernetes' schema of it, without a field that is unknown there."""
    found = example(name)
    assert [mistake for resource in found.objects for mistake in mistakes(resource, version)] == []
    assert len(found.objects) > 20


@pytest.mark.parametrize(
    "values",
    [
        {"networkPolicy.enabled": False, "migrate.enabled": False},
        {"serviceAccount.create": False, "serviceAccount.name": "mine", "image.pullSecrets": ["registry"]},
        {"securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
        {"networkPolicy.prometheus": [], "networkPolicy.clients": [], "networkPolicy.extraEgress": [{"ports": []}]},
        {"auth.jwt": {"jwksConfigMap": "keys"}, "database.existingSecret": "", "fullnameOverride": "data"},
    ],
    ids=",".join,
)
def test_whatever_is_switched_kubernetes_understands_it(values: Mapping[str, Any]) -> None:
    """R27: also with parts of it switched off or made by others, all objects are right."""
    found = render(MINIMAL, values=values)
    assert [mistake for resource in found.objects for mistake in mistakes(resource, newest())] == []
    accounts = {pod["serviceAccountName"] for _, pod in found.pods()}
    assert accounts == set(found.of_kind("ServiceAccount")) or accounts == {"mine"}


def test_the_chart_says_which_kubernetes_and_penstock_it_is_for() -> None:
    """R27: the oldest Kubernetes that is tried is the one the chart asks for, and the release is this one."""
    chart = load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"
    assert chart["appVersion"] == penstock.__version__


@each_example
def test_penstock_takes_the_configuration(name: str, tmp_path: Path) -> None:
    """R27: the penstock.yaml of every release loads."""
    (tmp_path / "penstock.yaml").write_text(example(name).config_text())
    settings = load_settings(tmp_path / "penstock.yaml", {})
    assert settings.server.host == "0.0.0.0"
    assert settings.auth.jwt is not None


def test_values_become_the_configuration(tmp_path: Path) -> None:
    """R27: connections given as values, and what `config` adds, are in the configuration of Penstock."""
    (tmp_path / "penstock.yaml").write_text(example("production").config_text())
    settings = load_settings(tmp_path / "penstock.yaml", {})
    assert settings.bus.kafka is not None
    assert settings.bus.kafka.secrets == {"sasl.password": "file:/etc/penstock/secrets/kafka-sasl.password"}
    assert settings.signals.redis is not None
    assert len(settings.signals.redis.nodes) == 3
    assert settings.storage.url == "s3://penstock/objects"
    assert settings.harvest.feeds["stones"].partitions.highest == 250_000_000
    assert [dictionary.code for dictionary in settings.refdata.dictionaries] == ["RATES"]
    assert example("postgresql-only").config()["auth"]["jwt"]["algorithms"] == ["HS256"]


@each_example
def test_whatever_the_configuration_refers_to_is_there(name: str) -> None:
    """R27: every env: and file: of penstock.yaml is a variable or a file of every container."""
    text = example(name).config_text()
    variables = {*re.findall(r"\benv:(\w+)", text), *re.findall(r"FromEnv: (\w+)", text)}
    paths = set(re.findall(r"/etc/penstock/secrets/([\w.-]+)", text))
    for pod_name, pod in example(name).pods():
        sources = [resource for volume in pod["volumes"] for resource in volume.get("projected", {}).get("sources", ())]
        files = {item["path"] for source in sources for item in next(iter(source.values()))["items"]}
        assert paths <= files, pod_name
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert variables <= {resource["name"] for resource in container["env"]}, pod_name
            assert "secrets" in {mount["name"] for mount in container["volumeMounts"]} or not files, pod_name


def test_every_container_runs_a_command_that_exists() -> None:
    """R27: the arguments of each container are a command of `penstock` with valid options."""
    containers = [container for name in NAMES for _, container in example(name).containers()]
    assert {tuple(container["command"]) for container in containers} == {("penstock",)}
    for arguments in {tuple(container["args"]) for container in containers}:
        output = CliRunner().invoke(app, [*arguments, "--help"])
        assert output.exit_code == 0, f"{arguments}: {output.output}"


def test_every_role_is_a_deployment_of_one_image() -> None:
    """R27: each role that has something to do has its own Deployment, all of them from one image."""
    assert set(example("production").roles()) == EVERY
    assert set(example("minimal").roles()) == ALWAYS
    for name in NAMES:
        assert len({container["image"] for _, container in example(name).containers()}) == 1
    for role, resource in example("production").roles().items():
        assert role in " ".join(resource["spec"]["template"]["spec"]["containers"][0]["args"]), role


def test_a_role_can_be_left_out() -> None:
    """R27: `enabled: false` leaves nothing of a role."""
    found = render(MINIMAL, values={"roles.flows.enabled": False})
    assert set(found.roles()) == ALWAYS - {"flows"}
    assert [resource for resource in found.objects if resource["metadata"]["name"] == f"{RELEASE}-flows"] == []


@pytest.mark.parametrize("name", ["minimal", "production"])
def test_every_role_has_three_replicas_or_more(name: str) -> None:
    """R27: by default a role has at least three pods."""
    found = example(name)
    for role, resource in found.roles().items():
        scaler = found.scalers().get(resource["metadata"]["name"])
        count = scaler["spec"]["minReplicas"] if scaler else resource["spec"]["replicas"]
        assert count >= 3, role


@each_example
def test_either_the_deployment_or_its_scaler_says_how_many(name: str) -> None:
    """R27: an upgrade does not undo what the autoscaler did; roles of which more do not do more have none."""
    found = example(name)
    assert set(found.scalers()) <= set(found.of_kind("Deployment"))
    for role, resource in found.roles().items():
        is_scaled = resource["metadata"]["name"] in found.scalers()
        assert is_scaled != ("replicas" in resource["spec"]), role
        assert not is_scaled or role in SCALED
        cpu = resource["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        assert cpu, "a share of nothing cannot be measured"


def test_scaling_down_is_slow() -> None:
    """R27: pods come quickly and go one by one."""
    scaler = example("production").scalers()[f"{RELEASE}-query"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (6, 30)
    assert scaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"] >= 300
    assert scaler["behavior"]["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]
    assert scaler["metrics"][0]["containerResource"]["container"] == "penstock"


@each_example
def test_a_role_is_one_pod_short_at_most(name: str) -> None:
    """R27: each role has a PodDisruptionBudget that selects its pods and no others."""
    found = example(name)
    budgets = found.of_kind("PodDisruptionBudget").values()
    assert {role_of(budget) for budget in budgets} == set(found.roles())
    for budget in budgets:
        assert budget["spec"]["maxUnavailable"] == 1
        assert _selected(found, budget["spec"]["selector"]) == {role_of(budget)}


@each_example
def test_the_pods_of_a_role_are_spread(name: str) -> None:
    """R27: over nodes and zones, each role by itself."""
    for role, resource in example(name).roles().items():
        pod = resource["spec"]["template"]["spec"]
        (term,) = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        assert _selected(example(name), term["podAffinityTerm"]["labelSelector"]) == {role}
        (spread,) = pod["topologySpreadConstraints"]
        assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("topology.kubernetes.io/zone", "ScheduleAnyway")
        assert _selected(example(name), spread["labelSelector"]) == {role}


@each_example
def test_no_secret_is_in_a_release(name: str) -> None:
    """R27: secrets are only referred to: no Secret is made, and no variable has a value that could be one."""
    found = example(name)
    assert found.of_kind("Secret") == {}
    for place, container in found.containers():
        assert [resource["name"] for resource in container["env"] if "value" in resource] == [
            "HOME",
            "PENSTOCK_CONFIG",
        ], place


@each_example
def test_containers_can_do_no_harm(name: str) -> None:
    """R27: not root, nothing to write but what is mounted, no capabilities, no token of the cluster."""
    for place, container in example(name).containers():
        allowed = container["securityContext"]
        assert allowed["runAsNonRoot"], place
        assert allowed["readOnlyRootFilesystem"], place
        assert not allowed["allowPrivilegeEscalation"], place
        assert allowed["capabilities"] == {"drop": ["ALL"]}, place
        assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}, place
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), place
        assert "memory" in container["resources"]["limits"], place
    for place, pod in example(name).pods():
        assert pod["securityContext"]["runAsUser"] > 0, place
        assert pod["automountServiceAccountToken"] is False, place
    assert all(
        not resource["automountServiceAccountToken"] for resource in example(name).of_kind("ServiceAccount").values()
    )


@each_example
def test_every_folder_penstock_writes_to_is_mounted(name: str) -> None:
    """R27: the data directory, the temporary folder and the memory of a query pod can be written to."""
    found, config = example(name), example(name).config()
    for role, resource in found.roles().items():
        pod = resource["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} <= set(volumes), role
        needed = {config["data_dir"], "/tmp"} | (
            {config["refdata"]["query"]["memoryDir"]} if role == "query" else set()
        )
        for folder in needed:
            assert "emptyDir" in volumes[mounts[folder]["name"]], (role, folder)
    for place, container in found.containers():
        config_mount = next(mount for mount in container["volumeMounts"] if mount["name"] == "config")
        assert "subPath" not in config_mount, place  # it would never change


@each_example
def test_whatever_runs_in_a_container_looks_at_its_configuration(name: str) -> None:
    """R27: the file is named by the environment, so that `kubectl exec POD -- penstock doctor` asks the same one."""
    for place, container in example(name).containers():
        config_mount = next(mount for mount in container["volumeMounts"] if mount["name"] == "config")
        named = {resource["name"]: resource.get("value") for resource in container["env"]}
        assert named["PENSTOCK_CONFIG"] == f"{config_mount['mountPath']}/penstock.yaml", place
        assert "--config" not in container["args"], place


def test_what_all_are_given_is_mounted_in_every_container() -> None:
    """R27: Jobs and init containers mount the certificate of PostgreSQL from a ConfigMap too."""
    certificates = {"name": "certificates", "configMap": {"name": "certificates"}}
    mount = {"name": "certificates", "mountPath": "/etc/certificates", "readOnly": True}
    found = render(MINIMAL, values={"defaults.extraVolumes": [certificates], "defaults.extraVolumeMounts": [mount]})
    for place, pod in found.pods():
        assert certificates in pod["volumes"], place
    for place, container in found.containers():
        assert mount in container["volumeMounts"], place
    assert {"Job penstock-migrate penstock", "Pod penstock-doctor penstock", "Deployment penstock-query wait"} <= {
        place for place, _ in found.containers()
    }


def test_what_a_role_is_given_is_mounted_in_its_pods_only() -> None:
    """R27: in the container that waits as well."""
    values = {
        "roles.flows.extraVolumes": [{"name": "own", "emptyDir": {}}],
        "roles.flows.extraVolumeMounts": [{"name": "own", "mountPath": "/own"}],
    }
    having = {
        place
        for place, container in render(MINIMAL, values=values).containers()
        if "/own" in {mount["mountPath"] for mount in container["volumeMounts"]}
    }
    assert having == {"Deployment penstock-flows wait", "Deployment penstock-flows penstock"}


OURS = {
    "podLabels": {"app.kubernetes.io/name": "x", "app.kubernetes.io/component": "x", "app.kubernetes.io/version": "x"},
    "podAnnotations": {CHECKSUM: "x", "helm.sh/hook": "x", "helm.sh/hook-delete-policy": "x"},
}


def test_labels_and_annotations_that_are_given_take_nothing_of_ours_away() -> None:
    """R27: a key the chart has too comes once, as the chart has it; `render` refuses one that comes twice."""
    theirs = {key: {**ours, "team": "data"} for key, ours in OURS.items()}
    values = {"defaults": theirs, "migrate": theirs, "serviceAccount.annotations": {"helm.sh/hook": "x"}}
    found = render(MINIMAL, values=values)
    for place, metadata in found.pod_metadata():
        assert metadata["labels"]["team"] == metadata["annotations"]["team"] == "data", place
        assert "x" not in metadata["labels"].values(), place
    assert {*_checksums(found)} == {*_checksums(example("minimal"))}
    assert found.of_kind("Pod")[f"{RELEASE}-doctor"]["metadata"]["annotations"]["helm.sh/hook"] == "test"
    account = found.of_kind("ServiceAccount")[f"{RELEASE}-migrate"]["metadata"]["annotations"]
    assert account["helm.sh/hook"] == "pre-install,pre-upgrade"


def test_pods_that_end_can_be_kept_out_of_a_mesh() -> None:
    """R27: what migrates and what `helm test` runs have the same labels and annotations of their own."""
    values = {"migrate.podLabels": {"sidecar.istio.io/inject": "false"}, "migrate.podAnnotations": {"team": "data"}}
    metadata = dict(render(MINIMAL, values=values).pod_metadata())
    for place, found in metadata.items():
        ends = not place.startswith("Deployment")
        assert (found["labels"].get("sidecar.istio.io/inject") == "false") is ends, place
        assert (found.get("annotations", {}).get("team") == "data") is ends, place


@each_example
def test_prometheus_finds_pods_by_their_labels_alone(name: str) -> None:
    """R27: with annotations an agent of a mesh would offer the metrics without TLS."""
    for place, metadata in example(name).pod_metadata():
        assert [key for key in metadata.get("annotations", {}) if "prometheus" in key] == [], place
    for place, container in example(name).containers():
        is_scraped = "http" in {port["name"] for port in container.get("ports", ())}
        assert is_scraped == (place.startswith("Deployment") and not place.endswith(" wait")), place
    for place, metadata in example(name).pod_metadata():
        assert metadata["labels"]["app.kubernetes.io/name"] == "penstock", place
        is_role = metadata["labels"]["app.kubernetes.io/component"] in EVERY
        assert is_role == place.startswith("Deployment"), place


def test_a_certificate_is_named_wherever_it_is_verified() -> None:
    """R27: without `sslrootcert` a connection with `sslmode=verify-full` is refused for want of one."""
    documents = [*(CHART.parents[2] / "docs" / "deploy").glob("*.md"), *EXAMPLES]
    verified = [part for file in documents for part in file.read_text().split("sslmode=verify-full")[1:]]
    assert len(verified) >= 2
    assert all(part.startswith("&sslrootcert=") for part in verified)


@each_example
def test_probes_ask_what_there_is(name: str) -> None:
    """R17, R27: each probe requests a route that every role has, on the port of the role."""
    pages = {getattr(route, "path", "") for route in make_router(LivenessPulse({}, needs=[]), Telemetry()).routes}
    pod_pages = json.loads((Path(penstock.__file__).parent / "refdata" / "pod" / "openapi.json").read_bytes())["paths"]
    for role, resource in example(name).roles().items():
        container = resource["spec"]["template"]["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        asked = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
        assert {get["path"] for get in asked.values()} <= (set(pod_pages) if role == "query" else pages)
        for get in asked.values():
            assert str(ports[get["port"]]) == _option(container, "--port"), role


def test_no_load_is_too_long_and_no_outage_kills() -> None:
    """R17, R23: only readiness waits for dictionaries and PostgreSQL; what restarts a pod asks whether it is alive."""
    for role, resource in example("production").roles().items():
        container = resource["spec"]["template"]["spec"]["containers"][0]
        paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
        assert paths["startup"] == paths["liveness"] == "/actuator/health/liveness", role
        assert paths["readiness"] == "/actuator/health/readiness", role
        (wait,) = resource["spec"]["template"]["spec"]["initContainers"]
        assert wait["args"][:2] == ["db", "wait"], role


@pytest.mark.parametrize(("delay", "timeout"), [(10, 20), (60, 300)])
def test_a_pod_has_time_to_drain(delay: int, timeout: int) -> None:
    """R27: Kubernetes kills no pod that still drains."""
    found = render(MINIMAL, values={"server.drain_delay": delay, "server.drain_timeout": timeout})
    server = found.config()["server"]
    assert (server["drain_delay"], server["drain_timeout"]) == (delay, timeout)
    for role, resource in found.roles().items():
        assert resource["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= delay + timeout + 10, role


def test_a_rollout_keeps_all_serving_pods() -> None:
    """R27: a serving pod goes when another one is ready."""
    for role in SERVING:
        strategy = example("minimal").roles()[role]["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxSurge": 1, "maxUnavailable": 0}


@each_example
def test_those_that_serve_have_a_service(name: str) -> None:
    """R27: api, command-api and query have a Service with their port, and no other role has one."""
    found = example(name)
    services = {role_of(resource): resource["spec"] for resource in found.of_kind("Service").values()}
    assert {role: spec["ports"][0]["port"] for role, spec in services.items()} == SERVING
    for role, spec in services.items():
        assert _selected(found, {"matchLabels": spec["selector"]}) == {role}
        container = found.roles()[role]["spec"]["template"]["spec"]["containers"][0]
        assert spec["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}


RATES = [{"code": "RATES"}]


@pytest.mark.parametrize(
    ("values", "rolls"),
    [
        ({"config.refdata.dictionaries": RATES}, False),
        ({"config.refdata.tenants": ["acme"]}, False),
        ({"config.telemetry.log_level": "DEBUG"}, False),
        ({"roles.api.replicas": 5}, False),
        ({"config.telemetry.log_format": "json"}, True),
        ({"config.refdata.query.loads": 8}, True),
        ({"config.refdata.dictionaries": RATES, "config.refdata.giveUpAfter": 90}, True),
        ({"config.tracking.lease": 90}, True),
        ({"database.pool_size": 20}, True),
        ({"server.drain_timeout": 25}, True),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_pods_roll_when_they_have_to(values: Mapping[str, Any], rolls: bool) -> None:
    """R1, R27: what running processes take over from the file rolls nothing; all that is read at the start does."""
    before, after = example("minimal"), render(MINIMAL, values=values)
    assert before.config() != after.config() or not rolls
    assert (_checksums(before) != _checksums(after)) is rolls
    assert len(_checksums(after)) == 1


def test_the_dictionaries_have_room() -> None:
    """R22, R29: the memory of a query pod has a volume that holds it, and the container may use as much besides."""
    found = render(MINIMAL, values={"query.memoryLimitMb": 4096, "roles.query.resources.limits.memory": "1Gi"})
    query = found.config()["refdata"]["query"]
    assert query["memoryLimitMb"] == 4096
    pod = found.roles()["query"]["spec"]["template"]["spec"]
    (volume,) = [
        volume["emptyDir"] for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"
    ]
    room = int(volume["sizeLimit"].removesuffix("Mi"))
    assert room >= 4096 * 9 / 8
    assert pod["containers"][0]["resources"]["limits"]["memory"] == f"{room + 1024}Mi"


def test_the_schema_is_brought_up_before_anything_else() -> None:
    """R27: the Job that migrates runs before installs and upgrades, and after the objects that it needs."""
    found = example("production")
    (job,) = found.of_kind("Job").values()
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][:2] == ["db", "migrate"]
    [config] = [volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "config"]
    for kind, name in [("ConfigMap", config), ("ServiceAccount", pod["serviceAccountName"])]:
        brought = found.of_kind(kind)[name]["metadata"]["annotations"]
        assert brought["helm.sh/hook"] == job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert int(brought["helm.sh/hook-weight"]) < int(job["metadata"]["annotations"]["helm.sh/hook-weight"])
    assert found.of_kind("ConfigMap")[config]["data"]["penstock.yaml"] == found.config_text()


def test_only_the_pods_of_a_release_are_shut_off_and_all_of_them() -> None:
    """R27: every pod of the release is denied what no policy allows, in both directions."""
    policy = example("production").of_kind("NetworkPolicy")[RELEASE]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert _selected(example("production"), policy["podSelector"]) == EVERY
    stranger = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": "another"}
    assert not selects(policy["podSelector"], stranger)


def test_pods_reach_what_they_are_configured_to() -> None:
    """R27: DNS, and the ports of the addresses in the values, no others; harvest also those of its sources."""
    common = {53, 443, 8080, 8081}
    assert _reachable(example("production"), "relay") == common | {5432, 5433, 9093, 6379, 4318}
    assert _reachable(example("production"), "harvest") == _reachable(example("production"), "relay") | {8443}
    assert _reachable(example("minimal"), "query") == common | {5432}
    assert _reachable(example("postgresql-only"), "query") == {53, 5432, 8080, 8081}
    assert _reachable(example("postgresql-only"), "flows") == {53, 443, 5432, 8080, 8081}
    moved = {"database.url": "postgresql://[fd00::1]:6432/penstock", "networkPolicy.ports.dns": [5353]}
    assert _reachable(render(MINIMAL, values=moved), "query") == {5353, 6432, 443, 8080, 8081}


def test_only_those_named_may_call() -> None:
    """R27: clients reach what serves, Prometheus reaches every role, and all other traffic is denied."""
    found = example("production")
    gateway, prometheus = ({"kubernetes.io/metadata.name": name} for name in ("ingress", "monitoring"))
    for role in EVERY:
        callers = [peer for rule in _rules(found, role, "ingress") for peer in rule["from"]]
        namespaces = [peer["namespaceSelector"]["matchLabels"] for peer in callers if "namespaceSelector" in peer]
        assert prometheus in namespaces, role
        assert (gateway in namespaces) is (role in SERVING), role


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"database.url": "embedded"}, "/database/url"),
        ({"database.url": "postgresql://penstock:hunter2@db/penstock"}, "/database/url"),
        ({"database.url": "postgresql://db/penstock?password=hunter2"}, "/database/url"),
        ({"database.password": "hunter2"}, "'password'"),
        ({"auth.jwt": {"audience": "penstock"}}, "/auth/jwt"),
        ({"auth.jwt": None}, "jwt"),
        ({"auth.jwt.existingSecret": "both"}, "/auth/jwt"),
        ({"image.repository": ""}, "/image/repository"),
        ({"roles.api.replicas": 0}, "/roles/api/replicas"),
        ({"roles.relay.autoscaling.enabled": True}, "'autoscaling'"),
        ({"roles.qeury.replicas": 3}, "'qeury'"),
        ({"defaults.resources.limits.memory": "512M"}, "/defaults/resources/limits/memory"),
        ({"defaults.extraEnv": [{"name": "API_TOKEN", "value": "hunter2"}]}, "/defaults/extraEnv/0/value"),
        ({"bus.kafka.group_prefix": "p"}, "'bootstrap'"),
        ({"bus.kafka": {"bootstrap": "k:9092", "options": {"sasl.password": "x"}}}, "/bus/kafka/options/sasl.password"),
        ({"bus.kafka": {"bootstrap": "k:9092", "secretKeys": {"sasl.password": "x"}}}, "'existingSecret'"),
        ({"signals.redis.password": "hunter2"}, "'password'"),
        ({"storage.url": "file:///objects"}, "/storage/url"),
        ({"config.database.url": "embedded"}, "/config/database"),
        ({"config.tracking.database.password": "hunter2"}, "/config/tracking/database/password"),
        ({"config.flows.images.url": "https://me:hunter2@draw"}, "/config/flows/images/url"),
        ({"config.ingest.secrets.aws_secret_access_key": "hunter2"}, "/config/ingest/secrets/aws_secret_access_key"),
        ({"config.refdata.query.memoryDir": "/dev/shm"}, "/config/refdata/query/memoryDir"),
        ({"serviceAccount.create": False}, "/serviceAccount/name"),
        ({"securityContext.runAsUser": 0}, "/securityContext/runAsUser"),
        ({"fullnameOverride": "x" * 46}, "/fullnameOverride"),
        ({"nameOverride": "pipes"}, "'nameOverride'"),
        ({"config.flows.images.url": "https://draw/v1?api_key=hunter2"}, "/config/flows/images/url"),
        ({"config.flows.images.url": "https://draw/v1?size=1&apiKey=hunter2"}, "/config/flows/images/url"),
        ({"config.flows.images.url": "https://draw/v1?sig=hunter2"}, "/config/flows/images/url"),
        ({"config.flows.images.url": "https://draw/v1?X-Amz-Signature=hunter2"}, "/config/flows/images/url"),
        ({"config.harvest.feeds.f.source.headers": {"X-Auth": "hunter2"}}, "/source/headers/X-Auth"),
        ({"config.harvest.feeds.f.source.headers": {"auth": "hunter2"}}, "/source/headers/auth"),
        ({"config.harvest.feeds.f.source.params": {"sig": "hunter2"}}, "/source/params/sig"),
        ({"storage.url": ""}, "storage.url"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_values_are_refused_by_name(values: Mapping[str, Any], key: str) -> None:
    """R27: what cannot work, and what would put a secret into a release, is refused with the key that is wrong."""
    with pytest.raises(HelmRefused, match=re.escape(key)):
        render(MINIMAL, values=values)


@pytest.mark.parametrize(
    "values",
    [
        {"config.flows.images.url": "https://draw/v1?design=flat&signal=1"},
        {
            "config.harvest.feeds.f.source": {
                "kind": "rest",
                "headers": {"X-Author": "ann"},
                "params": {"author": "ann"},
            }
        },
        {"config.ingest.options": {"skip_signature": "true"}},
    ],
    ids=",".join,
)
def test_what_only_resembles_a_secret_is_taken(values: Mapping[str, Any]) -> None:
    """R27: names that have a part in common with those of secrets are no secrets."""
    assert render(MINIMAL, values=values).objects


def test_values_on_the_page_are_taken() -> None:
    """R27: what docs/deploy/kubernetes.md shows of values renders, to objects Kubernetes understands."""
    page = (CHART.parents[2] / "docs" / "deploy" / "kubernetes.md").read_text()
    shown = [load(text) for text in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)]
    assert {key for values in shown for key in values} == {"secrets", "networkPolicy"}
    for values in shown:
        found = render(MINIMAL, values=values)
        assert [mistake for resource in found.objects for mistake in mistakes(resource, newest())] == []


def _option(container: Mapping[str, Any], name: str) -> str:
    return str(container["args"][container["args"].index(name) + 1])


def _selected(found: Rendered, selector: Mapping[str, Any]) -> set[str]:
    """The roles whose pods the selector picks."""
    templates = {role: resource["spec"]["template"]["metadata"]["labels"] for role, resource in found.roles().items()}
    return {role for role, labels in templates.items() if selects(selector, labels)}


def _checksums(found: Rendered) -> set[str]:
    return {role["spec"]["template"]["metadata"]["annotations"][CHECKSUM] for role in found.roles().values()}


def _rules(found: Rendered, role: str, way: str) -> list[Mapping[str, Any]]:
    policies = [resource["spec"] for resource in found.of_kind("NetworkPolicy").values()]
    return [
        rule for policy in policies if role in _selected(found, policy["podSelector"]) for rule in policy.get(way, ())
    ]


def _reachable(found: Rendered, role: str) -> set[int]:
    return {port["port"] for rule in _rules(found, role, "egress") for port in rule["ports"]}
