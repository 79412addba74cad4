"""`visionpos stretch`: the table and the JSON say what the library says; bad input is one line."""

from __future__ import annotations

import json

import pytest

from visionpos.geometry import Grid
from visionpos.geometry.phases import compare_stretches


def test_json_is_the_library_s_answer(run):
    code, out, err = run("stretch", "--theta", 100, "--from", "14x14", "--to", "32x20", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    advice = compare_stretches(100.0, Grid(14, 14), Grid(32, 20), head_dim=64)
    assert (found["recommended"], found["reason"]) == (advice.rule, advice.reason)
    assert [row["rule"] for row in found["rows"]] == [row.rule for row in advice.rows]
    for row, wanted in zip(found["rows"], advice.rows, strict=True):
        assert [axis["outside"] for axis in row["axes"]] == [axis.outside for axis in wanted.axes]
        assert [axis["excess"] for axis in row["axes"]] == [axis.excess for axis in wanted.axes]
        assert row["about"]


def test_table_shows_each_axis_and_the_reason(run):
    code, out, _ = run("stretch", "--theta", "100", "--from", "14x14", "--to", "28x28")
    assert code == 0
    assert "11/13 11/13" in out  # NTK leaves nearly all outside
    assert "1.81 1.81" in out
    assert "yarn *" in out
    assert out.splitlines()[-1].startswith("yarn: 0 of the 26 pairs")


def test_clips_times_and_one_cell(run):
    code, out, _ = run(
        "stretch",
        "--from",
        "1x8x8",
        "--to",
        "4x8x16",
        "--time",
        "0.5",
        "--head-dim",
        "48",
        "--json",
    )
    assert code == 0
    rows = {row["rule"]: row for row in json.loads(out)["rows"]}
    assert {"lumina", "dype"} <= set(rows)
    assert len(rows["pi"]["axes"]) == 3
    assert rows["pi"]["axes"][0]["excess"] is None  # JSON has no infinity
    assert run("stretch", "--from", "1x8", "--to", "4x8")[0] == 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--from", "14", "--to", "32x32"), "ROWSxCOLUMNS"),
        (("--from", "14x14", "--to", "0x32"), "0"),
        (("--from", "14x14", "--to", "32x32", "--theta", "0"), "theta is 0.0"),
        (("--from", "14x14", "--to", "32x32", "--head-dim", "18"), "multiple of 4"),
        (("--from", "14x14", "--to", "32x32", "--time", "2"), "time is 2.0"),
        (("--from", "14x14"), "--to"),
    ],
)
def test_error_is_one_line(run, words, match):
    code, out, err = run("stretch", *words)
    assert (code, out) == (2, "")
    assert match in err
    assert len(err.strip().splitlines()) == 1
