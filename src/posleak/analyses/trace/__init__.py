"""Stage 7, where position comes from: this layer's own mask, earlier layers' masks, or position 0, by intervention."""
