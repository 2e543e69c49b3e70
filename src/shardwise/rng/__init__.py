"""Random numbers: each rank computes its part of the numbers that one device would draw."""
