"""R3: record the experts a sampler chose and replay them in the trainer. Importing this package loads no torch; its modules do."""
