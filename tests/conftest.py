"""What every test has: a device, a seed, one thread, a Hypothesis profile, `gpu` that skips."""

import os
import sys
from collections.abc import Callable

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.register_profile(
    "ci", parent=hypothesis.settings.get_profile("default"), derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


class TorchRandom:
    """torch's global generator, which Hypothesis then seeds alike before every example."""

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


TORCH_RANDOM = TorchRandom()  # Hypothesis keeps a weak reference
hypothesis.register_random(TORCH_RANDOM)

# xdist runs one worker a core: more threads fight each other, and sums change their order.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


# Session scope, so that Hypothesis lets a @given test ask for it.
@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is: the CPU, and one CUDA device where a machine has it."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch's global generator before every test, and return the seed."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `visionpos ...` in this process and return (exit code, standard output, standard error)."""
    from visionpos import cli

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["visionpos", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return call
