"""Object stores: checkpoints saved to a local server of S3's protocol, and loaded from it."""
