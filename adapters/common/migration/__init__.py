"""Experts that change ranks, at once or while training goes on. Nothing here knows a host."""
