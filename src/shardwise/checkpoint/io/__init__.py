"""File access: atomic directories, writing blocks, reading byte ranges, boxes and safetensors headers."""
