"""What benchmarks compare with: other libraries on the same task."""
