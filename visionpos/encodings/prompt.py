"""Prompt encoder of SAM and SAM 2: clicks, boxes and masks become tokens by one Fourier map of image positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from visionpos.encodings.doors import Dims
from visionpos.encodings.guard import Guarded
from visionpos.encodings.sources import filled, renamed
from visionpos.errors import PositionError
from visionpos.geometry import prompts
from visionpos.geometry.coords import CoordSpec, coordinates
from visionpos.geometry.fields import check_fields
from visionpos.geometry.freqs import angles, gaussian_freqs
from visionpos.geometry.grid import Grid
from visionpos.geometry.image_frame import BoxForm, Centre, ImageFrame, PointOrder, Resize, Unit
from visionpos.geometry.lattice import crossed_waves, ticks
from visionpos.geometry.precision import bits_of, floats_of
from visionpos.geometry.ranges import check_sigma

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_FULL_TURN = 6.283185307179586
_FIXED = ("input_hw", "resize", "centre", "quantise")  # what a frame has from the encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """Settings of a prompt encoder.

    Args:
        input_hw: height and width in pixels of the model's input, padding included.
        patch: pixels a side of a cell of the image embedding.
        sigma: standard deviation of the random frequencies, in turns per half input side. SAM and SAM 2 use 1;
            transformers' SamConfig takes half the vision width (384), with which a click does not find its own cell.
        mask_channels: hidden channels of the mask path.
        resize: how an image enters the input: "pad" (SAM) or "stretch" (SAM 2).
        not_a_point: when a padding token follows: "without_boxes" (SAM) or "always" (SAM 2).
        corners: where a box's two tokens stand: "after" the points (SAM, transformers' SAM 2) or "before" them (SAM 2).
        corner_labels: whether points may carry the labels 2 and 3 of box corners (SAM 2). SAM's encoder takes them
            and silently adds no label vector; here they are refused.
        centre: how pixel numbers scale, as in `ImageFrame`; so is quantise.

    Raises:
        PositionError: if the input is no multiple of the patch, or a number or choice is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["prompt"] = "prompt"
    input_hw: tuple[int, int] = (1024, 1024)
    patch: int = 16
    sigma: float = 1.0
    mask_channels: int = 16
    resize: Resize = "pad"
    not_a_point: Literal["without_boxes", "always"] = "without_boxes"
    corners: Literal["after", "before"] = "after"
    corner_labels: bool = False
    centre: Centre = "reference"
    quantise: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        Grid.of_image(self.input_hw, self.patch)
        check_sigma(self.sigma)
        if self.mask_channels < 4 or self.mask_channels % 4:
            raise PositionError(f"mask_channels is {self.mask_channels}; 4, 8, ... is required.")


class _ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of a map `[b, c, h, w]`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _halved(inner: int, outer: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inner, outer, 2, stride=2), _ChannelNorm(outer, eps=1e-6), nn.GELU()


