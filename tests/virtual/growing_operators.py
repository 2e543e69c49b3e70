"""Operators that cost a rank more with every further rank in some layout, and why; read by `scaling`.

Incomplete: `python -m tests.virtual.scaling` lists the operators that grow and have no reason here yet.
"""

# By key: the reason, and the operators of torch's test database that it holds for.
REASONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "diagonals": (
        "A diagonal crosses the shards of two dims; a matrix made from one has a column for each of its elements.",
        ("diagonal", "diag", "diag_embed", "diagonal_copy", "diagonal_scatter", "block_diag"),
    ),
    "strides": (
        "The strides are those of the global tensor in memory, so it is gathered.",
        ("as_strided", "as_strided.partial_views", "as_strided_copy", "as_strided_scatter"),
    ),
    "matrices": ("A factorisation needs all of a matrix.", ("lu_solve", "lu", "lu_unpack")),
    "transforms": ("A Fourier transform reads all elements of a dim for each result.", ("stft",)),
    "pairs": ("Each result is of a pair of rows, so every rank needs the rows of all others.", ("cdist",)),
    "windows": (
        "A fixed number of windows covers the dim: each gets longer with the ranks, beyond the shards of neighbours.",
        (
            "nn.functional.adaptive_max_pool1d",
            "nn.functional.adaptive_max_pool2d",
            "nn.functional.adaptive_avg_pool2d",
            "nn.functional.adaptive_avg_pool3d",
        ),
    ),
    "samples": ("A sample sort sends a few samples of each rank to all others.", ("kthvalue",)),
}
GROWING = {name: reason for reason, names in REASONS.values() for name in names}
