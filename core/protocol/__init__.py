"""What travels between machines: message types, their msgpack codec, and tensors as bytes. No I/O."""
