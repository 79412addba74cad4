"""Lineage records: the schema and our reading of it agree, files carry them, and differences say what they do."""

from __future__ import annotations

import copy
import hashlib
import json

import jsonschema
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import visionpos as vp
from visionpos import PositionError, checkpoint, config, retrofit
from visionpos.audit.lineage import audit_entries, family_record, lineage_diff, why_it_matters
from visionpos.audit.result import AuditResult, Measured
from visionpos.retrofit.lineage_record import lineage_record, read_record
from visionpos.retrofit.lineage_schema import lineage_schema, record_faults
from visionpos.retrofit.seams import class_row
from visionpos.vlm import family, family_names

VALIDATOR = jsonschema.Draft202012Validator(lineage_schema())
READ = {  # the keywords that lineage_schema.py reads, and those that say nothing of a value
    "type", "const", "enum", "pattern", "minimum", "exclusiveMinimum", "multipleOf", "minItems", "items", "properties",
    "required", "additionalProperties", "$ref",
}  # fmt: skip
SILENT = {"$schema", "title", "description", "$defs"}
SUPPORT = [
    {"axis": "w", "min": 0, "max": 1, "bins": [-0.5, 0.5, 1.5], "hist": [3, 4], "signed": False}
]


def tiny(name="vit_tiny_patch16_224", **options):
    return retrofit.create(name, **options)


@pytest.fixture(scope="module")
def whole():
    """A record with every part of the schema filled."""
    model = tiny(size_hw=(64, 96))
    for encoding in (vp.AxialRopeSpec(), vp.AlibiSpec(), vp.T5BiasSpec()):
        retrofit.attach(model, encoding, name=encoding.kind)
    audit = {
        "intervention": "S1", "metric": "O", "value": 1e-7, "tolerance": 5e-6, "expected": "zero", "verdict": "pass",
        "dtype": "float32", "seed": 0,
    }  # fmt: skip
    record = lineage_record(
        model,
        {
            "train_support": {"position": SUPPORT, "offset": [], "attn_distance": []},
            "audit": [audit],
        },
    )
    return json.loads(json.dumps(record))


def keywords(schema):
    """Every keyword of a schema."""
    for key, value in schema.items():
        yield key
        if key in ("properties", "$defs"):
            for inner in value.values():
                yield from keywords(inner)
        elif key == "items":
            yield from keywords(value)


def test_schema_is_one_and_is_read_whole():
    jsonschema.Draft202012Validator.check_schema(lineage_schema())
    assert set(keywords(lineage_schema())) <= READ | SILENT
    assert lineage_schema()["required"] == [
        "schema_version", "run", "scheme", "coordinates", "train_support", "precision", "masking",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224", "vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224", "twins_svt_small",
        "eva02_tiny_patch14_224", "beit_base_patch16_224", "swinv2_tiny_window8_256", "xcit_nano_12_p16_224",
        "swin_tiny_patch4_window7_224",
    ],
)  # fmt: skip
def test_records_of_timm_models_fit_the_schema(name):
    record = json.loads(json.dumps(lineage_record(tiny(name))))
    VALIDATOR.validate(record)
    assert record_faults(record) == []
    assert record["scheme"]


def test_a_whole_record_fits(whole):
    VALIDATOR.validate(whole)
    assert record_faults(whole) == []
    assert [entry["where"] for entry in whole["scheme"]] == [
        "input_add", "qk_rotate", "logit_bias", "logit_bias",
    ]  # fmt: skip
    # Facts: T5's row 16 is dead, a key of 2^(-8 r / h); a grid of 4 x 6 changes neither.
    assert whole["scheme"][3]["bucket"]["dead"] == [[16], [16]]
    assert whole["scheme"][2]["alibi"]["slopes"] == pytest.approx([1 / 16, 1 / 256, 1 / 4])


def places(value, path=()):
    """The paths of everything in a record."""
    yield path
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in inner:
        yield from places(item, (*path, key))


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(-2, 2), st.just([]), st.just({}),
    st.sampled_from(["half", "neox", "t", "zero", "1.0", "float32", "a" * 64, ""]), st.just([[1]]), st.just({"x": 1}),
)  # fmt: skip


