"""Renderers and parsers of the package `renderers`, one for each model family."""
