"""Directories that others may write to are made private or refused; their files are not used."""

import os
import stat
from pathlib import Path

import pytest

from kvtier.daemon.persistence.whole_file import read_file
from kvtier.errors import StartError, TierError
from kvtier.permissions import check_parents, ensure_private
from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.ssd.store import SsdTier

FIELD = "ssd.directory"
STRANGER = 65_533
BLOCK = make_block(1)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "ssd"
    directory.mkdir(mode=0o700)
    return directory


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def opened(directory: Path) -> SsdTier:
    return SsdTier(directory, 4 << 20, 1 << 20)


def refusal(directory: Path) -> StartError:
    with pytest.raises(StartError) as raised:
        opened(directory)
    assert raised.value.field == FIELD
    return raised.value


@pytest.mark.parametrize("mode", [0o777, 0o2775, 0o770, 0o722])
def test_a_directory_that_others_may_write_to_is_narrowed(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    assert ensure_private(directory, FIELD)
    assert mode_of(directory) & 0o777 == 0o700
    assert not ensure_private(directory, FIELD)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_one_that_others_may_only_read_stays_as_it_is(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    assert not ensure_private(directory, FIELD)
    assert mode_of(directory) == mode


def test_a_directory_is_narrowed_while_the_tier_is_open(directory: Path) -> None:
    tier = opened(directory)
    directory.chmod(0o777)
    tier.health_check(soon())
    assert mode_of(directory) == 0o700
    tier.close()


def test_a_parent_that_others_may_write_to_is_refused_unless_sticky(directory: Path) -> None:
    directory.parent.chmod(0o777)
    assert f"chmod go-w {directory.parent}" in refusal(directory).remedy
    refusal(directory / "to be made")
    assert not (directory / "to be made").exists()
    directory.parent.chmod(0o1777)
    opened(directory).close()


def test_a_link_to_a_directory_is_checked_at_both_ends(directory: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "ssd").symlink_to(directory)
    assert str(shared) in refusal(shared / "ssd").problem
    (shared / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(shared / "real")
    assert str(shared) in refusal(tmp_path / "link").problem
    shared.chmod(0o755)
    opened(tmp_path / "link").close()


@as_root
def test_the_directory_of_another_user_is_refused(directory: Path) -> None:
    os.chown(directory, STRANGER, STRANGER)
    assert f"user {STRANGER}" in refusal(directory).problem
    assert not list(directory.iterdir())
    os.chown(directory, 0, 0)
    tier = opened(directory)
    os.chown(directory, STRANGER, STRANGER)
    with pytest.raises(TierError, match=f"user {STRANGER}"):
        tier.health_check(soon())
    os.chown(directory, 0, 0)
    tier.health_check(soon())
    tier.close()


@as_root
def test_a_link_or_parent_of_another_user_is_refused(directory: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    assert f"user {STRANGER}" in refusal(link).problem
    os.chown(directory, STRANGER, STRANGER)
    with pytest.raises(StartError, match=f"user {STRANGER}"):
        check_parents(directory / "k.sock", "daemon.socket", 0)
    check_parents(directory / "k.sock", "daemon.socket", STRANGER)


@as_root
def test_a_segment_of_another_user_is_not_served(directory: Path) -> None:
    tier = opened(directory)
    store(tier, BLOCK)
    tier.close()
    (segment,) = directory.glob("*.segment")
    os.chown(segment, STRANGER, STRANGER)
    tier = opened(directory)
    assert fetch(tier, BLOCK) != [None]
    assert tier.usage().detail["files_dropped_at_start"] == 1
    assert not segment.exists()
    tier.close()


def test_a_segment_that_others_may_read_is_closed_to_them(directory: Path) -> None:
    tier = opened(directory)
    store(tier, BLOCK)
    tier.close()
    (segment,) = directory.glob("*.segment")
    segment.chmod(0o666)
    tier = opened(directory)
    assert mode_of(segment) == 0o600
    assert fetch(tier, BLOCK) == [None]
    tier.close()


@as_root
def test_a_document_of_another_user_is_not_read(directory: Path) -> None:
    path = directory / "learned.json"
    path.write_text("{}")
    assert read_file(path, 100) == b"{}"
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(PermissionError):
        read_file(path, 100)
