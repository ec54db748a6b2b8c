"""Scores become weights: advantages, losses, the policy under DeepSpeed, and the training loop."""
