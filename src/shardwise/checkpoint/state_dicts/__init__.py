"""State dicts by parameter names: the parts of `shardwise.checkpoint.state_dict`."""
