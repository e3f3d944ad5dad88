"""deploy/docker: the recipe of the image, as far as it can be looked at without building it.

What it would do is done by other tests: ``make wheel`` installs the wheel clean, and
``test_container`` runs the daemon as a container is run.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import kvtier
from kvtier.api.http.health import probe_routes
from kvtier.config import load_config

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
RECIPE = DOCKERFILE.read_text().replace("\\\n", " ")


def lines_of(instruction: str) -> list[str]:
    return re.findall(rf"^{instruction} (.*)$", RECIPE, flags=re.MULTILINE)


def test_a_linter_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "make setup installs it"
    done = subprocess.run(
        [hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_bases_and_packages_are_pinned() -> None:
    for name in lines_of("ARG"):
        assert re.search(r"=\S+:v?\d+\.\d+\.\d+", name), f"{name} names no version"
    for command in re.findall(r"pip .*?install (.*?)(?:&&|$)", RECIPE, flags=re.MULTILINE):
        assert re.search(r"--constraint (constraints|/wheel/pins)\.txt ", command), command


def test_vllm_keeps_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "there.txt").write_text(
        "torch==2.9.0+cu129\nTyping.Extensions==4.1.0\nvllm==0.32.0\nnumpy==2.2.6\n"
    )
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    (make,) = re.findall(r"(awk .*? > /wheel/pins.txt)", RECIPE)
    command = make.replace("/wheel", str(tmp_path))
    subprocess.run(["sh", "-ec", command], check=True, timeout=60)
    ours, pins = (
        [line for line in (tmp_path / name).read_text().splitlines() if not line.startswith("#")]
        for name in ("constraints.txt", "pins.txt")
    )
    assert len(pins) == len(ours), "each package has one version"
    assert set(pins) - set(ours) == {
        "torch==2.9.0+cu129",
        "Typing.Extensions==4.1.0",
        "numpy==2.2.6",
    }


def test_what_is_copied_is_not_ignored() -> None:
    ignore = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignore, "only what is named is let in"
    let_in = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    copied = {
        name
        for line in lines_of("COPY")
        if not line.startswith("--from")
        for name in line.split()[:-1]
    }
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)


def test_it_runs_as_nobody_and_hears_signals() -> None:
    final = RECIPE.rpartition("\nFROM ")[2]
    (user,) = re.findall(r"^USER (\d+):\d+$", final, flags=re.MULTILINE)
    manifest = ROOT / "deploy" / "kubernetes" / "bases" / "node" / "daemonset.yaml"
    pod = yaml.safe_load(manifest.read_text())["spec"]["template"]["spec"]
    assert int(user) == pod["securityContext"]["runAsUser"] != 0
    for instruction in ("ENTRYPOINT", "CMD"):  # a shell in between would keep signals to itself
        (form,) = re.findall(rf"^{instruction} (.*)$", final, flags=re.MULTILINE)
        assert json.loads(form)


def test_it_writes_where_it_may_unless_a_file_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(re.findall(r"(XDG_\w+|KVTIER_\w+)=(\S+)", RECIPE))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config = load_config(None, {})
    made = RECIPE.partition("install -d")[2].partition("\n")[0].split()
    assert str(config.daemon.socket.parent) in made
    assert str(config.tiers["ssd"].directory.parent) in made
    file = tmp_path / "kvtier.toml"
    file.write_text("[daemon]\nsocket = '/mine/k.sock'\n[ssd]\ndirectory = '/mine/ssd'\n")
    config = load_config(file, {})
    assert (str(config.daemon.socket), str(config.tiers["ssd"].directory)) == (
        "/mine/k.sock",
        "/mine/ssd",
    )


def test_the_health_check_of_the_page_asks_what_is_answered() -> None:
    page = (ROOT / "docs" / "operations" / "kubernetes.md").read_text()
    (url,) = re.findall(r"urlopen\('(\S+?)'", page)
    listen = load_config(None, {}, {}).http.listen
    assert listen is not None
    assert url.startswith(f"http://{listen}/")
    routes = probe_routes(is_alive=bool, is_ready=bool, registry=None)  # type: ignore[arg-type]  # not asked
    assert url.removeprefix(f"http://{listen}") in {route.path for route in routes}


@pytest.mark.parametrize("target", ["kvtier", "vllm-kvtier"])
def test_the_tags_that_it_names_are_those_of_the_manifests(target: str) -> None:
    (tag,) = re.findall(rf"-t {target}:(\S+)", RECIPE)
    assert tag.endswith(kvtier.__version__)
    used = {
        image["newTag"]
        for path in (ROOT / "deploy" / "kubernetes").rglob("kustomization.yaml")
        for image in yaml.safe_load(path.read_text()).get("images", [])
        if image["name"] == target
    }
    assert used == {tag}
