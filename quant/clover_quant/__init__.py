"""Quantisation: recipes, importance matrices, quality reports."""
