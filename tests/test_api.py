"""Public names change on purpose: `__all__` of every public room is listed in api.json.

`python -m tests.test_api --write` (or `make api`) rewrites the list.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path

import pytest

INVENTORY = Path(__file__).with_name("api.json")
ROOMS = (
    "visionpos",
    "visionpos.geometry",
    "visionpos.attention",
    "visionpos.encodings",
    "visionpos.vlm",
    "visionpos.retrofit",
    "visionpos.vlm.hf",
)


def public_names(room: str) -> list[str]:
    return sorted(importlib.import_module(room).__all__)


@pytest.mark.parametrize("room", ROOMS)
def test_names_are_listed(room: str) -> None:
    listed = set(json.loads(INVENTORY.read_text(encoding="utf-8"))[room])
    names = set(public_names(room))
    removed, added = sorted(listed - names), sorted(names - listed)
    assert removed + added == [], (
        f"{room}: removed {removed}, added {added}. Users rely on these names: if this is meant, "
        "write a line in CHANGELOG.md and run `make api`."
    )


@pytest.mark.parametrize("room", ROOMS)
def test_names_exist_and_are_documented(room: str) -> None:
    module = importlib.import_module(room)
    assert len(set(module.__all__)) == len(module.__all__), f"{room}.__all__ names something twice"
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            # A dataclass without a docstring is given its own signature as one.
            written = value.__doc__ is not None and not value.__doc__.startswith(f"{name}(")
            assert written, f"{room}.{name} has no docstring"


def main(arguments: list[str]) -> int:
    if arguments != ["--write"]:
        print("usage: python -m tests.test_api --write", file=sys.stderr)
        return 2
    inventory = {room: public_names(room) for room in ROOMS}
    INVENTORY.write_text(json.dumps(inventory, indent=2) + "\n", encoding="utf-8")
    print(f"{INVENTORY}: {sum(map(len, inventory.values()))} names in {len(ROOMS)} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
