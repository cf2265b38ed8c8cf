"""Tools for whole programs: run, verify, inspect and advise."""
