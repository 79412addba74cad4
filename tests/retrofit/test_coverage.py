"""coverage: the shipped counts add up to every timm model with a position mechanism, and a sample of them is right."""

import json
import random

import pytest
import timm
import torch

from tests.retrofit import scan
from visionpos import retrofit
from visionpos.cli import main
from visionpos.config import read_yaml
from visionpos.retrofit.coverage import coverage, totals
from visionpos.retrofit.seams import model_rows

# Registered models of timm 1.0.31 with an explicit position mechanism: 620 were counted apart from this table; it has
# two more, lambda ResNets whose positions are a convolution.
MECHANISM = 620 + 2


def test_totals() -> None:
    """98 % of the models are described and can be resized; NesT alone is bound to squares."""
    sums = totals()
    assert sums["models"] == MECHANISM
    assert sums["rectangles"] >= 0.98 * MECHANISM
    bound = {
        row.model: row.models - row.rectangles for row in coverage() if row.rectangles < row.models
    }
    assert bound == {"Nest": 6}


def test_rows() -> None:
    rows = {row.model: row for row in coverage()}
    assert rows["VisionTransformer"].detail == ""
    assert "patches with coordinates of their own are refused" in rows["NaFlexVit"].detail
    assert len(rows) == len(model_rows())
    assert rows["VisionTransformer"].parts == {"table": 203}
    assert rows["Eva"].models == 65
    assert rows["MaxxVit"].parts == {"rel_table": 38, "log_mlp": 20}
    assert all(row.models for row in rows.values())


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["visionpos", "retrofit", "--coverage", "--json"])
    main()
    data = json.loads(capsys.readouterr().out)
    assert data["totals"]["models"] == sum(row["models"] for row in data["rows"]) == MECHANISM
    monkeypatch.setattr("sys.argv", ["visionpos", "retrofit", "--coverage"])
    main()
    assert "622 registered models with a position mechanism" in capsys.readouterr().out


def test_command_of_one_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`visionpos retrofit MODEL --coverage` says what of a model every door serves, and why not all."""
    monkeypatch.setattr("sys.argv", ["visionpos", "retrofit", "csatv2", "--coverage", "--json"])
    main()
    rows = {row["door"]: row for row in json.loads(capsys.readouterr().out)}
    model = timm.create_model("csatv2")
    found = retrofit.attachable(model)
    assert {door: (row["places"], row["of"]) for door, row in rows.items()} == {
        door: (places, of) for door, (places, of, _) in found.items()
    }
    places, of, why = found["rotate"]
    assert 0 < places < of
    assert "no separate q and k to rotate" in why
    assert retrofit.attachable(torch.nn.Linear(2, 2))["add"] == (
        0,
        1,
        "Linear is no class that visionpos knows",
    )


@pytest.mark.slow
@pytest.mark.skipif(timm.__version__ != "1.0.31", reason="the counts are of timm 1.0.31")
@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_the_registry() -> None:
    """Drawn models are found in the row that counts them, with every positional parameter claimed, and resize."""
    names = scan.candidates()
    drawn = random.Random(0).sample(names, 24)
    shipped = read_yaml(scan.FILE.read_text(encoding="utf-8"))["rows"]
    for name in drawn:
        found = scan.read(name)
        if found is not None:
            row, tally = found
            assert set(tally["parts"]) <= set(shipped[row]["parts"]), name
            assert tally["rectangles"] == (row != "nest.Nest"), name
