"""The comparison of `parity`: a sharded program against the same program on one device."""
