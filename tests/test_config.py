"""YAML in, frozen specs out, and back; every fault is named with its value."""

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import visionpos as vp
from visionpos import ConfigError, CoordSpec, PositionError, config

SHIPPED = (
    "big_vision_sincos",
    "dinov2_learned_37",
    "dinov2_reg_learned_37",
    "dinov3",
    "eva02",
    "mae",
    "perception_encoder",
    "pixtral_vision",
    "qwen_vl_vision",
    "rope_mixed",
    "rope_vit_axial",
    "sapiens2",
    "timm_sincos",
    "vit_learned_14",
    "vjepa_sincos",
)

side = st.integers(1, 64)
positive = st.floats(0.01, 1e6)
factor = st.none() | st.floats(1.0, 4.0)
moves = {
    "trained_shape": st.none() | st.tuples(side, side),
    "shift": st.none() | st.floats(0.0, 1.0),
    "jitter": factor,
    "rescale": factor,
    "scope": st.sampled_from(["forward", "block", "sample"]),
}
cells = st.floats(-2.0, 2.0)
divided = st.sampled_from(["centred", "fractional"])
normalize = st.sampled_from(["separate", "min", "max"])
# A field that would have no effect is refused: an index is divided by nothing, pinned ends cannot be moved.
coord_specs = st.one_of(
    st.builds(CoordSpec, unit=divided, offset=cells, normalize=normalize, **moves),
    st.builds(CoordSpec, unit=st.just("index"), offset=cells, **moves),
    st.builds(CoordSpec, unit=st.just("endpoint"), **moves),
)
specs = st.one_of(
    st.builds(
        vp.AxialRopeSpec,
        theta=positive,
        coords=coord_specs,
        pairing=st.sampled_from(["half", "adjacent"]),
        order=st.sampled_from(["contiguous", "interleaved"]),
        bands=st.sampled_from(["shared", "dealt"]),
        axis_order=st.none() | st.permutations((0, 1)).map(tuple),
        unit=st.sampled_from(["radians", "turns"]),
        rotary_dim=st.none() | side,
    ),
    st.builds(
        vp.AxialRopeSpec,
        periods=st.tuples(st.floats(0.1, 1.0), st.floats(1.0, 99.0)),
        coords=coord_specs,
    ),
    st.builds(vp.MixedRopeSpec, theta=positive, coords=coord_specs),
    st.builds(
        vp.SinCosSpec,
        dialect=st.sampled_from(["mae", "timm", "big_vision", "vjepa"]),
        theta=positive,
    ),
    st.builds(
        vp.LearnedSpec,
        grid_hw=st.tuples(side, side),
        recipe=st.sampled_from(sorted(vp.RECIPES)),
        prefix_rows=st.integers(0, 9),
        std=st.floats(0.0, 1.0),
    ),
)
values = st.recursive(
    st.integers() | st.text(max_size=3) | st.none() | st.lists(st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
maps = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


def write(folder: Path, text: str) -> Path:
    path = folder / "own.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_shape_of_what_is_shipped():
    """The encodings of the README, sorted by name; other folders are rooms of later files."""
    names = list(config.shipped("encodings"))
    assert names == sorted(names)
    assert set(SHIPPED) <= set(names)


@pytest.mark.parametrize("name", sorted(config.shipped("encodings")))
def test_shape_of_a_shipped_file(name):
    """Every file says where it comes from, in prose and as data, and how to show it."""
    text = config.shipped("encodings")[name].read_text(encoding="utf-8")
    data = config.read_yaml(text, source=name)
    assert set(data) == {"about", "encoding"}
    assert set(data["about"]) == {"source", "paper", "note"}
    assert all(isinstance(line, str) and line for line in data["about"].values())
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert f"# Source: {data['about']['source']}" in head
    assert f"# Show it: visionpos encodings {name}" in head


def test_reference_shipped_values():
    """Spot values against facts/vision_pe.md 1B and 2 and facts/timm.md 1.1."""
    load = config.load_encoding
    dinov3 = load("dinov3")
    assert (dinov3.theta, dinov3.unit, dinov3.pairing) == (100.0, "turns", "half")
    assert (dinov3.coords.unit, dinov3.coords.normalize) == ("centred", "separate")
    assert not dinov3.coords.augments
    assert load("sapiens2").coords.rescale == 2.0
    eva = load("eva02")
    assert (eva.theta, eva.pairing, eva.coords.trained_shape) == (10000.0, "adjacent", (16, 16))
    assert load("rope_mixed").theta == 10.0
    axial = load("rope_vit_axial")
    assert (axial.theta, axial.axis_order, axial.pairing) == (100.0, (1, 0), "adjacent")
    assert load("pixtral_vision").bands == "dealt"
    assert load("perception_encoder").coords.offset == 1.0


@given(specs)
def test_invariant_round_trip(tmp_path_factory, spec):
    """Any spec dumps to YAML that loads back to an equal spec."""
    text = config.dump_encoding(spec)
    assert config.load_encoding(write(tmp_path_factory.mktemp("spec"), text)) == spec
    assert config.encoding_spec(config.plain(spec)) == spec


@given(specs)
def test_invariant_dump_is_plain_data(spec):
    """No Python tag, no tuple: any YAML reader understands the file."""
    assert "!!" not in config.dump_encoding(spec)
    data = yaml.safe_load(config.dump_encoding(spec))
    assert list(data) == ["encoding"]
    assert data["encoding"]["kind"] == spec.kind


@given(maps, maps)
def test_invariant_overlay(base, over):
    """Neither input is written; nothing overlaid on a map changes it; keys of `over` win."""
    copies = repr(base), repr(over)
    out = config.overlay(base, over)
    assert (repr(base), repr(over)) == copies
    assert config.overlay(base, {}) == base
    for key in base.keys() - over.keys():
        assert out[key] == base[key]
    for key, value in over.items():
        if value is None:
            assert key not in out
        elif not isinstance(value, dict):
            assert out[key] == value


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
        ({"a": {"x": 1}, "b": 2}, {"a": None}, {"b": 2}),
        ({"a": {"x": {"k": 1}}}, {"a": {"x": {"k": None, "l": 2}}}, {"a": {"x": {"l": 2}}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"replace": True, "z": 3}}, {"a": {"z": 3}}),
        ({"a": 1}, {"a": {"x": 1}}, {"a": {"x": 1}}),
        ({"a": {"x": 1}}, {"a": 1}, {"a": 1}),
        ({}, {"a": {"x": None, "y": 1}}, {"a": {"y": 1}}),
    ],
)
def test_reference_overlay(base, over, expected):
    """Maps merge, scalars and lists replace, null removes, `replace: true` starts afresh."""
    assert config.overlay(base, over) == expected


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("encoding.theta=50", {"encoding": {"kind": "x", "theta": 50}}),
        (
            "encoding.coords.shape=[3, 5]",
            {"encoding": {"kind": "x", "theta": 1, "coords": {"shape": [3, 5]}}},
        ),
        ("encoding.unit=turns", {"encoding": {"kind": "x", "theta": 1, "unit": "turns"}}),
        ("encoding.theta=null", {"encoding": {"kind": "x"}}),
        ("note=a=b", {"encoding": {"kind": "x", "theta": 1}, "note": "a=b"}),
    ],
)
def test_reference_set_value(assignment, expected):
    """A dotted override reads its value as YAML; the data it is laid on is not changed."""
    data = {"encoding": {"kind": "x", "theta": 1}}
    assert config.set_value(data, assignment) == expected
    assert data == {"encoding": {"kind": "x", "theta": 1}}


