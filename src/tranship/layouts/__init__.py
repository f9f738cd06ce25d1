"""Layouts as pure data: boxes of named tensors."""

from tranship.layouts.pieces import Box, Layout, Piece, box_size, full_box, intersect, subtract

__all__ = ["Box", "Layout", "Piece", "box_size", "full_box", "intersect", "subtract"]
