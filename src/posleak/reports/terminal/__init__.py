"""Results as tables for the terminal, one module per group of commands. Every number has its interval; –: undefined."""
