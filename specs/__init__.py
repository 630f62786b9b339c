"""Typed specs of real models, one file each."""
