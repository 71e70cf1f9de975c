"""What the demo, the examples and some tests need and the library itself never imports: a small real model."""
