"""How many tensors a measurement holds at the same time, by their kinds: what memory is planned with. Without torch."""

from __future__ import annotations

STATES, HEADS, INNER = 6, 5, 4
"""Tensors of one token that a decoder layer holds at the same time, at most: as wide as the residual stream, as all
heads together, and as the inside of the feed-forward part."""

SLACK = 1.5
"""Factor for memory that the allocator keeps between tensors: 1.4 was seen with tensors too small to be given back."""

ROWS = 3
"""Copies of the sampled rows at the same time: logits, their exponentials, and one in between. Models that scale their
queries by position hold twice as many, which is little beside the slack of their activations."""

LIBRARIES = 500 * 10**6
"""What Python holds with torch and transformers imported, besides weights."""
