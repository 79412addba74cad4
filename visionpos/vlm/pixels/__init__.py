"""Real pixels for the planner: photos and video files in, RGB tensors and true seconds out.

A path enters; `[..., 3, height, width]` tensors, the seconds of the sampled frames and flattened
patches leave; `prepare` applies a family's plan to photos and clips. The only package that imports
cv2 (when it is needed), torchvision and PIL.
"""

from visionpos.vlm.pixels.drawing import draw_tokens, write_png
from visionpos.vlm.pixels.patching import patches
from visionpos.vlm.pixels.photos import photo, photo_size_hw
from visionpos.vlm.pixels.preparing import EncoderInput, prepare
from visionpos.vlm.pixels.probing import VideoInfo, video_info
from visionpos.vlm.pixels.reading import VideoFrames, frames
from visionpos.vlm.pixels.resampling import resize
from visionpos.vlm.pixels.sampling import FrameSpec, frame_indices

__all__ = [
    "EncoderInput",
    "FrameSpec",
    "VideoFrames",
    "VideoInfo",
    "draw_tokens",
    "frame_indices",
    "frames",
    "patches",
    "photo",
    "photo_size_hw",
    "prepare",
    "resize",
    "video_info",
    "write_png",
]
