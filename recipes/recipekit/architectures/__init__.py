"""What a published model folder says of itself: config.json, its shape numbers, and the headers of
its safetensors files.
"""
