"""Fields: every value of every spec held against what its class declares."""

import dataclasses
import fractions
import math
import pickle
from typing import Any, ClassVar, Literal, get_type_hints

import numpy as np
import pytest
import torch

from visionpos import CoordSpec, Dims, PositionError
from visionpos.config import load_encoding, shipped
from visionpos.encodings import spec_types
from visionpos.geometry import ImageFrame, Layout, Recipe
from visionpos.geometry.fields import check_choice, check_fields


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One field of every sort that specs declare."""

    shared: ClassVar[int] = 3
    whole: int = 1
    number: float = 1.0
    flag: bool = False
    text: str = "a"
    word: Literal["a", "b"] = "a"
    axes: Literal[2, 3] = 2
    pair: tuple[int, int] = (1, 2)
    many: tuple[float, ...] = ()
    nested: tuple[tuple[str, int], ...] = ()
    either: tuple[int, ...] | Literal["most"] | None = None
    inner: CoordSpec | None = None
    ratio: fractions.Fraction = fractions.Fraction(1)
    steps: int | fractions.Fraction | tuple[fractions.Fraction, ...] = 1

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("whole", np.int64(3), 3),
        ("whole", np.uint8(3), 3),
        ("number", 3, 3.0),
        ("number", np.float32(0.5), 0.5),
        ("number", np.float64(0.5), 0.5),
        ("number", np.int32(2), 2.0),
        ("number", fractions.Fraction(1, 4), 0.25),
        ("ratio", fractions.Fraction(1, 3), fractions.Fraction(1, 3)),
        ("ratio", 3, fractions.Fraction(3)),
        ("steps", np.int64(3), 3),
        ("steps", fractions.Fraction(1, 256), fractions.Fraction(1, 256)),
        ("steps", [fractions.Fraction(1, 3), 1], (fractions.Fraction(1, 3), fractions.Fraction(1))),
        ("axes", np.int64(3), 3),
        ("pair", [3, 4], (3, 4)),
        ("pair", [np.int64(3), 4], (3, 4)),
        ("many", [], ()),
        ("many", [1, 2.5], (1.0, 2.5)),
        ("nested", [["a", 1], ("b", 2)], (("a", 1), ("b", 2))),
        ("either", [0, 2], (0, 2)),
        ("either", "most", "most"),
        ("either", None, None),
        ("inner", CoordSpec(axes=3), CoordSpec(axes=3)),
    ],
)
def test_good_values_are_settled(field, given, kept):
    """Lists become tuples and numpy's numbers Python's, so that a spec is hashable and can be written as YAML."""
    spec = Sample(**{field: given})
    value = getattr(spec, field)
    assert value == kept
    assert type(value) is type(kept)
    if isinstance(kept, tuple):
        assert [type(item) for item in value] == [type(item) for item in kept]
    assert hash(spec) == hash(Sample(**{field: kept}))
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("field", "given", "match"),
    [
        ("whole", True, r"whole is True; it must be a whole number\."),
        ("whole", 3.0, r"whole is 3\.0; it must be a whole number\."),
        ("whole", np.float64(3.0), r"whole is .*3\.0.*; it must be a whole number\."),
        ("whole", "5", r"whole is '5'; it must be a whole number\."),
        ("whole", None, r"whole is None; it must be a whole number\."),
        ("whole", [3], r"whole is \[3\]; it must be a whole number\."),
        ("whole", torch.tensor(3), r"whole is tensor\(3\); it must be a whole number\."),
        ("number", math.nan, r"number is nan; it must be a finite number\."),
        ("number", math.inf, r"number is inf; it must be a finite number\."),
        ("number", -math.inf, r"number is -inf; it must be a finite number\."),
        ("number", np.float32("nan"), r"number is .*nan.*; it must be a finite number\."),
        ("number", 10**400, r"number is 1000.*; it must be a finite number\."),
        (
            "number",
            fractions.Fraction(1, 3),
            r"number is Fraction\(1, 3\); it must be a finite number\.",
        ),
        ("ratio", 0.1, r"ratio is 0\.1; it must be a whole number or a Fraction\."),
        ("ratio", "1/3", r"ratio is '1/3'; it must be a whole number or a Fraction\."),
        ("number", True, r"number is True; it must be a finite number\."),
        ("number", "5", r"number is '5'; it must be a finite number\."),
        ("number", 1j, r"number is 1j; it must be a finite number\."),
        ("number", None, r"number is None; it must be a finite number\."),
        ("flag", 1, r"flag is 1; it must be True or False\."),
        ("flag", "yes", r"flag is 'yes'; it must be True or False\."),
        ("text", 3, r"text is 3; it must be a text\."),
        ("word", "c", r"word is 'c'; it must be one of 'a', 'b'\."),
        ("word", "A", r"word is 'A'; it must be one of 'a', 'b'\."),
        ("word", ["a"], r"word is \['a'\]; it must be one of 'a', 'b'\."),
        ("word", {}, r"word is \{\}; it must be one of 'a', 'b'\."),
        ("word", None, r"word is None; it must be one of 'a', 'b'\."),
        ("axes", True, r"axes is True; it must be one of 2, 3\."),
        ("axes", 2.0, r"axes is 2\.0; it must be one of 2, 3\."),
        ("pair", (1,), r"pair is \(1,\); it must be \(a whole number, a whole number\)\."),
        ("pair", 1, r"pair is 1; it must be \(a whole number, a whole number\)\."),
        ("pair", (1, math.nan), r"pair is \(1, nan\); it must be \(a whole number"),
        ("many", (1.0, math.nan), r"many is \(1\.0, nan\); it must be a tuple \(a finite number"),
        ("many", [[1.0]], r"many is \[\[1\.0\]\]; it must be a tuple \(a finite number each\)"),
        ("nested", (("a",),), r"nested is \(\('a',\),\); it must be a tuple \(\(a text, a whole"),
        ("either", "more", r"either is 'more'; it must be a tuple .* or 'most' or None\."),
        ("either", 2, r"either is 2; it must be a tuple \(a whole number each\) or 'most'"),
        ("inner", {"axes": 3}, r"inner is \{'axes': 3\}; it must be a CoordSpec or None\."),
    ],
)
def test_error_names_field_value_and_type(field, given, match):
    with pytest.raises(PositionError, match=match):
        Sample(**{field: given})


@pytest.mark.parametrize(
    ("value", "allowed", "fits"),
    [
        (2, (2, 3), True),
        ("a", ("a",), True),
        ((0, 1), ((0, 1), (1, 0)), True),
        (None, ("a", None), True),
        (2.0, (2, 3), False),
        (True, (1, 2), False),
        ([], ("a",), False),
        ({"a": 1}, ("a",), False),
        (math.nan, (1, 2), False),
    ],
)
def test_choice_is_by_type_and_value(value, allowed, fits):
    if fits:
        check_choice("name", value, allowed)
        return
    with pytest.raises(PositionError, match=r"name is .*; it must be one of "):
        check_choice("name", value, allowed)


def _shipped_bases() -> dict[type, Any]:
    """A valid instance of every spec class: the first shipped config of its kind, and the parts of specs."""
    found: dict[type, Any] = {}
    for name in shipped("encodings"):
        spec = load_encoding(name)
        found.setdefault(type(spec), spec)
    parts = (
        CoordSpec(trained_shape=(3, 5), scale=(1.0, 1.0), shift=0.1, jitter=1.5, rescale=1.5),
        Dims(embed_dim=48, num_heads=2, depth=3, head_dim=24),
        Layout(head_dim=24),
        Recipe(),
        ImageFrame(source_hw=(3, 5), input_hw=(8, 8), resize="pad"),
    )
    return found | {type(part): part for part in parts}


BASES = _shipped_bases()
_WRONG = {
    "float": [math.nan, math.inf, -math.inf, "3", True],
    "int": [True, 2.5, "3", math.nan],
    "tuple[int": [(True, 2), (2.5, 2), ("3", 2), 3, (math.nan,)],
    "tuple[float": [(math.nan, 1.0), (math.inf, 1.0), ("3", 1.0)],
    "bool": [1, "yes", None],
    "str": [3, ["a"]],
    "Literal": ["no such word", ["a"], {}, 2.5],
}


def _cases() -> list[tuple[type, str, Any]]:
    cases = []
    for kind in BASES:
        for name, hint in get_type_hints(kind).items():
            if name not in {field.name for field in dataclasses.fields(kind)}:
                continue
            words = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            for word, values in _WRONG.items():
                if words.startswith(word):
                    cases += [(kind, name, value) for value in values]
    return cases


CASES = _cases()


def test_every_spec_class_is_covered():
    assert set(spec_types().values()) <= set(BASES)
    assert {kind for kind, _, _ in CASES} == set(BASES)
    assert {"theta", "std", "sigma", "slowest", "trained_shape", "radius", "alpha"} <= {
        name for _, name, _ in CASES
    }


@pytest.mark.parametrize("kind", BASES, ids=lambda kind: kind.__name__)
def test_error_every_field_of_every_spec(kind):
    """Whatever stands in a config: NaN, infinity, True, a fraction, text. The message names the field."""
    for name, value in [(name, value) for owner, name, value in CASES if owner is kind]:
        with pytest.raises(PositionError) as caught:
            dataclasses.replace(BASES[kind], **{name: value})
        assert str(caught.value).startswith(f"{name} is "), f"{name}={value!r}: {caught.value}"


# field -> values that are numbers of the right sort, and out of range wherever a spec has the field
_OUT_OF_RANGE = {
    "theta": [0.0, -1.0],
    "std": [-0.1],
    "sigma": [0.0, -1.0],
    "slowest": [0.0, -1.0, 1e9],
    "still": [-0.1, 1.0],
    "radius": [0.0, -1.0],
    "radius_scale": [0.0, -1.0],
    "alpha": [-0.1, 1.1],
    "least": [0.0, 0.4],
    "drift": [-0.1],
    "scale": [0.0, -1.0],
    "gamma": [0.0, -1.0],
    "locality": [0.0, -1.0],
    "max_bias": [0.0, -1.0],
    "threshold": [0.0, -1.0],
    "warp": [0.0, -1.0],
    "global_slope": [0.0, -1.0],
    "start": [-1.0],
    "shift": [-0.1],
    "jitter": [0.9],
    "rescale": [0.9],
    "periods": [(0.0, 1.0), (2.0, 1.0)],
    "max_freq": [1.0],
    "trained_shape": [(0, 5), (-3, 5)],
    "hidden": [0],
    "parabolas": [0],
}


@pytest.mark.parametrize("kind", BASES, ids=lambda kind: kind.__name__)
def test_error_every_range(kind):
    """A number that gives NaN, infinity or nothing is refused by the spec, before any module is built from it."""
    hints = get_type_hints(kind)
    for name, values in _OUT_OF_RANGE.items():
        numeric = name in hints and not str(hints[name]).startswith("typing.Literal")
        for value in values if numeric else ():
            with pytest.raises(PositionError, match=name.removeprefix("radius_")):
                dataclasses.replace(BASES[kind], **{name: value})
