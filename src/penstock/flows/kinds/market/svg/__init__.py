"""Candle charts as SVG."""
