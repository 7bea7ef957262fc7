"""Shipped fakes and builders for tests."""
