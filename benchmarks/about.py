"""Where and with what a benchmark ran."""

from __future__ import annotations

import datetime
import platform

import torch


def about() -> dict[str, str | None]:
    """Date, card, driver-independent versions."""
    has_gpu = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name() if has_gpu else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
