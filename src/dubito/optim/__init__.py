"""Optimisers and what they are given."""
