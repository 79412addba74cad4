"""README.md tells the truth: its Python runs and prints what it says, its commands exist.

In a ```python block, a line `print(...)  # text` promises that `text` is what it prints. Blocks run
in order and share their names; a block that opens with ```python no-run is only compiled.
"""

import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(?P<language>\w+)(?P<note>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
PROMISE = re.compile(r"^\s*print\(.*\)\s+# (?P<text>.+)$", re.M)
SHELLS = {"bash", "sh", "shell", "console"}


class Block(NamedTuple):
    language: str
    note: str
    text: str
    line: int


def blocks(*languages: str) -> list[Block]:
    """The fenced blocks of README.md in these languages, in order."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = [
        Block(
            match["language"], match["note"], match["text"], readme[: match.start()].count("\n") + 1
        )
        for match in FENCE.finditer(readme)
    ]
    return [block for block in found if block.language in languages]


def commands() -> list[list[str]]:
    """The shell commands of README.md, split into words, without prompts and comments."""
    lines = "".join(block.text for block in blocks(*SHELLS)).replace("\\\n", " ").splitlines()
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [command for command in words if command]


def test_python_blocks_run_and_print_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    found = blocks("python")
    assert found, "README.md has no python block"
    for block in found:
        code = compile("\n" * block.line + block.text, "README.md", "exec")  # true line numbers
        if "no-run" in block.note:
            continue
        exec(code, names)
        printed = iter(capsys.readouterr().out.splitlines())
        for promise in PROMISE.finditer(block.text):
            assert promise["text"] in printed, f"README.md never prints {promise['text']!r} there"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    named = {word for command in commands() if command[0] == "make" for word in command[1:]}
    assert {"demo", "test"} <= named
    assert {word for word in named if "=" not in word} <= targets


def test_visionpos_commands_exist() -> None:
    import typer.main

    from visionpos.cli import app

    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    named = {command[1] for command in commands() if command[0] == "visionpos"}
    assert {name for name in named if not name.startswith("-")} <= known


def test_scripts_and_extras_exist() -> None:
    for command in commands():
        if Path(command[0]).name.startswith("python") and command[1].endswith(".py"):
            assert (ROOT / command[1]).is_file(), command[1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    words = " ".join(word for command in commands() for word in command)
    named = {name for group in re.findall(r"\[([a-z,]+)\]", words) for name in group.split(",")}
    assert named <= extras.keys()
