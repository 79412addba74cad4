"""The command line: what it prints is what the library says; bad input is one line and exit code 2."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import visionpos as vp
from visionpos import checkpoint, cli, config, retrofit
from visionpos.cli.fillings import difference
from visionpos.dialects import dialect_rows
from visionpos.vlm import Image, Text, family, family_names


@pytest.fixture
def photo(tmp_path):
    """A 96 wide, 60 high picture on disk."""
    path = tmp_path / "photo.png"
    Pillow.fromarray(np.zeros((60, 96, 3), dtype=np.uint8)).save(path)
    return path


def test_encodings_lists_every_shipped_file(run):
    code, out, _ = run("encodings", "--json")
    assert code == 0
    assert {row["name"] for row in json.loads(out)} == set(config.shipped("encodings"))


def test_encodings_prints_a_spec_that_loads_again(run):
    code, out, _ = run("encodings", "dinov3", "--set", "encoding.theta=50")
    assert code == 0
    spec = config.encoding_spec(config.read_yaml(out)["encoding"])
    assert spec == config.load_encoding("dinov3", overrides=["encoding.theta=50"])
    assert spec.theta == 50.0


def test_encodings_diff_equals_the_library(run):
    code, out, _ = run(
        "encodings", "--diff", "timm", "dinov2", "--grid", "14x14", "--to", "20x30", "--json"
    )
    assert code == 0
    row = json.loads(out)[0]
    table = torch.randn(196, 384, generator=torch.Generator().manual_seed(0))
    grids = {"source": vp.Grid(14, 14), "target": vp.Grid(20, 30)}
    ours, theirs = (vp.resample(table, recipe=name, **grids) for name in ("timm", "dinov2"))
    assert row["relative"] == pytest.approx(float((ours - theirs).norm() / ours.norm()), rel=0.02)
    assert row["quantity"] == "resampled table"


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        (("--kind", "peg"), lambda row: row["kind"] == "peg"),
        (("--match", "SAM2"), lambda row: "sam2" in " ".join(row.values()).lower()),
        (("--kind", "prompt", "--match", "hf_"), lambda row: row["name"] == "hf_sam2_prompt"),
    ],
)
def test_encodings_filters(run, words, fits):
    code, out, _ = run("encodings", *words, "--json")
    assert code == 0
    everything = json.loads(run("encodings", "--json")[1])
    assert json.loads(out) == [row for row in everything if fits(row)]
    assert 0 < len(json.loads(out)) < len(everything)


NAMED = {
    name
    for row in dialect_rows()
    for reading in row.readings
    for name in reading.names
    if reading.spec
}


@pytest.mark.parametrize("name", sorted({*config.shipped("encodings"), *vp.RECIPES, *NAMED}))
def test_diff_takes_every_name(name):
    """Shipped encodings by every door, recipes and readings: each is compared, and equals itself."""
    row = difference((name, name), "4x6", None)
    assert row["largest"] == row["relative"] == row["differing"] == 0.0


@pytest.mark.parametrize(
    ("pair", "quantity"),
    [
        (("sam_prompt", "sam2_prompt"), "prompt tokens"),
        (("sam2_prompt", "hf_sam2_prompt"), "prompt tokens"),
        (("cpvt_peg", "davit_cpe"), "tokens"),
        (("sam_vit_global", "croma_alibi"), "logit bias"),
        (("pape", "pape_ri"), "logit bias"),
        (("comrope_ap", "comrope_ld"), "turned vectors"),
        (("half", "gemma4_rope"), "turned vectors"),
        (("mae", "vjepa"), "vectors"),
    ],
)
def test_diff_sees_what_parts(pair, quantity):
    row = difference(pair, "14x14", "5x9")
    assert row["quantity"] == quantity
    assert row["relative"] > 1e-3


def test_json_knows_no_nan(monkeypatch, run):
    """What is not finite is null: NaN and Infinity are no JSON."""
    for value in (float("nan"), float("inf")):
        found = {"to": "1x1", "relative": value, "parts": [(value, 1.0)]}
        monkeypatch.setattr("visionpos.cli.commands.difference", lambda *_, found=found: found)
        code, out, _ = run("encodings", "--diff", "mae", "mae", "--json")
        assert code == 0
        assert json.loads(out, parse_constant=pytest.fail) == [
            {"to": "1x1", "relative": None, "parts": [[None, 1.0]]}
        ]


def test_families_lists_all(run):
    code, out, _ = run("families", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)}
    assert set(rows) == set(family_names())
    assert rows["qwen3_vl"]["sections"] == "interleaved [24, 20, 20]"


def test_describe_json_is_the_table(run):
    code, out, _ = run("describe", "vit_tiny_patch16_224", "--size", "64x96", "--json")
    assert code == 0
    table = json.loads(out)[0]
    assert (table["path"], table["grid_hw"], table["shape"]) == ("pos_embed", [4, 6], [1, 25, 192])


def test_retrofit_then_resize_then_describe(run, tmp_path):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    options = (
        "--encoding",
        "rope_vit_axial",
        "--strength",
        0.5,
        "--size",
        "64x96",
        "--output",
        first,
    )
    code, out, _ = run("retrofit", "vit_tiny_patch16_224", *options)
    assert code == 0
    assert "strength 0.5" in " ".join(out.split())
    code, _, _ = run("resize", first, "--size", "96x64", "--output", second)
    assert code == 0
    lineage = checkpoint.read_lineage(second)
    assert lineage.image_size_hw == (96, 64)
    assert lineage.tables["pos_embed"]["source_grid_hw"] == [14, 14]
    model = retrofit.restore(second)
    fresh = retrofit.create("vit_tiny_patch16_224")
    retrofit.resize(fresh, (96, 64))
    assert torch.equal(model.pos_embed, fresh.pos_embed), (
        "resized from the table that was trained, not from 64x96"
    )
    code, out, _ = run("describe", second, "--json")
    assert code == 0
    assert json.loads(out)[1]["path"] == "visionpos.axial_rope"


def test_stream_equals_the_library(run, photo):
    code, out, _ = run("stream", photo, "--family", "qwen2_vl", "--text", "two words", "--json")
    assert code == 0
    said = json.loads(out)
    fam = family("qwen2_vl")
    stream = fam.stream([Text("two words"), Image(size_hw=(60, 96))])
    pos = fam.position_ids(stream)
    assert said["ids"] == pos.ids.tolist()
    assert said["names"] == list(stream.names)
    assert (said["length"], said["next_position"]) == (stream.length, pos.next_position.item())


def test_stream_table_names_runs(run, photo):
    code, out, _ = run("stream", photo)
    assert code == 0
    assert "<|image_pad|>" in out
    assert "next_position" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("describe", "nope"), "model 'nope' is not known to timm; did you mean"),
        (
            ("describe", "vit_tiny_patch16_224", "--size", "12"),
            "size is '12'; HEIGHTxWIDTH is required",
        ),
        (
            ("describe", "vit_tiny_patch16_224", "--size", "100x100"),
            "not divisible into patches of",
        ),
        (
            ("resize", "resnet18", "--size", "64x64", "-o", "x.safetensors"),
            "is no class that visionpos knows",
        ),
        (("describe", "/nowhere/x.safetensors"), "is no file; give a .safetensors file"),
        (("encodings", "dinov3", "--set", "encoding.thetta=3"), "unknown key thetta; remove it"),
        (("encodings", "dinov3", "--set", "oops"), "is not key=value"),
        (("encodings", "nothing"), "neither a readable file"),
        (("encodings", "dinvo3"), "Did you mean dinov3?"),
        (("encodings", "--kind", "axail_rope"), "Did you mean axial_rope"),
        (("encodings", "--match", "zzz"), "match is 'zzz'; no shipped encoding has it"),
        (("encodings", "--diff", "mae", "vjeppa"), "Did you mean vjepa"),
        (("encodings", "--diff", "timm", "dinov2", "--to", "ax2x3"), "FRAMESxROWSxCOLUMNS"),
        (("stream", "--family", "qwen25_vl", "--text", "a"), "Did you mean qwen2_5_vl"),
        (("encodings", "mae", "--diff", "mae", "timm_sincos"), "NAME mean nothing to --diff"),
        (
            ("encodings", "--diff", "mae", "timm_sincos", "--set", "encoding.theta=3"),
            "--set mean nothing to --diff",
        ),
        (("encodings", "--set", "encoding.theta=3"), "--set mean nothing to a list"),
        (("encodings", "--to", "20x30"), "--to mean nothing to a list"),
        (("encodings", "dinov3", "--kind", "sincos"), "--kind mean nothing to NAME"),
        (("encodings", "--diff", "mae", "dinov3"), "Choose encodings that enter by the same door"),
        (("families", "--wrong"), "No such option"),
        (("stream",), "media and --text are both empty"),
        (("stream", "/nowhere.jpg"), "is not a file"),
        (("stream", "--family", "zz", "--text", "a"), "family 'zz' is unknown. It must be one of"),
        (("stream", "--text", "a", "--dialect", "zz"), "dialect 'zz'"),
        (("retrofit", "vit_tiny_patch16_224"), "Missing option --output"),
        (
            ("retrofit", "vit_tiny_patch16_224", "-o", "/nowhere/a.safetensors"),
            "is in no existing folder",
        ),
        (
            ("resize", "vit_tiny_patch16_224", "--size", "0x16", "-o", "x.safetensors"),
            "positive multiples",
        ),
        (("unknown",), "No such command"),
    ],
)
def test_error_is_one_line_and_exit_2(run, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words)
    assert code == 2
    assert out == ""
    assert err.startswith("visionpos: ")
    assert err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir()), "nothing may be written on bad input"


def test_error_media_of_no_kind(run, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("no picture")
    code, _, err = run("stream", path)
    assert code == 2
    assert "neither a readable photo nor a readable video" in err


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "tif", "bmp", "webp", "mp4", "avi"])
@pytest.mark.parametrize("kept", [20, 60, 0.5])
def test_error_broken_media_is_one_line_of_ours(tmp_path, capfd, monkeypatch, suffix, kept):
    """What FFmpeg, OpenCV, libpng and libtiff have to say of a broken file stays off standard error."""
    path = tmp_path / f"whole.{suffix}"
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    if suffix in {"mp4", "avi"}:
        cv2 = pytest.importorskip("cv2")
        code = cv2.VideoWriter_fourcc(*("mp4v" if suffix == "mp4" else "MJPG"))
        writer = cv2.VideoWriter(str(path), code, 10, (64, 48))
        for _ in range(12):
            writer.write(pixels)
        writer.release()
    else:
        Pillow.fromarray(pixels).save(path)
    whole = path.read_bytes()
    broken = tmp_path / f"broken.{suffix}"
    broken.write_bytes(whole[: int(len(whole) * kept) if kept < 1 else kept] + bytes(40))
    capfd.readouterr()
    words = ["visionpos", "stream", str(broken), "--draw", str(tmp_path / "out.png")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capfd.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("visionpos: ")
    assert err.count("\n") == 1
    if suffix not in {"mp4", "avi"}:
        assert "video" not in err, "a broken picture is not also called a broken video"


def test_stream_takes_a_clip_alone(run, tmp_path):
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 48))
    for _ in range(20):
        writer.write(np.zeros((48, 64, 3), dtype=np.uint8))
    writer.release()
    code, out, err = run("stream", path, "--family", "qwen2_vl", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["plan"][0]["tokens"][0] == 2


def test_families_table_cuts_no_name(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = run("families")
    words = set(out.replace("│", " ").split())
    assert set(family_names()) <= words
    assert not words & {"True", "False"}
    assert max(map(len, out.splitlines())) <= 100


def test_error_the_suggestion_comes_first_and_the_list_is_short(run):
    _, _, err = run("stream", "--family", "qwen25_vl", "--text", "a")
    assert err.index("Did you mean qwen2_5_vl") < err.index("It must be one of")
    assert f"and {len(family_names()) - 12} more" in err
    assert len(err) < 400


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    for name in ("encodings", "families", "describe", "retrofit", "resize", "stream"):
        assert name in out
