"""deploy/kubernetes as kubectl builds it: what the tests that look at it look at."""

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvtier.config import Config, load_config

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
KUBECTL = ROOT / ".tools" / "kubectl"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())

SECRETS: Mapping[tuple[str, str], str] = {
    ("kvtier-redis", "url"): "rediss://kvtier:password@redis.example:6379/0",
    ("kvtier-redis", "ca.crt"): "a certificate",
    ("kvtier-keys", "keys"): "one key a line",
}
"""The Secrets that an operator makes, by name and key, with what might be in them."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """What a workload's pods are like."""

    workload: Json
    overlay: "Overlay"

    @property
    def name(self) -> str:
        return str(self.workload["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.workload["spec"]["template"]["metadata"]["labels"])

    @property
    def spec(self) -> Json:
        return dict(self.workload["spec"]["template"]["spec"])

    @property
    def containers(self) -> list[Json]:
        """All containers, those that come first as well."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def volumes(self) -> dict[str, Json]:
        return {volume["name"]: volume for volume in self.spec.get("volumes", [])}

    @property
    def daemon(self) -> Json | None:
        """The container that runs the daemon, where there is one."""
        return next((each for each in self.containers if each["name"] == "kvtier"), None)

    def security(self, container: Json) -> Json:
        """What holds for a container: its own settings over those of the pod."""
        return self.spec.get("securityContext", {}) | container.get("securityContext", {})

    def secret(self, path: Path) -> str:
        """What might be in a file that the daemon has of a Secret, closed to others."""
        assert self.daemon is not None
        secret = self.volumes[mount_of(self.daemon, path)["name"]]["secret"]
        assert secret["defaultMode"] == 0o440
        return SECRETS[secret["secretName"], path.name]

    def config(self, folder: Path) -> Config:
        """The daemon's configuration, read as it would read it."""
        assert self.daemon is not None
        file = Path(option(self.daemon["args"], "--config"))
        mount = mount_of(self.daemon, file)
        name = self.volumes[mount["name"]]["configMap"]["name"]
        path = folder / file.name
        path.write_text(self.overlay.one("ConfigMap", name)["data"][file.name])
        return load_config(path, {}, environment_of(self.daemon))


@dataclass(frozen=True)
class Overlay:
    """All objects of one overlay."""

    name: str
    objects: tuple[Json, ...]

    def of(self, kind: str) -> Iterator[Json]:
        return (each for each in self.objects if each["kind"] == kind)

    def one(self, kind: str, name: str) -> Json:
        found = [each for each in self.of(kind) if each["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} objects {kind} {name} in {self.name}"
        return found[0]

    @property
    def pods(self) -> list[Pod]:
        return [Pod(each, self) for each in self.objects if "template" in each.get("spec", {})]

    @property
    def daemons(self) -> list[tuple[Pod, Json]]:
        """Pods with a daemon, each with its container."""
        return [(pod, pod.daemon) for pod in self.pods if pod.daemon is not None]

    def selected(self, selector: Json) -> list[Pod]:
        """The pods that a selector of labels means."""
        return [pod for pod in self.pods if is_selected(pod.labels, selector)]


@cache
def build(folder: Path) -> Overlay:
    assert KUBECTL.exists(), f"there is no {KUBECTL}; run make {KUBECTL.relative_to(ROOT)}"
    done = subprocess.run(
        [KUBECTL, "kustomize", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # what is deprecated is said there
    return Overlay(folder.name, tuple(yaml.safe_load_all(done.stdout)))


def is_selected(labels: Mapping[str, str], selector: Json) -> bool:
    wanted = selector.get("matchLabels", {})
    keys = [each["key"] for each in selector.get("matchExpressions", [])]
    assert all(each["operator"] == "Exists" for each in selector.get("matchExpressions", []))
    return wanted.items() <= labels.items() and all(key in labels for key in keys)


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def mount_of(container: Json, path: Path) -> Json:
    """The mount in which a path of a container lies."""
    inside = [
        mount for mount in container["volumeMounts"] if path.is_relative_to(mount["mountPath"])
    ]
    assert inside, f"{path} of {container['name']} is in no volume"
    return max(inside, key=lambda mount: len(mount["mountPath"]))


def environment_of(container: Json) -> dict[str, str]:
    """The variables of a container; nothing in them is secret."""
    return {variable["name"]: variable["value"] for variable in container.get("env", [])}


def quantity_bytes(text: str) -> int:
    """Kubernetes' way to write bytes, as far as it is used here."""
    units = {"Mi": 2**20, "Gi": 2**30}
    return int(text[:-2]) * units[text[-2:]]