class PromptEncoder(Guarded):
    """Clicks, boxes and masks as tokens for a mask decoder, and the matching code of every image cell.

    What enters the model: sparse tokens beside the decoder's queries, a dense vector added to every image cell, and
    `grid_code` added to the cells' queries and keys. All positions go through one map, x and y on [-1, 1] of the whole
    input frame, so a click on a cell's centre has that cell's code, and two codes at distance d have about
    `exp(-(2 pi sigma d)^2 / 2)` of the dot product of equal ones.

    The random frequencies belong to the checkpoint but must not be cast with it: the buffer `frequency_bits` (uint8)
    holds the bits of their float32 values, which `.to(bfloat16)`, mixed precision and moving averages leave alone; so
    angles are formed in float32. Tokens come back in the dtype of the label vectors.

    Raises:
        PositionError: if embed_dim is odd.

    Example:
        >>> encoder = PromptEncoder(PromptSpec(), Dims(embed_dim=256, num_heads=8, depth=2))
        >>> clicks, labels = torch.tensor([[960.0, 300.0], [10.0, 1199.0]]), torch.tensor([1, 0])
        >>> sparse, dense = encoder(encoder.frame((1200, 1920)), points=clicks, labels=labels)
        >>> sparse.shape, dense.shape
        (torch.Size([3, 256]), torch.Size([4096, 256]))

    Reference:
        SAM (arXiv 2304.02643), facebookresearch/segment-anything modeling/prompt_encoder.py; SAM 2 (arXiv 2408.00714),
        facebookresearch/sam2 sam2_image_predictor.py; transformers sam, sam2. Deliberate differences: coordinates come
        with their frame and are checked; maps are `[n, embed_dim]`, row-major.
    """

    frequency_bits: Tensor

    def __init__(
        self, spec: PromptSpec, dims: Dims, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, dims
        width, hidden = dims.embed_dim, spec.mask_channels
        if width % 2:
            raise PositionError(f"embed_dim is {width}; an even number is required.")
        drawn = gaussian_freqs(width // 2, sigma=spec.sigma, generator=generator)  # row 0 is x
        self.register_buffer("frequency_bits", bits_of(drawn.flip(0)))
        self.label_vectors = nn.Parameter(torch.empty(4, width))
        self.not_a_point = nn.Parameter(torch.empty(1, width))
        self.no_mask = nn.Parameter(torch.empty(1, width))
        for vectors in (self.label_vectors, self.not_a_point, self.no_mask):
            nn.init.normal_(vectors, generator=generator)
        halves = (*_halved(1, hidden // 4), *_halved(hidden // 4, hidden))
        self.mask = nn.Sequential(*halves, nn.Conv2d(hidden, width, 1))

    @property
    def freqs(self) -> Tensor:
        """Return `[2, pairs]` float32 radians per half input side, axes y, x."""
        return floats_of(self.frequency_bits)

    @property
    def grid(self) -> Grid:
        """Return the grid of the image embedding."""
        return Grid.of_image(self.spec.input_hw, self.spec.patch)

    def frame(
        self,
        source_hw: tuple[int, int],
        *,
        unit: Unit = "pixels",
        order: PointOrder = "xy",
        box_form: BoxForm = "xyxy",
    ) -> ImageFrame:
        """Return the frame of prompts on an image of this size; the choices are `ImageFrame`'s."""
        fixed = {name: getattr(self.spec, name) for name in _FIXED}
        return ImageFrame(source_hw=source_hw, unit=unit, order=order, box_form=box_form, **fixed)

    def forward(
        self,
        frame: ImageFrame,
        *,
        points: Tensor | None = None,
        labels: Tensor | None = None,
        boxes: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return sparse tokens and dense vectors of prompts, checked: compile `sparse` and `dense`, not this.

        Args:
            frame: what the coordinates refer to, from `self.frame(source_hw)`.
            points: `[..., k, 2]` in that frame.
            labels: `[..., k]`: 1 positive, 0 negative, -1 not a point, -10 ignored (zeros), 2 and 3 corners.
            boxes: `[..., 4]` in that frame, one for each set of points.
            masks: `[..., height, width]` logits in the input frame, 4 a cell side; see `ImageFrame.mask`. One a set, or
                one for several: their leading sizes are the first of the points' or boxes'.

        Returns:
            `[..., tokens, embed_dim]`, and `[..., n, embed_dim]` over `self.grid`, row-major.

        Raises:
            PositionError: if the frame is another model's, a label is unknown, or coordinates or masks do not fit it.
        """
        prompts.check_frame(frame, self.spec, _FIXED)
        if points is not None or labels is not None:
            if points is None or labels is None:
                raise PositionError("points or labels are None; both are required. Give both.")
            prompts.check_labels(labels, corners=self.spec.corner_labels)
            points = frame.points(points, labels)
        boxes = None if boxes is None else frame.boxes(boxes)
        prompts.check_lead(points, boxes, masks)
        sparse = self.sparse(points, labels, boxes)
        return sparse, self.dense(masks, tuple(sparse.shape[:-2]))

    def sparse(
        self, points_xy: Tensor | None, labels: Tensor | None, boxes_xyxy: Tensor | None
    ) -> Tensor:
        """Return `[..., tokens, embed_dim]` of prompts in input pixels, as `ImageFrame` gives them; unchecked.

        Tokens of a box, k points, both: 2, k + 1, k + 2 in SAM; 3, k + 1, k + 3 in SAM 2; none without prompts.
        """
        parts: list[Tensor] = []
        if points_xy is not None and labels is not None:
            parts.append(self._labelled(points_xy, labels))
        if boxes_xyxy is not None:
            corners = boxes_xyxy.unflatten(-1, (2, 2))
            pair = corners.new_tensor([prompts.TOP_LEFT, prompts.BOTTOM_RIGHT])
            token = self._labelled(corners, pair.expand(corners.shape[:-1]))
            parts.insert(0 if self.spec.corners == "before" else len(parts), token)
        if not parts:
            return self.label_vectors.new_empty((0, self.dims.embed_dim))
        if boxes_xyxy is None or self.spec.not_a_point == "always":
            parts.append(self.not_a_point.expand(*parts[0].shape[:-2], 1, -1))
        return torch.cat(parts, dim=-2)

    def _labelled(self, points_xy: Tensor, labels: Tensor) -> Tensor:
        """Return `[..., k, embed_dim]`: the code of a place plus its label's vector."""
        height, width = self.spec.input_hw
        points_xy = points_xy.to(torch.promote_types(torch.float32, points_xy.dtype))
        places = (points_xy + 0.5) / points_xy.new_tensor([width, height]) * 2.0 - 1.0
        vectors = self.label_vectors[labels.long().clamp(min=0)]
        token = (self.code(places.flip(-1)) + vectors).to(vectors.dtype)
        kind = labels.unsqueeze(-1)
        token = torch.where(kind == prompts.NOT_A_POINT, self.not_a_point, token)
        return torch.where(kind == prompts.IGNORED, torch.zeros_like(token), token)

    def code(self, coords_yx: Tensor) -> Tensor:
        """Return `[..., n, embed_dim]`, the Fourier code of places on [-1, 1], float32 or better."""
        (y, x), (down, right) = coords_yx.split(1, dim=-1), self.freqs.split(1)
        return crossed_waves(angles(y, down), angles(x, right))

    def grid_code(self, grid: Grid | None = None) -> Tensor:
        """Return `[n, embed_dim]`, the code of every cell's centre; the embedding's grid when None."""
        grid = grid or self.grid
        cells = coordinates(grid, CoordSpec(unit="centred"), device=self.frequency_bits.device)
        lines = zip(ticks(cells, grid), self.freqs.split(1), strict=True)
        high, wide = (angles(tick.unsqueeze(-1), freqs) for tick, freqs in lines)
        code = crossed_waves(high.unsqueeze(1), wide).flatten(0, 1)
        return code.repeat(grid.frames, 1).to(self.label_vectors.dtype)

    def dense(self, masks: Tensor | None, lead: tuple[int, ...] = ()) -> Tensor:
        """Return `[..., n, embed_dim]`: masks `[..., 4 * rows, 4 * columns]` through the mask path, or no mask.

        Raises:
            PositionError: if the masks do not have 4 values a cell side.
        """
        grid = self.grid
        if masks is None:
            # Cloned, small as it is: an edit of the result must not reach the parameter.
            return self.no_mask.clone().expand(*lead, grid.size, -1)
        size_hw = (4 * grid.height, 4 * grid.width)
        if tuple(masks.shape[-2:]) != size_hw:
            raise PositionError(
                f"masks have size {tuple(masks.shape[-2:])}; {size_hw} is required, the whole input frame with its "
                "padding. Bring a mask of the source image there with frame.mask(mask, ...)."
            )
        flat = masks.unsqueeze(0).flatten(0, -3).unsqueeze(1)  # [sets, 1, 4 * rows, 4 * columns]
        maps: Tensor = self.mask(flat.to(self.no_mask.dtype))
        return maps.flatten(2).mT.reshape(*masks.shape[:-2], grid.size, self.dims.embed_dim)

    @classmethod
    def from_source(
        cls, state: Mapping[str, Tensor], spec: PromptSpec, dims: Dims
    ) -> PromptEncoder:
        """Return the encoder with the weights of segment-anything, sam2 or transformers.

        Args:
            state: of the prompt encoder or of the whole model, whose other parts are left out.
            spec: the filling.
            dims: embed_dim is the width of a token.

        Raises:
            PositionError: if entries are missing or misshapen, or transformers' two copies of the frequencies differ.
        """
        own = renamed(state, _TAILS)
        rows = [own.pop(f"row.{row}") for row in range(4) if f"row.{row}" in own]
        if len({row.shape for row in rows}) > 1:
            shapes = [tuple(row.shape) for row in rows]
            raise PositionError(f"label vectors have shapes {shapes}; (1, embed_dim) is required.")
        if rows:  # four tables of one row
            own["label_vectors"] = torch.cat(rows)
        if "turns_xy" in own:
            turns = _FULL_TURN * own.pop("turns_xy").to(torch.float32)
            own["frequency_bits"] = bits_of(turns.flip(0))
        return filled(cls(spec, dims), own, source="the checkpoint")


_MASK = {"conv1": 0, "layer_norm1": 1, "conv2": 3, "layer_norm2": 4, "conv3": 6}  # transformers
_TAILS = {  # end of a source's key -> name here
    "not_a_point_embed.weight": "not_a_point",
    "no_mask_embed.weight": "no_mask",
    "point_embed.weight": "label_vectors",
    "pe_layer.positional_encoding_gaussian_matrix": "turns_xy",
    "shared_embedding.positional_embedding": "turns_xy",
    "shared_image_embedding.positional_embedding": "turns_xy",
    **{f"point_embed{end}.{row}.weight": f"row.{row}" for row in range(4) for end in ("", "dings")},
}
for _leaf in ("weight", "bias"):
    _TAILS |= {f"mask_embed.{name}.{_leaf}": f"mask.{i}.{_leaf}" for name, i in _MASK.items()}
    _TAILS |= {f"mask_downscaling.{i}.{_leaf}": f"mask.{i}.{_leaf}" for i in _MASK.values()}
