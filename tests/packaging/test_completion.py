"""Completion as the shells themselves take it."""

import subprocess
from pathlib import Path

import pytest

from kvtier.cli.main import main
from tests.programs import requires

BASH = """
source "$1"; shift
complete -p kvtier
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p kvtier | sed -E 's/.*-F ([^ ]+).*/\\1/')
"$function" kvtier "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""

FISH = 'source $argv[1]; complete --do-complete "$argv[2]"'

ZSH = """
fpath=("$1" $fpath)
autoload -Uz compinit && compinit -D -u
print -- "${_comps[kvtier]}"
compdef -d kvtier
eval "$(cat "$1/_kvtier")"
print -- "${_comps[kvtier]}"
"""


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys) -> Path:
    shell: str = request.param
    if shell != "bash":
        requires(shell)
    assert main(["completion", shell]) == 0
    path = tmp_path / "_kvtier"
    path.write_text(capsys.readouterr().out)
    return path


def said(folder: Path, *words: str) -> str:
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8"},
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["st"], {"stat"}),
        (["tier", "d"], {"drain", "detach"}),
        (["tier", "drain", "s"], {"ssd"}),
        (["stat", "--ch"], {"--check"}),
        (["drop", "--tier", "r"], {"remote"}),
        (["serve", "--config", "kv"], {"kvtier.toml"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
    ],
    ids=lambda each: " ".join(sorted(each)),
)
def test_bash(script, words, expected):
    (script.parent / "kvtier.toml").touch()
    lines = said(script.parent, "bash", "-c", BASH, "bash", str(script), "kvtier", *words)
    head, *found = lines.splitlines()
    assert head.startswith("complete ")
    assert {word.strip() for word in found if word} == expected


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish(script):
    (script.parent / "kvtier.toml").touch()
    for line, expected in {
        "kvtier st": {"stat"},
        "kvtier tier d": {"drain", "detach"},
        "kvtier stat --ch": {"--check"},
        "kvtier serve --config kv": {"kvtier.toml"},
    }.items():
        lines = said(script.parent, "fish", "--no-config", "-c", FISH, str(script), line)
        assert {each.partition("\t")[0] for each in lines.splitlines()} == expected, line


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh(script):
    assert said(script.parent, "zsh", "-n", str(script)) == ""
    installed, evaluated = said(
        script.parent, "zsh", "-f", "-c", ZSH, "zsh", str(script.parent)
    ).splitlines()
    assert installed == "_kvtier"
    assert evaluated.startswith("_shtab_")
