"""Singular Bayesian neural networks: low-rank factors against the baselines of the paper."""
