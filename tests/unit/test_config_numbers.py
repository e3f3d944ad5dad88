"""Numbers that are no sizes: shares, and limits that may also be words."""

from pathlib import Path

import pytest

from kvtier.config import load_config
from kvtier.errors import ConfigError


@pytest.mark.parametrize(("text", "gate"), [("0.0", 0.0), (".5", 0.5), ("1", 1.0), ("1.0", 1.0)])
def test_a_share_is_spelled_as_its_place_has_it(tmp_path: Path, text: str, gate: float) -> None:
    assert load_config(None, {"ssd.gate": text}, {}).section("ssd").gate == gate
    assert load_config(None, {}, {"KVTIER_SSD_GATE": text}).section("ssd").gate == gate
    file = tmp_path / "kvtier.toml"
    file.write_text(f"[ssd]\ngate = {float(text)}\n")
    assert load_config(file, {}, {}).section("ssd").gate == gate


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1.5", "is above the maximum of 1.0"),
        ("-0.1", "is below the minimum of 0.0"),
        ("x", "expected a number"),
        ("nan", "expected a number"),
    ],
)
def test_what_is_no_share_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"ssd\.gate.*{said}.*gate = 0\.75"):
        load_config(None, {"ssd.gate": text}, {})


@pytest.mark.parametrize(("text", "tokens"), [("auto", "auto"), ("0", 0), ("4096", 4096)])
def test_a_limit_is_a_number_or_a_word(text: str, tokens: str | int) -> None:
    assert load_config(None, {"policy.max_offload_tokens": text}, {}).policy.max_offload_tokens == (
        tokens
    )


@pytest.mark.parametrize("text", ["-1", "1.5", "all", str(2**31)])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"policy\.max_offload_tokens"):
        load_config(None, {"policy.max_offload_tokens": text}, {})
