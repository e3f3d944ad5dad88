"""The same identity in every process: keys that change would silently empty every cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.core.identity import (
    NO_TENANT,
    BlockHeader,
    chain_root,
    hash_blocks,
    payload_checksum,
    tenant_digest,
)
from tests.integration.pattern import key_space

GOLDEN = {
    "key_space": "91a7fb608f634b2656647abad7eba7e7",
    "tenant": "4cef9c255f64888fccc16485c640dc43",
    "root": "d65e050bf4fc98c5d833c8622c873a5c",
    "hashes": [
        "64a51596261e974f8c99a9d164041b83",
        "c78a2ba1d9e610a99add26634ee7c962",
        "b2e491c32e0195bb7dd474601e71e0a6",
    ],
    "checksum": "4150629ece9bd58abfe9f4c22a180e9a",
}
"""Made once. If a change here is meant, ``FORMAT_VERSION`` rises with it."""


def keys() -> dict[str, object]:
    space = key_space('{"rope_theta":10000.0}')
    tenant = tenant_digest("alice")
    root = chain_root(space.digest, tenant)
    hashes = hash_blocks(root, range(12), 4, {1: b"an image"})
    header = BlockHeader(space.digest, tenant, hashes[0], root, 0, 5)
    return {
        "key_space": space.digest.hex(),
        "tenant": tenant.hex(),
        "root": root.hex(),
        "hashes": [block_hash.hex() for block_hash in hashes],
        "checksum": payload_checksum(header, b"bytes").hex(),
    }


def in_another_process(source: str, seed: str, folder: Path) -> object:
    """Evaluate in a process with another hash seed, directory, locale and time zone."""
    environment = os.environ | {
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TZ": "Pacific/Auckland",
        "LC_ALL": "C",
    }
    done = subprocess.run(
        [sys.executable, "-c", source],
        check=True,
        capture_output=True,
        cwd=folder,
        env=environment,
        timeout=60,
    )
    return json.loads(done.stdout)


def test_keys_are_what_they_always_were() -> None:
    assert keys() == GOLDEN


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1234567"])
def test_keys_are_the_same_in_any_process(seed: str, tmp_path: Path) -> None:
    source = (
        "import json; from tests.integration.test_key_space import keys; print(json.dumps(keys()))"
    )
    assert in_another_process(source, seed, tmp_path) == GOLDEN


@pytest.mark.slow
def test_a_models_key_space_is_the_same_in_any_process(tiny_folder: Path, tmp_path: Path) -> None:
    from kvtier.engine.engine import block_layout
    from kvtier.engine.model import key_space as space_of
    from kvtier.engine.model import load_model
    from kvtier.engine.settings import EngineSettings

    source = f"""
import json
from kvtier.engine.engine import block_layout
from kvtier.engine.model import key_space
from kvtier.engine.model import load_model
from kvtier.engine.settings import EngineSettings
loaded = load_model({str(tiny_folder)!r})
print(json.dumps(key_space(loaded, block_layout(loaded, EngineSettings())).digest.hex()))
"""
    loaded = load_model(tiny_folder)
    here = space_of(loaded, block_layout(loaded, EngineSettings())).digest.hex()
    assert in_another_process(source, "99", tmp_path) == here


def test_no_salt_is_no_tenant() -> None:
    assert tenant_digest(None) == tenant_digest("") == NO_TENANT
    assert len({tenant_digest(salt) for salt in (None, "a", "b", "A", "a ", "ä", "a\0")}) == 7
