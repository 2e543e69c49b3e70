"""What `parity` does: compares a sharded program with the same program on one device."""
