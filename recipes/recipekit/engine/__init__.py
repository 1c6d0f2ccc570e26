"""The engines that train a model: DeepSpeed, DDP and FSDP2 behind one protocol."""
