"""Helm over the chart: what it renders, and what it refuses."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.support.require import require

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "penstock"
EXAMPLES = sorted((ROOT / "deploy" / "helm" / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "penstock", "data-plane"

Document = Mapping[str, Any]


class HelmRefused(Exception):
    """Helm failed to render the chart; the message is its output."""


@dataclass(frozen=True)
class Rendered:
    """The objects of a release."""

    objects: Sequence[Document]

    def of_kind(self, kind: str) -> dict[str, Document]:
        """By name."""
        return {resource["metadata"]["name"]: resource for resource in self.objects if resource["kind"] == kind}

    def roles(self) -> dict[str, Document]:
        """The Deployments by role."""
        return {role_of(resource): resource for resource in self.of_kind("Deployment").values()}

    def scalers(self) -> dict[str, Document]:
        """The HorizontalPodAutoscalers by the name of what they scale."""
        found = self.of_kind("HorizontalPodAutoscaler").values()
        return {resource["spec"]["scaleTargetRef"]["name"]: resource for resource in found}

    def config(self) -> Document:
        """penstock.yaml, read."""
        return load(self.config_text())

    def config_text(self) -> str:
        """penstock.yaml as it is mounted."""
        return str(self.of_kind("ConfigMap")[RELEASE]["data"]["penstock.yaml"])

    def pods(self) -> Iterator[tuple[str, Document]]:
        """The specification of every kind of pod, with a name for it."""
        for resource in self.objects:
            name = f"{resource['kind']} {resource['metadata']['name']}"
            if resource["kind"] == "Pod":
                yield name, resource["spec"]
            elif resource["kind"] in ("Deployment", "Job"):
                yield name, resource["spec"]["template"]["spec"]

    def pod_metadata(self) -> Iterator[tuple[str, Document]]:
        """The labels and annotations of every kind of pod, with a name for it."""
        for resource in self.objects:
            name = f"{resource['kind']} {resource['metadata']['name']}"
            if resource["kind"] == "Pod":
                yield name, resource["metadata"]
            elif resource["kind"] in ("Deployment", "Job"):
                yield name, resource["spec"]["template"]["metadata"]

    def containers(self) -> Iterator[tuple[str, Document]]:
        """Every container, the init containers too, with a name for it."""
        for name, pod in self.pods():
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                yield f"{name} {container['name']}", container


def render(*files: Path, values: Mapping[str, Any] | None = None) -> Rendered:
    """The release with these value files, then *values* by path; Refused when there is none."""
    given = [f"--set-json={path}={json.dumps(value)}" for path, value in (values or {}).items()]
    named = [f"--values={file}" for file in files]
    text = run("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *named, *given)
    return Rendered([resource for resource in YAML(typ="safe").load_all(text) if resource])


@cache
def example(name: str) -> Rendered:
    """The release one of the examples makes."""
    return render(CHART.parent / "examples" / f"{name}.yaml")


def run(*arguments: str) -> str:
    """What helm prints; Refused, with what it says, when it fails."""
    done = subprocess.run([_helm(), *arguments], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise HelmRefused(done.stdout + done.stderr)
    return done.stdout


def role_of(resource: Document) -> str:
    return str(resource["metadata"]["labels"]["app.kubernetes.io/component"])


def selects(selector: Document, labels: Document) -> bool:
    """Whether the label selector picks an object with these labels."""
    wanted = selector.get("matchLabels", {})
    rules = selector.get("matchExpressions", ())
    assert all(rule["operator"] == "In" for rule in rules)
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(rule["key"]) in rule["values"] for rule in rules
    )


def load(text: str) -> Document:
    return dict(YAML(typ="safe").load(text))


def _helm() -> str:
    built = ROOT / ".build" / "tools" / "bin" / "helm"
    found = str(built) if built.exists() else shutil.which("helm")
    return found or require("helm", "this machine has no helm; scripts/deploy-tools builds it")
