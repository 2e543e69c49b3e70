"""The version of torch that the tests run on, for what differs between the versions that are supported."""

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def needs_torch(major: int, minor: int, reason: str) -> pytest.MarkDecorator:
    """Skips a test on an older torch; the reason says what that one does instead."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"torch {torch.__version__}: {reason}")
