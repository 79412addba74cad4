"""Real pixels for the planner: photos and video files in, RGB tensors and true seconds out.

A path enters; `[..., 3, height, width]` tensors, the seconds of the sampled frames and flattened
patches leave. The only package that imports cv2 (when a video is opened), torchvision and PIL.
"""

from visionpos.vlm.pixels.patching import patches, resize
from visionpos.vlm.pixels.photos import photo, photo_size_hw
from visionpos.vlm.pixels.probing import VideoInfo, video_info
from visionpos.vlm.pixels.reading import VideoFrames, frames
from visionpos.vlm.pixels.sampling import FrameSpec, frame_indices

__all__ = [
    "FrameSpec",
    "VideoFrames",
    "VideoInfo",
    "frame_indices",
    "frames",
    "patches",
    "photo",
    "photo_size_hw",
    "resize",
    "video_info",
]
