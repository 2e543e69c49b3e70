"""The operators that resize images, by name. Apart from their rules, because dispatch asks for them at import."""

from __future__ import annotations

__all__ = ["INTERPOLATIONS"]

# by name: how many dims, which kind of resampling, whether smoothed
INTERPOLATIONS = {
    "upsample_nearest1d": (1, "nearest", False),
    "upsample_nearest2d": (2, "nearest", False),
    "upsample_nearest3d": (3, "nearest", False),
    "_upsample_nearest_exact1d": (1, "nearest-exact", False),
    "_upsample_nearest_exact2d": (2, "nearest-exact", False),
    "_upsample_nearest_exact3d": (3, "nearest-exact", False),
    "upsample_linear1d": (1, "linear", False),
    "upsample_bilinear2d": (2, "linear", False),
    "upsample_trilinear3d": (3, "linear", False),
    "upsample_bicubic2d": (2, "cubic", False),
    "_upsample_bilinear2d_aa": (2, "linear", True),
    "_upsample_bicubic2d_aa": (2, "cubic", True),
}
