"""Every shipped YAML loads, builds, and dumps back equal."""

from dataclasses import replace

import pytest
import torch

import visionpos as vp
from visionpos import config
from visionpos.errors import ConfigError

ENCODINGS = sorted(config.shipped("encodings"))
DIMS = vp.Dims(embed_dim=384, num_heads=6, depth=2, prefix=1)
OWN_DIMS = {  # fillings that belong to models of another shape
    "coat": replace(DIMS, num_heads=8),
    "lookhere_90": replace(DIMS, num_heads=12),
    "cpvt_peg_0_4": replace(DIMS, depth=12),
}


def test_encodings_are_shipped() -> None:
    assert ENCODINGS


@pytest.mark.parametrize("name", ENCODINGS)
def test_encoding_loads_and_builds(name: str) -> None:
    spec = config.load_encoding(name)
    assert isinstance(vp.build(spec, OWN_DIMS.get(name, DIMS)), torch.nn.Module)


@pytest.mark.parametrize("name", ENCODINGS)
def test_encoding_dumps_back_equal(name: str, tmp_path) -> None:
    spec = config.load_encoding(name)
    copy = tmp_path / "copy.yaml"
    copy.write_text(config.dump_encoding(spec), encoding="utf-8")
    assert config.load_encoding(copy) == spec


@pytest.mark.parametrize("name", ENCODINGS)
def test_encoding_refuses_an_unknown_key(name: str) -> None:
    with pytest.raises(ConfigError, match="no_such_key"):
        config.load_encoding(name, overrides=["encoding.no_such_key=1"])
