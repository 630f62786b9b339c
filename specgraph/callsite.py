"""Which line of the user's code is running."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch

_LIBRARY_DIRS = tuple(f"{Path(file).resolve().parent}/" for file in (__file__, torch.__file__))


def _is_library(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    return filename.startswith(_LIBRARY_DIRS) or filename.startswith("<")


def _short(filename: str) -> str:
    """The path below the import path entry it was found on, so that plans agree between machines."""
    roots = [entry for entry in sys.path if entry and filename.startswith(f"{entry}/")]
    return filename[len(max(roots, key=len)) + 1 :] if roots else filename


def _describe(frame: FrameType, line: int) -> str:
    return f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"


def user_line() -> str:
    """The innermost running line outside torch and specgraph, as `file:line in function`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    return "" if frame is None else _describe(frame, frame.f_lineno)


def raising_line(error: BaseException) -> str:
    """The innermost line outside torch and specgraph that `error` came through."""
    found = ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        if not _is_library(traceback.tb_frame):
            found = _describe(traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found
