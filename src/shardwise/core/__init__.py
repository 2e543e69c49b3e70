"""Pure data: placements, meshes, layouts, specs. No communication, no torch.distributed."""
