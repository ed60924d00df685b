"""Repeats published measurements on emulated devices and computes the errors."""
