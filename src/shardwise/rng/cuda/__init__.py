"""Random numbers of one CUDA device for blocks of a tensor: Philox by element index."""
