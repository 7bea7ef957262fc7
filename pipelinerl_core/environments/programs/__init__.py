"""Programs that run under another interpreter; the folder is the first entry of their sys.path."""
