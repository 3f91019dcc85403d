"""dubito: Bayesian deep learning in PyTorch. Any module, called with random weights."""