def test_reference_overrides():
    """Overrides are applied in order, on shipped names and on files, and validated like the file."""
    spec = config.load_encoding(
        "dinov3",
        overrides=["encoding.theta=50", "encoding.coords.rescale=2.0", "encoding.theta=60"],
    )
    assert (spec.theta, spec.coords.rescale, spec.coords.unit) == (60.0, 2.0, "centred")


def test_reference_scientific_numbers():
    """YAML 1.1 reads 1e4 as text; it is still the number the user means."""
    spec = config.load_encoding("dinov3", overrides=["encoding.theta=1e4"])
    assert spec.theta == 10000.0
    assert isinstance(spec.theta, float)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: [1", r"own\.yaml is not YAML: .*line 1"),
        ("- 1\n- 2\n", r"own\.yaml holds list; a mapping with text keys"),
        ("", r"own\.yaml holds NoneType"),
        ("1: a\n", r"own\.yaml holds dict; a mapping with text keys"),
        (
            "a: 1\nb: 2\na: 3\n",
            r"own\.yaml: key 'a' stands twice .*at line 1; keys must be unique\. Delete one",
        ),
        ("x: {k: 1, k: 2}\n", r"key 'k' stands twice"),
        (
            "a: !!python/object/apply:os.system [echo]\n",
            r"is not YAML: could not determine a constructor",
        ),
        ("? [1]\n: 2\n", r"own\.yaml is not YAML.*unhashable"),
    ],
)
def test_error_read_yaml(text, match):
    """Broken text, a wrong top, a key written twice, and code in a file are refused by file and line."""
    with pytest.raises(ConfigError, match=match):
        config.read_yaml(text, source="own.yaml")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("encoding: 5\n", r"no mapping `encoding`; the top level holds `encoding:`"),
        ("about: {}\n", r"no mapping `encoding`"),
        ("encoding: {kind: sincos}\nthetta: 5\n", r"unknown key thetta; the top level holds"),
        (
            "encoding: {theta: 5}\n",
            r"kind is None; it must be one of .*axial_rope, .*sincos",
        ),
        ("encoding: {kind: [rope]}\n", r"kind is \['rope'\]; it must be one of .*axial_rope"),
        ("encoding: {kind: rope}\n", r"kind is 'rope'; it must be one of .*axial_rope"),
        (
            "encoding: {kind: sincos, thetta: 5}\n",
            r"unknown key thetta; remove it or correct its spelling",
        ),
        (
            "encoding: {kind: axial_rope, coords: {units: index}}\n",
            r"unknown key coords\.units; remove it",
        ),
        ("encoding: {kind: learned}\n", r"key grid_hw is missing; add it"),
        ("encoding: {kind: learned, grid_hw: [4]}\n", r"grid_hw"),
        ("encoding: {kind: learned, grid_hw: [4, 9, 2]}\n", r"grid_hw.*\[4, 9, 2\]"),
        ("encoding: {kind: learned, grid_hw: [4, 9.5]}\n", r"grid_hw\.1 = 9\.5"),
        ("encoding: {kind: learned, grid_hw: [0, 9]}\n", r"Grid height is 0;"),
        (
            "encoding: {kind: learned, grid_hw: [4, 9], recipe: x}\n",
            r"recipe is 'x'; it must be .* beit",
        ),
        ("encoding: {kind: sincos, theta: fast}\n", r"theta = 'fast': .*number"),
        ("encoding: {kind: sincos, dialect: moco}\n", r"dialect = 'moco': .*'mae', 'timm'"),
        (
            "encoding: {kind: axial_rope, pairing: interleaved}\n",
            r"pairing = 'interleaved': .*'half'",
        ),
        (
            "encoding: {kind: axial_rope, coords: {unit: centered}}\n",
            r"coords\.unit = 'centered': .*'centred'",
        ),
        (
            "encoding: {kind: axial_rope, coords: {jitter: 0.5}}\n",
            r"jitter is 0\.5; a finite factor",
        ),
        (
            "encoding: {kind: axial_rope, coords: {extent: trained}}\n",
            r"extent 'trained' .*needs trained_shape",
        ),
        (
            "encoding: {kind: axial_rope, periods: [0.5, 8], unit: turns}\n",
            r"periods \(0\.5, 8\.0\) cannot be combined",
        ),
        (
            "encoding: {kind: sincos, theta: x, dialect: y}\n",
            r"theta = 'x'.*; .*dialect = 'y'|dialect = 'y'.*; .*theta = 'x'",
        ),
    ],
)
def test_error_in_a_file(tmp_path, text, match):
    """Every fault of a file is one ConfigError that names the file, the key, the value and what is wrong."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=match) as caught:
        config.load_encoding(path)
    assert str(caught.value).startswith(str(path))
    assert isinstance(caught.value, PositionError)


@pytest.mark.parametrize("name", ["no_such", "no/such.yaml", ""])
def test_error_no_such_name(name):
    """A wrong name lists the shipped ones."""
    with pytest.raises(ConfigError, match=r"neither a readable file .*Shipped: .*dinov3, .*eva02"):
        config.load_encoding(name)


def test_error_unreadable(tmp_path):
    """A folder and a file that is no text are refused with the reason."""
    with pytest.raises(ConfigError, match=r"neither a readable file \(.*directory\)"):
        config.load_encoding(tmp_path)
    binary = tmp_path / "weights.bin"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match=r"weights\.bin .*not UTF-8 text"):
        config.load_encoding(binary)


@pytest.mark.parametrize(
    "assignment", ["encoding.theta", "=5", "a..b=1", ".a=1", "encoding.=1", ""]
)
def test_error_override(assignment):
    match = r"override '.*' is not key=value\. Write it as encoding\.theta=100"
    with pytest.raises(ConfigError, match=match):
        config.set_value({}, assignment)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("encoding.thetta=5", r"dinov3\.yaml: unknown key thetta"),
        ("encoding.theta=slow", r"dinov3\.yaml: theta = 'slow'"),
        ("encoding.coords.axes=5", r"coords: axes is 5; it must be one of 1, 2, 3"),
        ("encoding=5", r"no mapping `encoding`"),
        ("encoding.kind=null", r"kind is None"),
        ("theta=5", r"unknown key theta; the top level"),
        ("encoding.theta=[1", r"--set encoding\.theta=\[1 is not YAML"),
    ],
)
def test_error_override_of_a_shipped_file(override, match):
    with pytest.raises(ConfigError, match=match):
        config.load_encoding("dinov3", overrides=[override])


def test_error_messages_are_one_line(tmp_path):
    """A command prints the message as it is: one line, however pydantic or PyYAML break theirs."""
    path = write(tmp_path, "encoding: {kind: sincos, theta: x, dialect: y}\n")
    for call in (
        lambda: config.load_encoding(path),
        lambda: config.read_yaml("a: [1\nb: 2\n"),
        lambda: config.read_yaml("a: 1\na: 2\n"),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_invariant_numbers_survive():
    """Floats are written so that they read back to the last bit."""
    spec = vp.SinCosSpec(theta=math.pi * 1e3)
    data = config.read_yaml(config.dump_encoding(spec))
    assert data["encoding"]["theta"] == spec.theta


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("0100", 100),  # YAML 1.1 read 64
        ("010", 10),
        ("08", 8),
        ("0o17", 15),
        ("0x10", 16),
        ("1:30", "1:30"),  # and here 90
        ("1_000", "1_000"),
        (".5e1", 5.0),
        ("5.", 5.0),
        ("1.e2", 100.0),
        ("-3", -3),
        ("+1e3", 1000.0),
        ("-.inf", -math.inf),
        ("'5'", "5"),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text, kept):
    (value,) = config.read_yaml(f"a: {text}").values()
    assert value == kept
    assert type(value) is type(kept)


def test_merge_keys_are_merged_and_own_keys_win():
    data = config.read_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")
    assert data["b"] == {"x": 1, "y": 3}
    with pytest.raises(ConfigError, match=r"key 'y' stands twice"):
        config.read_yaml("a: &a {x: 1}\nb: {<<: *a, y: 3, y: 4}")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("encoding: &a {kind: axial_rope, coords: *a}", r"y\.yaml: the data holds itself"),
        (f"encoding: {{kind: axial_rope, theta: {'9' * 5000}}}", r"y\.yaml holds a value that"),
        ("encoding: {kind: axial_rope, theta: !!float x}", r"y\.yaml holds a value that cannot"),
        ("encoding: {kind: axial_rope, theta: !!int 1:30}", r"y\.yaml holds a value that"),
        ("encoding: {kind: axial_rope, theta: !!bool x}", r"y\.yaml holds a value that"),
        ("encoding: {kind: axial_rope, theta: 1:30}", r"theta = '1:30'"),
    ],
)
def test_error_yaml_tricks(text, match, tmp_path):
    path = tmp_path / "y.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=match):
        config.load_encoding(path)


@pytest.mark.parametrize("name", [None, 3, b"dinov3", ["dinov3"], "a\0b"])
def test_error_names(name):
    with pytest.raises(ConfigError, match=r"shipped name"):
        config.load_encoding(name)


def test_error_overrides():
    with pytest.raises(ConfigError, match=r"overrides is 'encoding\.theta=5'; a list of texts"):
        config.load_encoding("dinov3", overrides="encoding.theta=5")
    with pytest.raises(ConfigError, match=r"override 3 is no text"):
        config.load_encoding("dinov3", overrides=[3])