@settings(max_examples=150)
@given(st.data())
def test_our_reading_agrees_with_jsonschema(whole, data):
    record = copy.deepcopy(whole)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([one for one in places(record) if one]))
        owner = record
        for key in path[:-1]:
            owner = owner[key]
        if isinstance(owner, dict) and data.draw(st.booleans()):
            if data.draw(st.booleans()):
                del owner[path[-1]]
            else:
                owner["unheard"] = 1
        else:
            owner[path[-1]] = data.draw(LEAVES)
    assert (record_faults(record) == []) == VALIDATOR.is_valid(record), record_faults(record)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r["scheme"][1]["rope"].update(layout="neox"), "scheme[1].rope.layout is 'neox'"),
        (lambda r: r["scheme"][1]["rope"].update(rotary_dim=63), "rope.rotary_dim is 63"),
        (lambda r: r["scheme"][1]["rope"].update(theta=0), "rope.theta is 0"),
        (lambda r: r["run"].update(phase="deploy"), "run.phase is 'deploy'"),
        (lambda r: r["run"].update(weights_sha256="abc"), "run.weights_sha256 is 'abc'"),
        (lambda r: r.update(schema_version="2.0"), "schema_version is '2.0'"),
        (lambda r: r.pop("masking"), "masking is missing"),
        (lambda r: r.update(extra=1), "extra is unknown"),
        (lambda r: r["coordinates"].update(axes=[]), "coordinates.axes holds 0"),
        (lambda r: r["train_support"]["position"][0].update(min=float("nan")), "position[0].min is nan"),
        (lambda r: r["train_support"].update(offset={}), "train_support.offset is {}"),
    ],
)  # fmt: skip
def test_faults_name_the_field(whole, change, field):
    record = copy.deepcopy(whole)
    change(record)
    assert any(field in fault for fault in record_faults(record)), record_faults(record)


def test_layouts_and_coordinates_of_published_models():
    """EVA-02 pairs neighbours at theta 10000 over its 16 x 16 cells; DINOv3 halves at 100 over [-1, 1]."""
    eva, dino = (
        lineage_record(tiny(name))
        for name in ("eva02_tiny_patch14_224", "vit_small_patch16_dinov3")
    )
    rope = next(entry["rope"] for entry in eva["scheme"] if entry["where"] == "qk_rotate")
    assert (rope["layout"], rope["theta"], rope["head_dim"]) == ("interleaved", 10000.0, 64)
    assert eva["coordinates"]["ref_grid"] == [16, 16]
    rope = dino["scheme"][0]["rope"]
    assert (rope["layout"], rope["theta"], rope["type"]) == ("half", 100.0, "default")
    assert (dino["coordinates"]["units"], dino["coordinates"]["origin"]) == ("unit11", "half_pixel")
    mixed = lineage_record(tiny("vit_small_patch16_rope_mixed_224"))
    rope = next(entry["rope"] for entry in mixed["scheme"] if entry["where"] == "qk_rotate")
    assert (rope["type"], rope["inv_freq_sha256"]) == ("mixed", None)


def test_tables_that_are_alike_share_an_entry_with_their_layers():
    (entry,) = lineage_record(tiny("swin_tiny_patch4_window7_224"))["scheme"]
    assert entry["layers"] == list(range(12))
    assert entry["table"]["grid"] == [7, 7]
    assert entry["params"] == 13 * 13 * (2 * 3 + 2 * 6 + 6 * 12 + 2 * 24)
    record = lineage_record(tiny("swin_tiny_patch4_window7_224"))
    assert (record["masking"]["kind"], record["masking"]["window"]) == ("window", [7, 7])


