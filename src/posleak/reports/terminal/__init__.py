"""Results as tables for the terminal, one module per kind of result. Every number has its interval; –: undefined."""
