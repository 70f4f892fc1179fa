"""Renderers and parsers from the package `renderers`, one for each model family."""
