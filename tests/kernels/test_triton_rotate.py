"""The Triton rotation: its kernels in the interpreter against float64, and what a launch refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from visionpos.errors import PositionError
from visionpos.kernels.triton_language import interpreted
from visionpos.kernels.triton_rotate import launch_norm_rotate, launch_rotate, launch_rotate_coords
from visionpos.kernels.triton_sources import Tables

ROOT = Path(__file__).resolve().parents[2]
# At least so many cases must have run: an empty answer is no pass.
LEAST = {"tables": 36, "coords": 24, "backward": 20, "norm": 30, "dispatch": 43}


# The whole way from the public functions, and the gradients, at every run; each launcher by itself in the slow one.
GROUPS = [
    pytest.param(group, marks=() if group in ("backward", "dispatch") else pytest.mark.slow)
    for group in LEAST
]


@pytest.mark.parametrize("group", GROUPS)
def test_reference_interpreted(group: str) -> None:
    """Every case of the group agrees with its float64 oracle; interpreting needs a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.interpreted", group]
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout)
    assert len(found) >= LEAST[group]
    wrong = [f"{name}: {text}" for name, text in found.items() if text is not None]
    assert not wrong, "\n".join(wrong)


def test_interpreter_stays_out_of_this_process() -> None:
    assert not interpreted()


Q, ANGLES = torch.zeros(2, 3, 7, 64), torch.zeros(7, 32)
REFUSED = {
    "device": ({}, "q is on 'cpu'; a CUDA tensor"),
    "pairing": ({"pairing": "half_per_axis"}, "pairing is 'half_per_axis'"),
    "tokens": ({"prefix": 1}, "q has 7 tokens, the angles 7, prefix is 1"),
    "negative": ({"prefix": -1, "suffix": 1}, "prefix is -1"),
    "dtype": ({"q": Q.double()}, "torch.float64"),
    "channels": ({"q": Q[..., :62]}, "head_dim at least 2"),
    "rank": ({"q": Q[0]}, r"\[b, heads, n, head_dim\]"),
    "lengths": ({"k": Q[:, :, :6]}, "k=None"),
    "tables": ({"sin": ANGLES[:, :31]}, "equal shapes"),
    "heads": ({"cos": torch.zeros(2, 7, 32), "sin": torch.zeros(2, 7, 32)}, "for 2 heads"),
    "samples": (
        {"cos": torch.zeros(3, 1, 7, 32), "sin": torch.zeros(3, 1, 7, 32)},
        r"\(3,\) samples and q holds 2",
    ),
    "output": ({"out_q": torch.zeros(2, 3, 7, 63)}, "they must agree"),
    "output dtype": ({"out_q": Q.half()}, "they must agree"),
    "output strides": (
        {"out_q": torch.zeros(2, 1, 7, 64).expand(2, 3, 7, 64)},
        "elements of their own",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_error_tables(case: str) -> None:
    change, message = REFUSED[case]
    given = {"q": Q, "k": Q, "cos": ANGLES, "sin": ANGLES, **change}
    with pytest.raises(PositionError, match=message):
        launch_rotate(**given)


@pytest.mark.parametrize(
    ("coords", "freqs", "options", "message"),
    [
        (torch.zeros(2, 7), torch.zeros(3, 32), {}, "for 2 axes"),
        (torch.zeros(2, 7), torch.zeros(32), {}, r"freqs is \(32,\)"),
        (torch.zeros(2, 7), torch.zeros(2, 32), {"axis_of_pair": torch.zeros(2, 32)}, "freqs is"),
        (torch.zeros(2, 7), torch.zeros(32), {"axis_of_pair": torch.zeros(32)}, "axis_of_pair is"),
        (torch.zeros(3, 2, 7), torch.zeros(2, 32), {}, r"\(3,\) samples"),
        (torch.zeros(2, 7), torch.zeros(2, 32), {"accuracy": "best"}, "accuracy is 'best'"),
        (torch.zeros(2, 7), torch.zeros(5, 2, 32), {}, "for 5 heads"),
    ],
)
def test_error_coords(coords, freqs, options, message) -> None:
    with pytest.raises(PositionError, match=message):
        launch_rotate_coords(Q, Q, coords, freqs, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "batch"}, "norm is 'batch'"),
        ({"norm": "rms", "rounding": "thrice"}, "rounding 'thrice'"),
        ({"norm": "rms", "weight_q": torch.zeros(32)}, r"weight_q has shape \(32,\)"),
        ({"norm": "rms", "bias_k": torch.zeros(128)[::2]}, "bias_k"),
    ],
)
def test_error_norm(options, message) -> None:
    with pytest.raises(PositionError, match=message):
        launch_norm_rotate(Q, Q, Tables(ANGLES, ANGLES), **options)


def test_import_without_triton() -> None:
    """Without triton the files import, and a launch names what is missing."""
    code = (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'triton' else real(name, *rest)\n"
        "import visionpos.kernels.triton_backward, visionpos.kernels.aot\n"
        "import torch, sys; from visionpos.kernels.triton_rotate import launch_rotate\n"
        "x = torch.zeros(1, 1, 1, 2); t = torch.zeros(1, 1)\n"
        "try: launch_rotate(x, x, t, t)\n"
        "except ImportError as error: sys.exit(0 if 'triton is not installed' in str(error) else 3)\n"
        "sys.exit(4)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
