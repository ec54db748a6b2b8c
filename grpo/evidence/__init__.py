"""What the figures of a run are: held-out conversations, metrics, statistics."""
