"""Data parallel modules: `fully_shard`, `replicate`, and the engine under both."""
