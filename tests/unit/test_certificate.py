"""Certificates: what is taken for one, and what is said of its time."""

import datetime
import os
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from kvtier.certificate import read_authorities, read_chain
from kvtier.errors import StartError

DAY = 86_400
NOW_S = 1_800_000_000


def certificate(before_days: int, after_days: int) -> bytes:
    """Return one in PEM that holds from so many days before now to so many after."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.fromtimestamp(NOW_S, datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=before_days))
        .not_valid_after(now + datetime.timedelta(days=after_days))
        .sign(key, SHA256())
    )
    return made.public_bytes(Encoding.PEM)


def written(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def test_a_chain_ends_with_its_first_and_authorities_with_their_last(tmp_path: Path) -> None:
    path = written(tmp_path / "pem", certificate(1, 30), certificate(40, 10), certificate(5, 90))
    chain, authorities = read_chain(path, "f"), read_authorities(path, "f")
    assert (chain.not_before_s, chain.not_after_s) == (NOW_S - 40 * DAY, NOW_S + 10 * DAY)
    assert (authorities.not_before_s, authorities.not_after_s) == (
        NOW_S - 5 * DAY,
        NOW_S + 90 * DAY,
    )


def test_only_certificates_are_taken_over(tmp_path: Path) -> None:
    pem = certificate(1, 30)
    path = written(tmp_path / "pem", "# Autorité\n".encode(), pem, b"\nwords\n")
    assert read_authorities(path, "f").pem == pem


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (60, 30, ""),
        (76, 14, ""),
        (77, 13, "expires on 2027-01-28 08:00 UTC"),
        (0, 1, ""),  # one of a day, as machines get them
        (7, 2, "expires on"),
        (90, 0, "expired on 2027-01-15 08:00 UTC"),
        (90, -1, "expired on"),
        (-1, 90, "is not valid before 2027-01-16"),
    ],
)
def test_what_is_said_of_its_time(tmp_path: Path, before: int, after: int, words: str) -> None:
    path = written(tmp_path / "pem", certificate(before, after))
    said = read_chain(path, "f").complaint(NOW_S)
    assert said.startswith(words)
    assert bool(said) == bool(words)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (slice(0), "contains no certificate"),
        (slice(100), "has an invalid certificate"),
        (slice(-8), "has a truncated certificate"),
        (slice(-300), "has a truncated certificate"),
    ],
)
def test_a_file_that_is_half_written(tmp_path: Path, cut: slice, words: str) -> None:
    whole = certificate(1, 30) + certificate(1, 30)
    with pytest.raises(StartError, match=words) as refused:
        read_chain(written(tmp_path / "pem", whole[cut]), "rpc.tls_cert")
    assert refused.value.field == "rpc.tls_cert"
    assert str(tmp_path) in refused.value.problem


def test_what_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, words in (
        (tmp_path / "fifo", "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "missing", "cannot read"),
        (written(tmp_path / "large", certificate(1, 30), bytes(1 << 20)), "larger than 1 MiB"),
    ):
        with pytest.raises(StartError, match=words):
            read_chain(path, "f")
