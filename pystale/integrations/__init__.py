"""Adapters that put pystale into training frameworks; each module imports without its framework."""
