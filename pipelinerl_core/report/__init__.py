"""Pages and tables about one run: report.json, report.html, the live view."""
