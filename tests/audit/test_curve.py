"""The release card: points against evaluations made by hand, failures marked, and the file it is written to."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import visionpos as vp
from tests.retrofit.zoo import create, opened, vit
from visionpos import Grid, retrofit
from visionpos.audit.card import curve
from visionpos.errors import PositionError

SIZE = (48, 80)
GRIDS = [Grid(3, 5), (6, 10)]


def energy(model: Any, grid: Grid) -> float:
    """Return a number that depends on the model and the grid."""
    image = torch.linspace(-1, 1, 3 * 256 * grid.size).reshape(1, 3, 16 * grid.height, -1)
    with torch.no_grad():
        return float(model.forward_features(image).square().mean())


def rope() -> Any:
    return opened(create("vit_small_patch16_rope_224", SIZE))


def test_points_are_what_moved_models_give() -> None:
    """ "none", "zoom" and "extend" equal models that retrofit.resize has moved."""
    found = curve(rope(), energy, GRIDS, interventions=["none", "zoom", "extend"], control=False)
    assert found.complete
    assert found.trained_hw == (3, 5)
    for line, extent in (("none", None), ("zoom", "trained"), ("extend", "index")):
        model = rope()
        first, second = found.lines[line]
        assert first.value == pytest.approx(energy(model, Grid(3, 5)), rel=1e-6)
        retrofit.resize(model, (96, 160), extent=extent)  # type: ignore[arg-type]
        assert second.value == pytest.approx(energy(model, Grid(6, 10)), rel=1e-6)
        assert second.size_hw == (96, 160)
    assert found.lines["zoom"][1].value != found.lines["extend"][1].value


def test_places_are_moved_on_every_grid() -> None:
    """A flip of the table by hand, at both sizes."""
    found = curve(vit(SIZE), energy, GRIDS, interventions=["R1"], control=False)
    for point, (height, width) in zip(found, ((3, 5), (6, 10)), strict=True):
        model = vit(SIZE)
        if height != 3:
            retrofit.resize(model, (96, 160))
        rows = model.pos_embed.data[:, 1:].reshape(1, height, width, -1).flip(2).flatten(1, 2)
        model.pos_embed.data[:, 1:] = rows
        assert point.value == pytest.approx(energy(model, Grid(height, width)), rel=1e-5)


def test_the_control_has_no_position() -> None:
    """Taken out of copies, or a model of the user's own."""
    found = curve(vit(SIZE), energy, [(3, 5)], interventions=["none"])
    model = vit(SIZE)
    nn.init.zeros_(model.pos_embed)
    assert found.lines["control"][0].value == pytest.approx(energy(model, Grid(3, 5)), rel=1e-6)
    bare = opened(create("vit_tiny_patch16_224", SIZE, pos_embed="none"))
    own = curve(vit(SIZE), energy, [(3, 5)], interventions=["none"], control=bare)
    assert own.lines["control"][0].value == pytest.approx(energy(bare, Grid(3, 5)), rel=1e-6)


def test_a_function_of_the_model_alone_is_given_no_grid() -> None:
    """One argument, or a second one with a default."""

    def count(model: Any, scale: float = 2.0) -> float:
        return scale * sum(weight.numel() for weight in model.parameters())

    model = vit(SIZE)
    found = curve(model, count, [(3, 5)], interventions=["none"], control=False)
    assert found.points[0].value == 2.0 * sum(weight.numel() for weight in model.parameters())


def test_failures_are_marked_and_the_others_go_on() -> None:
    """An evaluation that raises, gives NaN, or no number at all."""

    def moody(model: Any, grid: Grid) -> Any:
        if grid.height == 3:
            raise KeyError("no such split")
        return {6: math.nan, 9: "good", 12: torch.tensor(0.5)}[grid.height]

    found = curve(
        rope(), moody, [(3, 5), (6, 10), (9, 15), (12, 20)], interventions=["none"], control=False
    )
    assert [point.state for point in found] == ["failed", "failed", "failed", "measured"]
    assert not found.complete
    assert "KeyError" in found.points[0].note
    assert found.points[1].note == "evaluate returned nan"
    assert found.points[3].value == 0.5
    drawn = found.drawn["none"]
    assert [grid for grid, _ in drawn] == ["3x5", "6x10", "9x15", "12x20"]
    assert math.isnan(drawn[0][1])


