"""Penstock leads data from where it arises to where it is served."""

__version__ = "0.1.0"
