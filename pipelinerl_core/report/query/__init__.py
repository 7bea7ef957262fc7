"""Questions to a run in SQL: the objects of runs as Arrow (reader.py), the views (views.py), DuckDB (database.py)."""
