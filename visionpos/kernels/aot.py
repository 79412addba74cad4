"""Kernels compiled ahead of time, without a GPU, and what their machine code says: registers, stack, width of accesses.

The plan of a launch is compiled as a GPU would compile it at that launch: same constants, same hints of alignment.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from visionpos.errors import PositionError
from visionpos.kernels.triton_language import AVAILABLE, interpreted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from visionpos.kernels.triton_plan import Launch

_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_ALIGNED = [["tt.divisibility", 16]]
MAX_REGISTERS = 96
"""A thread above this leaves fewer than five blocks of 128 threads on a multiprocessor, too few to hide memory."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the machine code of one kernel says.

    Args:
        registers: a thread.
        stack: bytes a thread; above 0 it spills or takes a slow path.
        shared: bytes a block.
        loads: global loads by width in bits, `{128: 8}`.
        stores: global stores, like loads.
        spills: accesses to local memory.
    """

    registers: int
    stack: int
    shared: int
    loads: Mapping[int, int]
    stores: Mapping[int, int]
    spills: int

    def faults(self, *, widest: int = 128) -> list[str]:
        """Return what breaks the gate: spills, too many registers, accesses of 16 bits, none of `widest` bits."""
        found = {
            f"{self.stack} bytes of stack": self.stack > 0,
            f"{self.spills} accesses to local memory": self.spills > 0,
            f"{self.registers} registers, at most {MAX_REGISTERS}": self.registers > MAX_REGISTERS,
            f"16-bit loads {dict(self.loads)}": self.loads.get(16, 0) > 0,
            f"16-bit stores {dict(self.stores)}": self.stores.get(16, 0) > 0,
            f"no loads of {widest} bits {dict(self.loads)}": widest not in self.loads,
        }
        return [fault for fault, broken in found.items() if broken]


def compile_launch(launch: Launch, capability: int) -> Report:
    """Return what the machine code of a launch says.

    Args:
        launch: a plan on tensors of any device, whose memory is taken to begin at a multiple of 16 bytes.
        capability: 80 for A100, 90 for H100 and H200.

    Raises:
        ImportError: without triton.
        PositionError: in a process that interprets kernels, which cannot compile them.
    """
    if not AVAILABLE:
        raise ImportError(
            "triton is not installed, and these kernels are written in it. Install a build of torch that brings it."
        )
    if interpreted():
        raise PositionError(
            "TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; compile in a process without it."
        )
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, hints = _specialised(launch.kernel, launch.arguments)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=hints)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=launch.options
    )
    return _read(compiled.asm["cubin"])


def _specialised(
    kernel: Any, arguments: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Return signature, constants and alignment hints as the just-in-time compiler derives them from arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    hints: dict[Any, Any] = {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        fixed = parameter.is_constexpr or value is None
        if fixed or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], hints[place,] = _TYPES[value.dtype], _ALIGNED
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                hints[place,] = _ALIGNED
    return signature, constants, hints


def _read(cubin: bytes) -> Report:
    """Return the report of a cubin, by the disassemblers that come with triton."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "-res-usage", str(path))
        code = _tool("nvdisasm", "-c", str(path))
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    operations = re.findall(r"\b(LDG|STG|LDL|STL)((?:\.\w+)*)", code)
    widths = {
        kind: Counter(_width(parts) for name, parts in operations if name == kind)
        for kind in ("LDG", "STG")
    }
    spills = sum(name in ("LDL", "STL") for name, _ in operations)
    return Report(
        used["REG"], used["STACK"], used.get("SHARED", 0), widths["LDG"], widths["STG"], spills
    )


def _width(suffix: str) -> int:
    """Return the bits of an access from its suffix, `.E.128` or `.E.U16`; 32 is not written."""
    found = re.search(r"\.[US]?(8|16|64|128)\b", suffix)
    return int(found.group(1)) if found else 32


def _tool(name: str, *arguments: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not program.exists():
        raise ImportError(
            f"{program} is missing; reading machine code needs it. Install a complete build of triton."
        )
    command = [str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - triton's own tool
