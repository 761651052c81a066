"""Sources of leakage, by intervention: this layer's own mask, masks of earlier layers, or position 0."""
