"""The object store: file://, memory://, s3://."""
