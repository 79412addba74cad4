"""OpenCV, loaded when a video is opened or a family resizes with it: heavy, and absent or broken on many servers."""

from types import ModuleType


def opencv() -> ModuleType:
    """Return the module cv2.

    Raises:
        ImportError: if it is absent or cannot be loaded.
    """
    try:
        import cv2
        from cv2 import VideoCapture  # noqa: F401  (a half-removed cv2 imports, empty)
    except ImportError as error:
        raise ImportError(
            f"cv2 cannot be loaded ({error}); videos, and families that resize with it, require OpenCV. Run `pip "
            "install opencv-python-headless`, after `pip uninstall opencv-python` where libGL is missing."
        ) from error
    return cv2
