"""An operator detaches the SSD tier, unmounts its drive, mounts it again, and nothing is lost."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvtier.cli.main import main
from kvtier.testing.child import Child, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine
from tests.programs import requires

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount"),
]

MOUNT = """
mount --make-rprivate /
mount -o loop "$1" "$2"
shift 2
exec "$@"
"""
"""The drive is a file, mounted where nobody sees it but the daemon."""


def run(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def directory() -> Iterator[Path]:
    with work_directory() as directory:
        yield directory


@pytest.fixture
def image(directory: Path) -> Path:
    """A file system in a file; skips where that cannot be mounted."""
    mkfs = requires("mkfs.ext4")
    image, place = directory / "drive.img", directory / "drive"
    image.touch()
    os.truncate(image, 128 << 20)
    place.mkdir()
    made = run(mkfs, "-q", image)
    apart = ("unshare", "--mount", "sh", "-ec", MOUNT, "sh")
    tried = run(*apart, image, place, "true")
    if made.returncode or tried.returncode:
        pytest.skip(f"no drive can be mounted here: {made.stderr}{tried.stderr}")
    return image


def test_after_a_detach_the_drive_can_be_unmounted(directory: Path, image: Path) -> None:
    place = directory / "drive"
    node = RunningNode(directory, {"ssd.directory": str(place / "ssd")})
    apart = ["unshare", "--mount", "sh", "-ec", MOUNT, "sh", str(image), str(place)]
    command = [*apart, *kvtier_command("serve", *node.arguments())]
    to = ["ssd", "--connect", str(node.socket)]
    with Child(command, directory / "log") as daemon, PatternEngine(node.socket) as engine:
        within = ("nsenter", "--target", str(daemon.pid), "--mount")
        engine.store(1)
        node.await_blocks("ssd", 4)
        busy = run(*within, "umount", place)
        assert busy.returncode, "while the tier is in use its drive is"
        assert main(["tier", "detach", *to]) == 0
        free = run(*within, "umount", place)
        assert free.returncode == 0, f"{free.stderr}{psutil.Process(daemon.pid).open_files()}"
        checked = run("fsck.ext4", "-fn", image)
        assert checked.returncode == 0, checked.stdout
        assert engine.store(2) == 4, "requests go on"
        assert run(*within, "mount", "-o", "loop", image, place).returncode == 0
        assert main(["tier", "attach", *to]) == 0
        node.drop("cpu")
        assert engine.load(1) == (["ssd"] * 4, "complete")
        assert daemon.stop() == 0, daemon.log
