"""Uncertainty after training: what is done to a network that is there already."""
