"""Comparing: where the installed transformers and the vendor's rule part."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from visionpos.vlm.hf.attaching import (
    first_difference,
    our_ids,
    own_ids,
    owner_of,
    probes_of,
    rope_index,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """What both say of one prompt.

    Args:
        prompt: its name.
        tokens: number of real tokens of the batch.
        apart: how many of them stand elsewhere.
        first: row and token of the first, None if there is none.
        model: where the model's own method puts that token, one number an axis.
        vendor: where the vendor's rule puts it.
        model_next: next position of each row as the model reckons: delta plus unpadded tokens.
        vendor_next: next position of each row.
    """

    prompt: str
    tokens: int
    apart: int
    first: tuple[int, int] | None
    model: tuple[float, ...]
    vendor: tuple[float, ...]
    model_next: tuple[float, ...]
    vendor_next: tuple[float, ...]

    @property
    def agrees(self) -> bool:
        """Return whether ids and next positions are equal."""
        return not self.apart and self.model_next == self.vendor_next


@dataclass(frozen=True, slots=True)
class Difference:
    """A model's own ids against the vendor's, prompt by prompt."""

    family: str
    rows: tuple[Parting, ...]

    @property
    def agrees(self) -> bool:
        """Return whether all prompts agree."""
        return all(row.agrees for row in self.rows)

    def __str__(self) -> str:
        lines = [
            f"{self.family}: get_rope_index of the installed transformers, and the vendor's rule"
        ]
        for row in self.rows:
            if row.first is not None:
                at = f"row {row.first[0]}, token {row.first[1]}: {list(row.model)} and {list(row.vendor)}"
                says = f"{row.apart} of {row.tokens} tokens part, first at {at}"
            else:
                says = "ids agree"
            if row.model_next != row.vendor_next:
                says += f"; next position {list(row.model_next)} and {list(row.vendor_next)}"
            lines.append(f"  {row.prompt}: {says}")
        return "\n".join(lines)


def diff(model: nn.Module) -> Difference:
    """Return where a model's own `get_rope_index` and the vendor's rule part, on small prompts.

    Images, clips shorter and longer than they are wide, and padded rows are asked about; nothing is changed.

    Args:
        model: as `attach` takes it; weights are not read, so a model on the meta device serves.

    Returns:
        One row a prompt; `str()` is a table to read, `agrees` the verdict.

    Raises:
        PositionError: if the model is not served.
    """
    owner = owner_of(model)
    ours = rope_index(owner, "vendor")
    rows = []
    for probe in probes_of(owner):
        theirs, delta = own_ids(owner, probe)
        mine = our_ids(ours, probe)
        at = first_difference(mine.ids, theirs, probe.mask)
        apart = ((mine.ids.double() - theirs.double()).abs() > 1e-3).any(0) & probe.mask.bool()
        count = probe.mask.sum(1)
        where = ((), ()) if at is None else (theirs[:, *at].tolist(), mine.ids[:, *at].tolist())
        rows.append(
            Parting(
                prompt=probe.name,
                tokens=int(count.sum()),
                apart=int(apart.sum()),
                first=at,
                model=tuple(where[0]),
                vendor=tuple(where[1]),
                model_next=tuple((delta + count).tolist()),
                vendor_next=tuple(mine.next_position.tolist()),
            )
        )
    return Difference(ours.family.name, tuple(rows))
