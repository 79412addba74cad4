"""What every doctest of the package may use without importing it: `torch`, `vp`, and its public names."""

from typing import Any

import pytest
import torch

import visionpos


@pytest.fixture(scope="session", autouse=True)
def doctest_names(doctest_namespace: dict[str, Any]) -> None:
    """Give doctests what a reader of the README has at hand."""
    # These overlay the globals of the module under test, so no public name may mean two things.
    public = {name: getattr(visionpos, name) for name in visionpos.__all__}
    doctest_namespace.update(public, torch=torch, vp=visionpos)
