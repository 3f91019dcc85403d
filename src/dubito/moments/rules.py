"""Fills the table of rules: importing this registers every kind of operator."""

from dubito.moments import (
    rules_arithmetic,
    rules_attention,
    rules_bilinear,
    rules_elementwise,
    rules_normalization,
    rules_pooling,
    rules_shape,
)

KINDS = (
    rules_arithmetic,
    rules_attention,
    rules_bilinear,
    rules_elementwise,
    rules_normalization,
    rules_pooling,
    rules_shape,
)
