"""Which arithmetic runs on the device."""
