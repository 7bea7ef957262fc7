"""The outputs about one run: report.json, report.html, weights.parquet, the live view and the live page."""
