"""What scripts/benchmark.py measures: cases.py (ops, shapes, inputs, whose call), measure.py (numbers), report.py."""
