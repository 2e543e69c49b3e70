"""The format of checkpoints as data: index, dtypes, checksum, and the encoding of nested states."""
