"""`visionpos audit` and `visionpos lineage diff`: what they print is what the library says; bad input is one line."""

from __future__ import annotations

import json

import pytest

import visionpos as vp
from visionpos import audit, config, retrofit
from visionpos.audit.lab import lab
from visionpos.audit.lineage import lineage_diff
from visionpos.audit.position_log import PositionLog
from visionpos.vlm import family


def test_lab_prints_recorded_beside_computed(run):
    code, out, _ = run("audit", "--lab", "--json")
    assert code == 0
    rows = json.loads(out)
    assert len(rows) == len(lab())
    (row,) = (r for r in rows if (r["test"], r["scheme"], r["by"]) == ("shift", "sin", 17))
    assert (row["recorded"], round(row["computed"], 6), row["agrees"]) == (0.484804, 0.484804, True)
    code, out, _ = run("audit", "--lab")
    assert code == 0
    assert "0.484804" in out
    assert "0 of them not as recorded or expected" in out


def test_audit_of_a_family_equals_the_library(run):
    code, out, err = run("audit", "qwen2_vl", "--interventions", "S1,R1", "--seeds", 2, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    wanted = audit.run(family("qwen2_vl"), ["S1", "R1"], seeds=2)
    assert [row["value"] for row in found["rows"]] == [row.value for row in wanted]
    assert found["complete"] is True
    assert found["lineage"]["scheme"][0]["rope"]["theta"] == 1e6


def test_audit_of_an_encoding_by_name_and_by_file(run, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(config.dump_encoding(vp.AxialRopeSpec(theta=30.0)), encoding="utf-8")
    for target in ("dinov3", path):
        code, out, _ = run(
            "audit", target, "--interventions", "S1", "--seeds", 1, "--grid", "3x5", "--json"
        )
        assert code == 0
        found = json.loads(out)
        assert found["grid"] == [1, 3, 5]
        assert {row["verdict"] for row in found["rows"]} == {"zero"}


def test_table_has_a_row_an_intervention_and_the_alarms(run):
    code, out, _ = run(
        "audit", "qwen2_vl", "--interventions", "R1", "--seeds", 3, "--dtype", "float64"
    )
    assert code == 0
    assert "6 measurements, 0 surprises, 1 alarms" in out
    assert "ALARM  axis_visibility: axis col turns 0.00551 rad" in out
    assert out.count("│ R1") == 1  # A and O of all seeds stand in one line
    assert "R1: flip" in out
    assert "weak" in out


def test_the_control_and_a_name_of_two_kinds(run):
    code, out, _ = run("audit", "none", "--interventions", "P1", "--seeds", 1, "--json")
    assert code == 0
    assert {row["verdict"] for row in json.loads(out)["rows"]} == {"zero"}
    code, out, _ = run(
        "audit", "circle_rope", "--as", "family", "--interventions", "S1", "--seeds", 1, "--json"
    )
    assert code == 0
    assert json.loads(out)["target"].startswith("circle_rope, dialect")


def test_a_page_is_written_whole(run, tmp_path):
    page = tmp_path / "audit.html"
    code, out, _ = run("audit", "qwen3_vl", "--interventions", "S1", "--seeds", 1, "--output", page)
    assert code == 0
    assert f"wrote {page}" in out.replace("\n", "")
    assert "qwen3_vl" in page.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("audit",), "Missing argument TARGET"),
        (("audit", "circle_rope"), "say which by --as"),
        (("audit", "nonesuch"), "no shipped encoding, family or timm model"),
        (("audit", "no.yaml"), "no.yaml is neither a readable file"),
        (("audit", "qwen2_vl", "--as", "model"), "no shipped encoding, family or timm model"),
        (("audit", "qwen2_vl", "--as", "thing"), "--as is 'thing'"),
        (("audit", "pixtral"), "pixtral has no rotary layout"),
        (("audit", "dinov3", "--dtype", "int8"), "dtype is 'int8'"),
        (("audit", "dinov3", "--seeds", "0"), "seeds is 0"),
        (("audit", "dinov3", "--grid", "3"), "grid is '3'"),
        (("audit", "dinov3", "--interventions", "P9"), "interventions holds 'P9'"),
        (("audit", "dinov3", "--size", "3x5"), "it goes with kind model alone"),
        (("audit", "qwen2_vl", "--grid", "3x5"), "it goes with kind encoding alone"),
        (("audit", "dinov3", "--dialect", "vendor"), "it goes with kind family alone"),
        (("audit", "qwen2_vl", "--dialect", "nobody"), "nobody"),
        (("audit", "dinov3", "--output", "page.txt"), "page 'page.txt' is no HTML file"),
        (("audit", "dinov3", "--lab"), "TARGET does not go with --lab"),
        (("audit", "--lab", "--dtype", "float64"), "--dtype does not go with --lab"),
        (("audit", "none", "--grid", "1000000x1000000"), "has 1000000000000 tokens"),
        (("audit", "--lab", "--grid", "3x5"), "--grid does not go with --lab"),
        (("lineage", "diff", "a.safetensors", "b.safetensors"), "path a.safetensors is no file"),
        (("lineage", "diff", "a.safetensors"), "Missing argument 'other'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(run, words, says):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("visionpos: ")
    assert says in err


@pytest.fixture
def files(tmp_path):
    """Two files whose rotary bases and trained grids differ."""
    paths = []
    for theta, grid in ((100.0, (4, 6)), (50.0, (4, 3))):
        model = retrofit.create("vit_tiny_patch16_224", size_hw=(64, 96))
        retrofit.attach(model, vp.AxialRopeSpec(theta=theta), strength=1.0)
        log = PositionLog()
        log.grid(grid)
        paths.append(tmp_path / f"theta_{theta:g}.safetensors")
        retrofit.save(model, paths[-1], record={"train_support": log.support()})
    return paths


def test_lineage_diff_is_the_librarys(run, files):
    code, out, _ = run("lineage", "diff", *files, "--json")
    assert code == 0
    found = json.loads(out)
    wanted = lineage_diff(*files)
    assert [row["field"] for row in found["differences"]] == [item.field for item in wanted]
    assert "scheme.axial_rope.rope.theta" in [row["field"] for row in found["differences"]]
    # Differences of 3 to 5 columns, of 6: 2 x (3 + 2 + 1) of 36 pairs.
    assert found["offsets_outside"] == pytest.approx({"h": 0.0, "w": 12 / 36})
    code, out, _ = run("lineage", "diff", *files)
    assert code == 0
    assert "channel pairs turn at other speeds" in " ".join(out.replace("│", " ").split())
    assert "33.3 % of the offsets" in out


def test_lineage_of_one_file_is_one(run, files):
    code, out, _ = run("lineage", "diff", files[0], files[0])
    assert code == 0
    assert "have one lineage" in out


def test_describe_reads_the_record_of_a_file(run, files):
    code, out, _ = run("describe", files[0], "--json")
    assert code == 0
    (row,) = (row for row in json.loads(out) if row["kind"] == "lineage")
    assert "trained positions h 0 to 3, w 0 to 5" in row["detail"]
