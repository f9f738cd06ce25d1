"""Layouts as pure data: boxes of named tensors."""

from tranship.layouts.pieces import Box, Layout, Piece, box_size, full_box, intersect, subtract
from tranship.layouts.share import Share, cut, scaled

__all__ = ["Box", "Layout", "Piece", "Share", "box_size", "cut", "full_box", "intersect", "scaled", "subtract"]
