"""Step kinds of the market report: candles, charts, report."""