def sha_of(path):
    """The fingerprint that a record gives a file, by its description."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        kind = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name} {kind} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_resize_and_save_write_a_record_that_comes_back(tmp_path):
    model, path, later = tiny(), tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    retrofit.attach(model, vp.AxialRopeSpec(), strength=0.5)
    retrofit.resize(model, (64, 96), recipe="timm")
    support = {"position": SUPPORT, "offset": [], "attn_distance": []}
    retrofit.save(
        model, path, record={"run": {"phase": "finetune", "step": 7}, "train_support": support}
    )
    found = read_record(path)
    VALIDATOR.validate(found)
    assert found["run"]["weights_sha256"] == sha_of(path)
    assert (found["run"]["phase"], found["run"]["step"]) == ("finetune", 7)
    assert found["scheme"][0]["table"]["grid"] == [4, 6]
    # timm's own resampling: antialiased bicubic, which is the one with a = -0.5.
    assert found["scheme"][0]["table"]["resize_history"] == [
        {
            "from": [14, 14], "to": [4, 6], "mode": "bicubic", "recipe": "timm", "antialias": True,
            "align_corners": False, "bicubic_a": -0.5, "scale_offset": 0.0, "dtype": "float32",
        }
    ]  # fmt: skip
    again = retrofit.restore(path)
    part = next(part for part in retrofit.describe(again) if part.kind == "lineage")
    assert "finetune at step 7" in part.detail
    assert "w 0 to 1" in part.detail
    retrofit.save(copy.deepcopy(again), later)
    carried = read_record(later)
    assert carried["train_support"] == support
    assert carried["run"]["parent"] == found["run"]["weights_sha256"]


def test_a_model_without_a_file_has_no_lineage_row():
    assert not [part for part in retrofit.describe(tiny()) if part.kind == "lineage"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_named(tmp_path, dtype):
    path = tmp_path / "half.safetensors"
    retrofit.save(tiny().to(dtype), path)
    found = read_record(path)
    assert found["precision"]["table_dtype"] == str(dtype).removeprefix("torch.")
    assert found["run"]["weights_sha256"] == sha_of(path)


def test_a_file_of_before_has_no_record_and_loads(tmp_path):
    model, path = tiny(size_hw=(64, 96)), tmp_path / "old.safetensors"
    checkpoint.save(path, dict(model.state_dict()), retrofit.lineage(model))
    assert read_record(path) is None
    again = retrofit.restore(path)
    assert not [part for part in retrofit.describe(again) if part.kind == "lineage"]


def rewritten(path, **texts):
    """The file with other texts in its header."""
    with safe_open(str(path), framework="pt") as file:
        header = dict(file.metadata())
    save_file(load_file(path), path, metadata={**header, **texts})


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"visionpos_record": "{"}, "visionpos_record"),
        ({"visionpos_record": "[" * 100_000}, "visionpos_record"),
        ({"visionpos_record": "{}"}, "field schema_version is missing"),
        ({"visionpos_record": "[1]"}, r"the record is \[1\]; object is required"),
        ({"visionpos": "[]"}, "field format is missing"),
        ({"visionpos": '{"format": 1, "tables": 5}'}, "field tables is 5"),
        ({"visionpos": '{"format": 1, "grid_hw": 3}'}, "field grid_hw is 3"),
        ({"visionpos": '{"format": 1, "tables": {"a": 1}}'}, "field tables.a is 1"),
        ({"visionpos": '{"format": 1, "encodings": {"a": {}}}'}, "field encodings.a.spec is None"),
    ],
)
def test_an_unreadable_header_names_file_and_field(tmp_path, texts, says):
    path = tmp_path / "weights.safetensors"
    retrofit.save(tiny(size_hw=(32, 48)), path)
    rewritten(path, **texts)
    for call in (retrofit.restore, lambda one: lineage_diff(one, one)):
        with pytest.raises(PositionError, match=rf"weights\.safetensors.*{says}"):
            call(path)


def test_a_number_beyond_floats_is_named(tmp_path):
    path = tmp_path / "weights.safetensors"
    model = tiny(size_hw=(32, 48))
    retrofit.save(model, path)
    record = lineage_record(model)
    rewritten(
        path, visionpos_record=json.dumps(record | {"run": record["run"] | {"step": 10**400}})
    )
    with pytest.raises(PositionError, match=r"weights\.safetensors.*field run\.step is 1000"):
        read_record(path)


def test_a_record_that_breaks_the_schema_is_not_written(tmp_path):
    path = tmp_path / "weights.safetensors"
    with pytest.raises(PositionError, match=r"run\.step is 'ten'"):
        retrofit.save(tiny(), path, record={"run": {"step": "ten"}})
    assert not path.exists()


def test_diff_says_what_matters(tmp_path):
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    for path, theta, size, recipe in (
        (one, 100.0, (64, 96), "timm"),
        (other, 50.0, (96, 64), "mae"),
    ):
        model = tiny()
        retrofit.resize(model, size, recipe=recipe)
        retrofit.attach(model, vp.AxialRopeSpec(theta=theta), strength=1.0)
        retrofit.save(model, path, source=path.stem)
    found = {item.field: item for item in lineage_diff(one, other)}
    theta = found["scheme.axial_rope.rope.theta"]
    assert (theta.one, theta.other, theta.matters) == (100.0, 50.0, True)
    assert found["header.encodings.axial_rope.spec.theta"].matters
    assert found["scheme.learned.table.grid"].one == [4, 6]
    assert "recipe" in found["scheme.learned.table.resize_history"].why
    assert found["header.tables.pos_embed.recipe"].other == "mae"
    assert not found["header.source"].matters
    assert not found["run.weights_sha256"].matters
    order = [item.matters for item in lineage_diff(one, other)]
    assert order == sorted(order, reverse=True)
    assert lineage_diff(one, one) == ()


def test_diff_with_a_file_of_before_compares_headers(tmp_path):
    model, new, old = tiny(size_hw=(64, 96)), tmp_path / "new.safetensors", tmp_path / "o.safetensors"  # fmt: skip
    retrofit.save(model, new)
    checkpoint.save(old, dict(model.state_dict()), retrofit.lineage(model))
    assert lineage_diff(new, old) == ()


@pytest.mark.parametrize(
    "field",
    [
        "header.tables.pos_embed.recipe", "scheme.x.rope.theta", "scheme.x.rope.layout", "scheme.x.rope.sections",
        "scheme.x.rope.sections_layout", "coordinates.units", "train_support.offset.w.max", "masking.kind",
        "scheme.x.table.grid", "header.windows.policy", "precision.angle_dtype",
    ],
)  # fmt: skip
def test_what_matters_at_inference(field):
    assert why_it_matters(field)


@pytest.mark.parametrize("field", ["run.step", "audit", "header.source", "coordinates.jitter"])
def test_what_does_not(field):
    assert not why_it_matters(field)


def test_diff_of_records_names_entries_not_numbers():
    rows = [{"name": name, "where": "conv"} for name in ("peg", "peg", "x")]
    changed = [rows[0], {"name": "peg", "where": "input_add"}]
    found = lineage_diff({"scheme": rows}, {"scheme": changed})
    assert [(item.field, item.one, item.other) for item in found] == [
        ("scheme.peg#2.where", "conv", "input_add"),
        ("scheme.x", rows[2], None),
    ]


def test_rows_of_an_audit_fit_the_schema(whole):
    def row(verdict, expected, value=0.0):
        return Measured(
            intervention="S1", metric="O", value=value, verdict=verdict, expected=expected, dtype="float32"
        )  # fmt: skip

    rows = (
        row("zero", "zero"),
        row("nonzero", "zero", 0.5),
        row("weak", "zero", 1e-4),
        row("failed", None, float("nan")),
        row("zero", None),
        row("undefined", "undefined", None),
    )
    entries = audit_entries(AuditResult(target="x", scheme="none", rows=rows))
    assert [entry["verdict"] for entry in entries] == [
        "pass", "fail", "skip", "fail", "skip", "pass",
    ]  # fmt: skip
    record = json.loads(json.dumps({**whole, "audit": entries}, allow_nan=False))
    VALIDATOR.validate(record)
    assert record_faults(record) == []


@pytest.mark.parametrize("name", family_names())
def test_records_of_families_fit_the_schema(name):
    fam = family(name)
    if fam.spec.language is None or fam.spec.rule is None:
        with pytest.raises(PositionError, match=rf"{name} has no"):
            family_record(fam)
        return
    record = json.loads(json.dumps(family_record(fam)))
    VALIDATOR.validate(record)
    assert record["scheme"][0]["rope"]["sections"] == list(fam.spec.language.sections)


def test_frequencies_are_told_apart_by_their_hash():
    hashes = {
        theta: lineage_record_of(theta)["scheme"][-1]["rope"]["inv_freq_sha256"]
        for theta in (100.0, 100.001)
    }
    assert len(set(hashes.values())) == 2
    assert hashes[100.0] == lineage_record_of(100.0)["scheme"][-1]["rope"]["inv_freq_sha256"]


def lineage_record_of(theta):
    model = tiny()
    retrofit.attach(model, vp.AxialRopeSpec(theta=theta))
    return lineage_record(model)


def test_the_schema_is_package_data():
    assert config.shipped_json("audit", "lineage.schema") == lineage_schema()


@pytest.mark.slow
def test_every_kind_of_timm_model_has_a_record():
    """One model of each family of names, without weights: whatever gives a lineage gives a record."""
    seen: set[tuple[str, str]] = set()
    recorded = 0
    for name in timm.list_models():
        kind = (name.split("_")[0], timm.model_entrypoint(name).__module__)
        if kind in seen:
            continue
        seen.add(kind)
        try:
            with torch.device("meta"):
                model = timm.create_model(name)
        except (RuntimeError, NotImplementedError):  # a stem that is measured by running it
            continue
        if class_row(model) is not None:
            VALIDATOR.validate(json.loads(json.dumps(lineage_record(model))))
            recorded += 1
    assert recorded > 50
