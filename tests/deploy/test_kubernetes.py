"""deploy/kubernetes: each overlay builds, is what the API servers take, and fits together."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry

import kvtier
from kvtier.api.http.health import probe_routes
from kvtier.config.units import format_size
from tests.deploy.built import (
    KUBERNETES,
    OVERLAYS,
    ROOT,
    SECRETS,
    Overlay,
    Pod,
    build,
    environment_of,
    is_selected,
    mount_of,
    quantity_bytes,
)

VERSIONS = ("1.29", "1.37")
"""Of Kubernetes: the first with native sidecars, and the newest."""

DAEMON_BYTES = 512 << 20
"""For a daemon beside its arena: 250 MB with a million entries; the start asks for as much."""

PAGE_TABLE_SHARE = 512
"""A page of 4096 bytes has an entry of 8."""

GRACE_MARGIN_S = 5


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Overlay:
    return build(KUBERNETES / "overlays" / request.param)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_api_server_takes_it(overlay: Overlay, version: str) -> None:
    for each in overlay.objects:
        if each["apiVersion"].startswith("monitoring.coreos.com/"):
            schema = json.loads(
                (Path(__file__).parent / "schemas" / f"{each['kind']}.json").read_text()
            )
            jsonschema.validate(each, schema)
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_the_overlay_of_the_page_builds(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    (kustomization,) = re.findall(
        r"^```yaml\n(# kustomization.*?)^```", page, re.MULTILINE | re.DOTALL
    )
    (tmp_path / "kustomization.yaml").write_text(kustomization)
    shutil.copytree(KUBERNETES, tmp_path / "kvtier" / "deploy" / "kubernetes")
    changed = (KUBERNETES / "bases" / "node" / "kvtier.toml").read_text().replace("64GiB", "128GiB")
    (tmp_path / "kvtier.toml").write_text(changed)
    ((pod, daemon),) = build(tmp_path).daemons
    assert daemon["image"] == f"REGISTRY/kvtier:{kvtier.__version__}"
    assert_memory_fits(daemon, pod.config(tmp_path).cpu.capacity_bytes)


def test_every_base_and_component_is_in_an_overlay() -> None:
    used: set[Path] = set()

    def follow(folder: Path) -> None:
        used.add(folder)
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        for name in kustomization.get("resources", []) + kustomization.get("components", []):
            if (folder / name).is_dir():
                follow((folder / name).resolve())

    for name in OVERLAYS:
        follow(KUBERNETES / "overlays" / name)
    assert used == {path.parent for path in KUBERNETES.rglob("kustomization.yaml")}


def test_volumes_and_what_is_in_them_are_there(overlay: Overlay) -> None:
    for pod in overlay.pods:
        mounted = {mount["name"] for each in pod.containers for mount in each["volumeMounts"]}
        assert mounted == set(pod.volumes), f"{pod.name}: mounted and declared volumes differ"
        for volume in pod.volumes.values():
            if "configMap" in volume:
                overlay.one("ConfigMap", volume["configMap"]["name"])
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                overlay.one("PersistentVolumeClaim", claim)
            if "secret" in volume:
                assert volume["secret"]["secretName"] in {name for name, _ in SECRETS}


def test_what_a_pod_names_is_there(overlay: Overlay) -> None:
    for pod in overlay.pods:
        if account := pod.spec.get("serviceAccountName"):
            overlay.one("ServiceAccount", account)
        if priority := pod.spec.get("priorityClassName"):
            overlay.one("PriorityClass", priority)
        assert pod.workload["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
    for service in overlay.of("Service"):
        (pod,) = [
            pod for pod in overlay.pods if service["spec"]["selector"].items() <= pod.labels.items()
        ]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports(pod).keys()


def ports(pod: Pod) -> dict[str, int]:
    found = [port for each in pod.containers for port in each.get("ports", [])]
    named = {port["name"]: port["containerPort"] for port in found}
    assert len(named) == len(found), "two ports of a pod have one name"
    return named


def test_everything_is_of_this_version(overlay: Overlay) -> None:
    for pod in overlay.pods:
        for each in pod.containers:
            assert each["image"].endswith(kvtier.__version__), each["image"]


def is_sidecar(pod: Pod) -> bool:
    return pod.labels.get("kvtier") == "sidecar"


# The configuration, and what it needs of its container


def test_the_daemon_takes_its_configuration(overlay: Overlay, tmp_path: Path) -> None:
    for pod, daemon in overlay.daemons:
        config = pod.config(tmp_path)
        for path in (
            config.seal.key_file,
            config.tiers["remote"].tls_ca,
            config.tiers["remote"].url_file,
        ):
            assert path is None or pod.secret(path)
        for written in (config.daemon.socket, config.tiers["ssd"].directory):
            assert not mount_of(daemon, written).get("readOnly")
        assert config.http.listen is not None
        assert config.http.listen.host == "0.0.0.0"
        assert config.http.listen.port == ports(pod)["kvtier"]


def test_memory_is_for_the_arena_and_all_else(overlay: Overlay, tmp_path: Path) -> None:
    for pod, daemon in overlay.daemons:
        assert_memory_fits(daemon, pod.config(tmp_path).cpu.capacity_bytes)


def assert_memory_fits(daemon: dict[str, Any], arena_bytes: int) -> None:
    needed_bytes = arena_bytes + arena_bytes // PAGE_TABLE_SHARE + DAEMON_BYTES
    limit = daemon["resources"]["limits"]["memory"]
    assert daemon["resources"]["requests"]["memory"] == limit
    assert quantity_bytes(limit) >= needed_bytes, f"at least {format_size(needed_bytes)}"
    assert quantity_bytes(limit) < needed_bytes * 1.1, "memory that nobody uses"


def test_the_store_fits_into_its_volume(overlay: Overlay, tmp_path: Path) -> None:
    for pod, daemon in overlay.daemons:
        ssd = pod.config(tmp_path).section("ssd")
        volume = pod.volumes[mount_of(daemon, ssd.directory)["name"]]
        assert ssd.free_space_floor_bytes > 0
        if "emptyDir" in volume:  # over its limit the pod would be evicted
            limit = volume["emptyDir"]["sizeLimit"]
            assert quantity_bytes(limit) > ssd.capacity_bytes
            assert daemon["resources"]["requests"]["ephemeral-storage"] == limit


def test_there_is_as_much_time_to_start_as_anywhere_else(overlay: Overlay) -> None:
    unit = (ROOT / "deploy" / "systemd" / "kvtier.service").read_text()
    page = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    ((minutes,), (elsewhere,)) = (
        re.findall(pattern, text, re.MULTILINE)
        for pattern, text in ((r"^TimeoutStartSec=(\d+)min$", unit), (r"-period (\d+)m\b", page))
    )
    assert minutes == elsewhere
    for _, daemon in overlay.daemons:
        startup = daemon.get("startupProbe", {"periodSeconds": 0, "failureThreshold": 0})
        given_s = daemon["livenessProbe"].get("initialDelaySeconds", 0)
        given_s += startup["periodSeconds"] * startup["failureThreshold"]
        assert given_s == int(minutes) * 60


def test_there_is_time_to_stop(overlay: Overlay, tmp_path: Path) -> None:
    for pod, _ in overlay.daemons:
        # A sidecar is told to stop once the others have ended, within the same time.
        others_s = 60 if is_sidecar(pod) else 0
        grace_s = pod.config(tmp_path).daemon.stop_grace_ns / 1e9
        assert pod.spec["terminationGracePeriodSeconds"] >= others_s + grace_s + GRACE_MARGIN_S


def test_probes_ask_what_is_answered(overlay: Overlay) -> None:
    routes = {
        route.path
        for route in probe_routes(
            is_alive=lambda: True, is_ready=lambda: True, registry=CollectorRegistry()
        )
    }
    for pod, daemon in overlay.daemons:
        asked = {name: daemon[name]["httpGet"]["path"] for name in daemon if name.endswith("Probe")}
        assert set(asked.values()) <= routes
        assert all(daemon[name]["httpGet"]["port"] in ports(pod) for name in asked)
        # A restart is for one that is stuck, not for one that stops or has a tier out.
        assert asked["livenessProbe"] == "/healthz"
        assert asked.get("startupProbe", "/readyz") == "/readyz"
        # Where vLLM is in the pod it serves without us, and must stay in its Service.
        assert ("readinessProbe" in asked) != is_sidecar(pod)


def test_vllm_waits_for_nothing_of_ours_unless_told_to(overlay: Overlay) -> None:
    for pod, daemon in overlay.daemons:
        if is_sidecar(pod):
            assert ("startupProbe" in daemon) == (overlay.name == "sidecar-full"), "it has the gate"
            secrets = [each["secret"] for each in pod.volumes.values() if "secret" in each]
            assert all(each["optional"] for each in secrets)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories to others")
def test_the_nodes_own_drive_is_refused_unless_allowed(tmp_path: Path) -> None:
    overlay = build(KUBERNETES / "overlays" / "node")
    ((pod, _),) = overlay.daemons
    (first,) = [each for each in pod.containers if each["name"] == "directories"]
    (tmp_path / "cache").mkdir()

    def run(allowed: str, hosts: str) -> "subprocess.CompletedProcess[str]":
        places = {"/run/kvtier": "run", "/var/cache/kvtier": "cache"}
        script = first["command"][-1].replace("/etc/hosts", hosts)
        for place, mine in places.items():
            script = script.replace(place, str(tmp_path / mine))
        return subprocess.run(
            [*first["command"][:-1], script],
            env=environment_of(first) | {"SHARED_DRIVE": allowed, "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    refused = run(environment_of(first)["SHARED_DRIVE"], hosts=str(tmp_path))
    assert refused.returncode == 1
    assert "SHARED_DRIVE=allow" in refused.stderr
    assert not (tmp_path / "run").exists()
    for allowed, hosts in (("refuse", "/proc/self"), ("allow", str(tmp_path))):
        done = run(allowed, hosts)
        assert (done.returncode, done.stderr) == (0, "")
        status = (tmp_path / "cache").stat()
        assert (status.st_uid, status.st_mode & 0o777) == (65532, 0o711)


# Engines


def test_engines_find_the_socket_and_are_let_in(overlay: Overlay, tmp_path: Path) -> None:
    engines = [
        (pod, each)
        for pod in overlay.pods
        for each in pod.containers
        if "KVTIER_SOCKET" in environment_of(each)
    ]
    assert engines or not overlay.name.startswith("sidecar")
    for pod, engine in engines:
        path = Path(environment_of(engine)["KVTIER_SOCKET"])
        ours = [(other, daemon) for other, daemon in overlay.daemons if other == pod]
        ((home, daemon),) = ours or overlay.daemons
        config = home.config(tmp_path)
        assert path == config.daemon.socket
        assert source(pod, engine, path) == source(home, daemon, path)
        user, own = pod.security(engine)["runAsUser"], home.security(daemon)["runAsUser"]
        assert user in {0, own, *config.daemon.allowed_uids}
        assert (
            '"KvtierConnector"' in engine["args"][engine["args"].index("--kv-transfer-config") + 1]
        )


def source(pod: Pod, container: dict[str, Any], path: Path) -> Any:
    """What is mounted where a path lies: a directory of the node, or one of the pod."""
    volume = pod.volumes[mount_of(container, path)["name"]]
    return volume["hostPath"] if "hostPath" in volume else (pod.name, volume["name"])


def test_vllm_has_its_own_shared_memory(overlay: Overlay) -> None:
    for pod in overlay.pods:
        for each in (each for each in pod.containers if each["name"] == "vllm"):
            volume = pod.volumes[mount_of(each, Path("/dev/shm"))["name"]]["emptyDir"]
            assert volume["medium"] == "Memory"
            size_bytes = quantity_bytes(volume["sizeLimit"])
            assert 2**30 <= size_bytes < quantity_bytes(each["resources"]["limits"]["memory"]) / 4
            # Else the variables of a Service named vllm are taken for vLLM's own.
            assert pod.spec["enableServiceLinks"] is False


def test_a_sidecar_comes_first_and_stays(overlay: Overlay) -> None:
    for pod, daemon in overlay.daemons:
        if is_sidecar(pod):
            assert daemon in pod.spec["initContainers"]
            assert daemon["restartPolicy"] == "Always"


# Who may do what


def test_no_namespace_of_the_node_and_no_rights(overlay: Overlay) -> None:
    for pod in overlay.pods:
        assert not {"hostIPC", "hostPID", "hostNetwork"} & pod.spec.keys()
        assert pod.spec["automountServiceAccountToken"] is False
        for each in pod.containers:
            security = pod.security(each)
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert security["seccompProfile"]["type"] in {"RuntimeDefault", "Localhost"}
            if each["name"] != "directories":
                assert security["runAsNonRoot"] is True
                assert "add" not in security["capabilities"]
            if "vllm" not in each["name"]:
                assert security["readOnlyRootFilesystem"] is True


def test_a_namespace_promises_what_its_pods_keep(overlay: Overlay) -> None:
    allowed = {"configMap", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
    (namespace,) = overlay.of("Namespace")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    kinds = {
        kind
        for pod in overlay.pods
        for each in pod.volumes.values()
        for kind in each
        if kind != "name"
    }
    users = {pod.security(each)["runAsNonRoot"] for pod in overlay.pods for each in pod.containers}
    is_restricted = kinds <= allowed and users == {True}
    assert level == ("restricted" if is_restricted else "privileged")
    names = {each["metadata"].get("namespace") for each in overlay.objects} - {None}
    assert names == {namespace["metadata"]["name"]}


def test_a_narrow_profile_is_the_one_that_is_here(overlay: Overlay) -> None:
    for pod, daemon in overlay.daemons:
        profile = pod.security(daemon)["seccompProfile"]
        if profile["type"] == "Localhost":
            path = KUBERNETES / "components" / "seccomp" / profile["localhostProfile"]
            assert json.loads(path.read_text())["defaultAction"] == "SCMP_ACT_ERRNO"


# Monitoring and the network


@pytest.mark.parametrize("name", ["kvtier", "vllm"])
def test_every_daemon_and_every_vllm_is_scraped_and_may_be(overlay: Overlay, name: str) -> None:
    monitor = overlay.one("PodMonitor", name)
    scraped = overlay.selected(monitor["spec"]["selector"])
    assert [pod.name for pod in scraped] == [
        pod.name for pod in overlay.pods if any(each["name"] == name for each in pod.containers)
    ]
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert endpoint["path"] == "/metrics"
        for pod in scraped:
            assert ports(pod)[endpoint["port"]] in allowed_ports(overlay, pod)


def allowed_ports(overlay: Overlay, pod: Pod) -> set[int]:
    """Which ports Prometheus gets to; all of a vLLM without a daemon, which no policy is about."""
    rules = [
        rule
        for policy in overlay.of("NetworkPolicy")
        if is_selected(pod.labels, policy["spec"]["podSelector"])
        for rule in policy["spec"]["ingress"]
    ]
    assert all(rule["from"] for rule in rules), "open to everybody"
    if pod.daemon is None and not rules:
        return set(ports(pod).values())
    home = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    return {port["port"] for rule in rules if home in rule["from"] for port in rule["ports"]}


def test_policies_are_about_pods_and_ports_that_there_are(overlay: Overlay) -> None:
    for policy in overlay.of("NetworkPolicy"):
        pods = overlay.selected(policy["spec"]["podSelector"])
        assert pods, f"{policy['metadata']['name']} is about no pod"
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert all(named <= set(ports(pod).values()) for pod in pods)


def test_the_way_to_redis_is_open_where_there_is_one(overlay: Overlay, tmp_path: Path) -> None:
    for pod, _ in overlay.daemons:
        file = pod.config(tmp_path).section("remote").url_file
        url = pod.secret(file) if file else ""
        port = int(match[1]) if (match := re.search(r":(\d+)/", url)) else None
        for policy in overlay.of("NetworkPolicy"):
            if "Egress" in policy["spec"]["policyTypes"] and is_selected(
                pod.labels, policy["spec"]["podSelector"]
            ):
                opened = {p["port"] for rule in policy["spec"]["egress"] for p in rule["ports"]}
                assert opened == ({port, 53} if port else set())


def test_a_name_may_be_asked_of_the_nodes_own_cache(overlay: Overlay) -> None:
    rules = [
        rule for each in overlay.of("NetworkPolicy") for rule in each["spec"].get("egress", [])
    ]
    for rule in rules:
        if any(port["port"] == 53 for port in rule["ports"]):
            assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in rule["to"]


def test_secrets_and_overlays_are_told_of() -> None:
    page = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    for name, key in SECRETS:
        assert re.search(rf"secret generic {name} [^`]*{re.escape(key)}=", page), (name, key)
    for folder in KUBERNETES.glob("*/*"):
        assert f"`{folder.relative_to(KUBERNETES)}`" in page, f"{folder.name} is not told of"
