"""Experiments: one file a system, at a size that runs on two cores.

The comparison of the methods is `dubito.experiments.compare.compare`; the function is not imported here, where it
would hide the module of its name.
"""

from dubito.experiments.methods import METHODS, Job, Method, Trained, UnknownMethodError

__all__ = ["METHODS", "Job", "Method", "Trained", "UnknownMethodError"]
