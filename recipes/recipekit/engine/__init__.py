"""Training engines: DeepSpeed, DDP and FSDP2 behind one protocol."""
