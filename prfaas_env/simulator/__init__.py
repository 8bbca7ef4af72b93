"""The world model: shared formulas, the link, the engines, the metrics."""
