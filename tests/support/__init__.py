"""Shared by the tests: tiny models, prompts, runs and sweeps, and scripts that tests start as processes."""