def test_what_a_model_cannot_take_is_undefined() -> None:
    """A wider view of a table, and a grid that the class refuses."""
    found = curve(vit(SIZE), energy, GRIDS, interventions=["extend"], control=False)
    assert [point.state for point in found] == ["measured", "undefined"]
    assert "resampled to the view" in found.points[1].note
    assert found.complete


MAXVIT = {"img_size": (64, 64), "embed_dim": (32, 64), "depths": (1, 1), "stem_width": 32}
LEVIT = {"img_size": (64, 96)}


@pytest.mark.parametrize(
    ("name", "options", "step", "own", "other"),
    [
        ("maxvit_rmlp_pico_rw_256", MAXVIT, 2, (32, 32), (32, 64)),
        ("levit_128s", LEVIT, 16, (4, 6), (6, 4)),
        ("edgenext_xx_small", {}, 4, (16, 16), (24, 16)),
    ],
)
def test_models_without_a_grid_of_patches_are_served(
    name: str, options: Any, step: int, own: tuple[int, int], other: tuple[int, int]
) -> None:
    """The grid that a pass of the stem shows; points equal models that retrofit.resize has moved."""

    def model() -> Any:
        made = opened(timm.create_model(name, num_classes=0, **options)).eval()
        if name.startswith("edgenext"):  # serves any size, and starts at that of its configuration
            retrofit.resize(made, (64, 64))
        return made

    def value(made: Any, grid: Grid) -> float:
        image = torch.linspace(-1, 1, 3 * step**2 * grid.size)
        with torch.no_grad():
            rows = made.forward_features(image.reshape(1, 3, step * grid.height, -1))
        return float(rows.square().mean())

    found = curve(model(), value, [own, other, (1, 1)], interventions=["none"], control=False)
    assert found.trained_hw == own
    assert [point.state for point in found] == [
        "measured",
        "measured",
        "undefined" if step < 16 else "measured",
    ]
    assert found.points[0].value == pytest.approx(value(model(), Grid(*own)), rel=1e-6)
    moved = model()
    retrofit.resize(moved, (step * other[0], step * other[1]))
    assert found.points[1].value == pytest.approx(value(moved, Grid(*other)), rel=1e-6)


def test_an_evaluation_may_do_what_it_likes_with_its_copy() -> None:
    """Training inside an evaluation leaves the model, and the next evaluation, as they were."""
    model = vit(SIZE)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def trained(copied: Any, grid: Grid) -> float:
        value = energy(copied, grid)
        copied.train()
        with torch.no_grad():
            for weight in copied.parameters():
                weight.zero_()
        return value

    found = curve(model, trained, [(3, 5), (3, 5)], interventions=["none"], control=False)
    assert found.points[0].value == found.points[1].value
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model.training


def test_data_and_file(tmp_path: Path) -> None:
    """What is written reads back; a gap is null; progress counts to the end."""
    told: list[tuple[str, int, int]] = []
    found = curve(
        vit(SIZE),
        energy,
        GRIDS,
        interventions=["none", "extend"],
        progress=lambda *s: told.append(s),
    )
    found.to_json(tmp_path / "card.json")
    data = json.loads((tmp_path / "card.json").read_text())
    assert data == json.loads(json.dumps(found.data()))
    assert data["points"][3]["value"] is None
    assert [done for _, done, _ in told] == list(range(7))
    assert told[-1] == ("done", 6, 6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"evaluate": 3}, "evaluate is 3"),
        ({"grids": []}, "grids is"),
        ({"grids": [(3, 5.5)]}, "grids is"),
        ({"grids": [Grid(3, 5, 2)]}, "grids is"),
        ({"interventions": ["zom"]}, "[Dd]id you mean"),
        ({"interventions": []}, "interventions is empty"),
        ({"control": "none"}, "control is"),
        ({"model": nn.Linear(2, 2)}, "Linear"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], says: str) -> None:
    """The argument is named before anything is evaluated."""
    given: dict[str, Any] = {"model": vit(SIZE), "evaluate": energy, "grids": GRIDS, **changes}
    with pytest.raises(PositionError, match=says):
        curve(given.pop("model"), given.pop("evaluate"), given.pop("grids"), **given)


def test_front_door() -> None:
    """`audit.curve` is the same function."""
    from visionpos import audit

    assert audit.curve is curve
    assert vp.Grid is Grid
