"""Questions asked of a model, one folder each, all built on `runs`: trace, circuit, origin, doctor, claims, advise."""
