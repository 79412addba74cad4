"""Every shipped language YAML loads to a plan whose parts fit, and refuses what it does not know."""

import pytest
import torch

from visionpos import config
from visionpos.errors import ConfigError
from visionpos.geometry.layer_views import layer_gains, layer_mask, layer_rotation
from visionpos.geometry.layers import LayerPlan

NAMES = sorted(config.shipped("language"))


def test_the_published_ones_are_shipped() -> None:
    wanted = {
        "llama3_1",
        "qwen2_5_yarn",
        "qwen3_yarn",
        "gemma2",
        "gemma3",
        "gemma4",
        "llama4",
        "command_a",
        "ministral3",
        "phi3_longrope",
        "deepseek_v3",
    }
    assert set(NAMES) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_gives_what_it_says(name: str) -> None:
    plan = config.load_language(name)
    ids, documents = torch.arange(5), torch.tensor([0, 0, 0, 1, 1])
    for layer in range(plan.layers):
        kind = plan.kind(layer)
        rotation = layer_rotation(plan, layer, ids)
        assert (rotation is None) == (kind.theta is None)
        if rotation is not None:
            assert 2 * rotation.pairs == plan.head_dim_of(layer)
        gains = layer_gains(plan, layer, ids)
        assert (gains is None) == (kind.temperature is None)
        assert layer_mask(plan, layer, documents).sum() == 6 + 3


@pytest.mark.parametrize("name", NAMES)
def test_plan_goes_through_plain_data(name: str) -> None:
    plan = config.load_language(name)
    assert config.parse(LayerPlan, config.plain(plan)) == plan


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("plan.no_such_key=1", "no_such_key"),
        ("plan.layers=0", "layers is 0"),
        ("plan.layers=two", "layers"),
        ("plan.pattern=[global]", "pattern is"),
        ("plan.kinds=[{name: full, theta: 1e4, window: 0}]", "window of layer kind 'full' is 0"),
        ("plan.kinds=[{name: full, thetas: 1e4}]", "thetas"),
        ("plan.kinds=[{name: full, theta: 1e4, scaling: {kind: ntk2, factor: 2.0}}]", "kind"),
        ("plan.kinds=[{name: full, theta: 1e4, scaling: {kind: linear, factor: 0.5}}]", "0.5"),
        ("extra=1", "plan"),
    ],
)
def test_error_names_what_is_wrong(change: str, match: str, tmp_path) -> None:
    data = config.set_value(config.load_data("llama3_1", "language"), change)
    path = tmp_path / "mine.yaml"
    path.write_text(str(data).replace("None", "null"), encoding="utf-8")
    with pytest.raises(ConfigError, match=match):
        config.load_language(path)


def test_error_of_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="llama4"):
        config.load_language("lama4")
