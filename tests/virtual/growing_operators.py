"""Operators that cost a rank more with every further rank in some layout, and why; read by `scaling`."""

# By key: the reason, and the operators of torch's test database that it holds for.
REASONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "diagonals": (
        "A diagonal crosses the shards of two dims; a matrix made from one has a column for each of its elements.",
        (
            "diagonal", "diag", "diag_embed", "diagflat", "diagonal_copy", "diagonal_scatter", "block_diag",
            "linalg.diagonal",
        ),
    ),
    "strides": (
        "Elements (of stft: its frames) are taken by places in the memory of the global tensor, so it is gathered.",
        (
            "as_strided", "as_strided.partial_views", "as_strided_copy", "as_strided_scatter", "resize_", "resize_as_",
            "stft",
        ),
    ),
    "matrices": (
        "A factorisation needs all of a matrix; its rows or columns are sharded.",
        (
            "lu_solve", "lu", "lu_unpack", "qr", "ormqr", "triangular_solve", "pinverse", "svd_lowrank", "pca_lowrank",
            "norm.nuc", "linalg.cond", "linalg.householder_product", "linalg.ldl_factor", "linalg.qr",
            "linalg.lu_factor", "linalg.lu_factor_ex", "linalg.lu", "linalg.matrix_rank", "linalg.pinv",
            "linalg.pinv.singular", "linalg.svdvals",
        ),
    ),
    "transforms": (
        "A Fourier transform reads all elements of a dim for each result; that dim is sharded, and no other can be.",
        (
            "fft.fft", "fft.fftn", "fft.hfft", "fft.hfftn", "fft.rfft", "fft.rfftn", "fft.ifft", "fft.ifftn",
            "fft.ihfft", "fft.ihfftn", "fft.irfft", "fft.irfftn",
        ),
    ),
    "pairs": (
        "Each result is of a pair of rows: every rank needs the rows of all others, and pairs outnumber rows.",
        ("cdist", "nn.functional.pdist"),
    ),
    "windows": (
        "The number of results along the dim is fixed: each is made of a window that gets longer with the ranks.",
        (
            "nn.functional.adaptive_max_pool1d", "nn.functional.adaptive_max_pool2d",
            "nn.functional.adaptive_avg_pool1d", "nn.functional.adaptive_avg_pool2d",
            "nn.functional.adaptive_avg_pool3d", "nn.functional.interpolate.area",
            "nn.functional.interpolate.nearest", "nn.functional.interpolate.nearest-exact",
            "nn.functional.interpolate.bilinear", "nn.functional.interpolate.bicubic",
            "nn.functional.interpolate.trilinear", "nn.functional.upsample_nearest", "_upsample_bilinear2d_aa",
        ),
    ),
    "results": (
        "The number of results grows with the sharded dim, and each has fewer rows than there are ranks.",
        ("split", "unsafe_split", "unbind", "unbind_copy"),
    ),
    "draws": (
        "Which elements draw a random number, or are drawn, depends on the values of others, so all are gathered.",
        ("nn.functional.rrelu", "multinomial"),
    ),
    "plain": (
        "torch makes a plain tensor for all rows or channels of the global one: two random numbers, a causal mask.",
        ("nn.functional.fractional_max_pool2d", "nn.functional.scaled_dot_product_attention"),
    ),
    "order": (
        (
            "Elements are numbered in the order of the global tensor. Not sharded by its first dim, or broadcast, it "
            "is gathered; an exchange to shards of the first dim is not tried."
        ),
        ("masked_scatter",),
    ),
    "places": (
        "Values say which rows of the sharded dim are read. It is gathered; an exchange by owner is not done.",
        (
            "nn.functional.grid_sample", "grid_sampler_2d", "grid_sampler_3d", "_segment_reduce.lengths",
            "_segment_reduce.offsets", "_unsafe_masked_index",
        ),
    ),
    "groups": (
        "Channels of a grouped convolution are sharded over more ranks than there are groups. They are gathered.",
        (
            "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose1d",
        ),
    ),
    "transposed": (
        (
            "Channels of groups, as above. For some output paddings and dilations of a transposed convolution no halo "
            "is taken, and the dim is gathered."
        ),
        ("nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d"),
    ),
    "rules": (
        (
            "Has no rule for the sharded dim, and gathers it. Chunks of the loss are one operator in torch; "
            "F.cross_entropy of F.linear is flat. The others are internal, or need a reduction by exclusive or."
        ),
        (
            "nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none",
            "_chunk_cat", "hash_tensor",
        ),
    ),
}  # fmt: skip
GROWING = {name: reason for reason, names in REASONS.values() for name in names}
