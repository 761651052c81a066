"""Questions asked of a model, one folder each, all built on `runs`: trace, origin, doctor, claims, advise."""
